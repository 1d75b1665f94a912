// The charts of all metrics: in groups, made once, drawn when they are near the screen and something changed.
import { clear, el } from "../dom.js";
import { safeLine } from "../safetext.js";
import { remember, remembered } from "../theme.js";
import { TrainingChart, loadTrainingLibrary } from "./chart.js";
import { trainingRowAt } from "./run_data.js";
import { trainingNumber } from "./axes.js";
import { TRAINING_FIRST, trainingGroups } from "./chart_groups.js";
import { TrainingLines } from "./curves.js";
import { TrainingStack, trainingPhase } from "./phase_stack.js";
import { trainingTip } from "./step_values.js";
import { trainingSwatch } from "./tables.js";

const TRAINING_FRAME_MS = 12; // of drawing; what is left is drawn in the next frame
const TRAINING_NEAR_PX = 200; // from the screen: drawn before it is seen

/** scroller: what scrolls. change(values): the reader changed settings on a chart (`zoom`, `picked`). */
export class TrainingBoard {
  #charts = new Map(); // key -> TrainingChart
  #ofElement = new Map(); // a chart's figure, and its plot -> the chart
  #frame = 0;
  #signature = "";
  #change;

  constructor(scroller, settings, change) {
    this.settings = settings;
    this.#change = change;
    this.element = el("div");
    this.tip = el("div", { class: "training-tip popover", hidden: true });
    this.near = new IntersectionObserver((entries) => this.#seen(entries), { root: scroller, rootMargin: `${TRAINING_NEAR_PX}px` });
    this.sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => this.#redraw(this.#ofElement.get(target))));
    this.themes = new MutationObserver(() => this.#recolour());
    this.themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.system.addEventListener("change", this.#recolour);
    this.#recolour();
    this.ready = false;
    loadTrainingLibrary().then(() => {
      this.ready = true;
      this.#schedule();
    }, (error) => this.element.prepend(el("p", { class: "problem", role: "alert" }, safeLine(error.message))));
  }

  close() {
    cancelAnimationFrame(this.#frame);
    for (const observer of [this.near, this.sizes, this.themes]) observer.disconnect();
    this.system.removeEventListener("change", this.#recolour);
  }

  /** The curves of these runs, as the settings say. */
  show(runs) {
    const { find, axis, smooth, log, fit, zoom } = this.settings;
    const names = [...new Set(runs.flatMap((run) => [...run.data.columns.keys()]))];
    this.flat = new Map(find ? [] : names.map((name) => [name, flatValues(name, runs)]).filter(([, said]) => said !== null));
    const signature = JSON.stringify([names, runs.map((run) => run.id), find, [...this.flat]]);
    if (signature !== this.#signature) this.#arrange(names, runs);
    this.#signature = signature;
    this.view = { runs, axis, smooth, log, fit, span: zoom ?? trainingSpan(runs, axis), isZoomed: Boolean(zoom) };
    this.pickedX = pickedPlace(runs, this.settings);
    for (const chart of this.#charts.values()) {
      chart.dirty = true;
      if (this.tip.hidden) chart.at = this.pickedX;
    }
    this.#schedule();
  }

  /** Rebuilds groups and charts; an existing chart stays the same. */
  #arrange(names, runs) {
    const before = this.#charts;
    this.#charts = new Map();
    this.#ofElement = new Map();
    this.near.disconnect();
    this.sizes.disconnect();
    const closed = remembered("training.closed", {});
    const groups = trainingGroups(names).map((group) => this.#group(group, runs, before, closed)).filter(Boolean);
    const none = el("p", { class: "empty" }, this.settings.find && names.length ? "No metric has such a name." : "No values yet.");
    clear(this.element).append(...(groups.length ? groups : [none]));
    for (const chart of this.#charts.values()) {
      this.#ofElement.set(chart.element, chart).set(chart.plot, chart);
      this.near.observe(chart.element);
      this.sizes.observe(chart.plot);
    }
  }

  #group({ title, open, metrics, phases }, runs, before, closed) {
    const stacked = phases.length && this.settings.finds(phases.join(" ")) ? runs : [];
    const stacks = stacked.map((run) => {
      const said = runs.length > 1 ? `${run.name}: seconds a step` : "seconds a step";
      return this.#chart(`phases ${run.id} ${said} ${phases}`, said, () => new TrainingStack(phases, run.id), phaseLegend(phases), before);
    });
    const made = (name) => this.#chart(name, name, () => new TrainingLines(name), null, before);
    const found = metrics.filter((name) => this.settings.finds(name));
    const isFlat = (name) => this.flat.has(name) && title !== TRAINING_FIRST; // a reward that does not move is news
    const charts = [...stacks, ...found.filter((name) => !isFlat(name)).map(made)];
    const flat = found.filter(isFlat);
    if (!charts.length && !flat.length) return null;
    const toggle = (event) => remember("training.closed", { ...remembered("training.closed", {}), [title]: !event.target.open });
    const grid = el("div", { class: "training-grid" }, charts.map((chart) => chart.element));
    const summary = el("summary", null, title, " ", el("span", { class: "muted" }, String(charts.length + flat.length)));
    return el("details", { class: "training-group", open: !(closed[title] ?? !open), on: { toggle } }, summary, grid, flat.length > 0 && this.#flatPart(flat, made));
  }

  /** The metrics that never change, as one line; their charts are behind it. */
  #flatPart(names, made) {
    const told = names.map((name) => [el("span", { class: "training-flat-one" }, safeLine(name), " ", el("b", { class: "num" }, this.flat.get(name))), " "]);
    const grid = el("div", { class: "training-grid" }, names.map((name) => made(name).element));
    return el("details", { class: "training-flat" }, el("summary", null, el("span", { class: "muted" }, "flat: "), told), grid);
  }

  #chart(key, title, lines, note, before) {
    const hooks = {
      onHover: (chart, x, event) => this.#hover(chart, x, event),
      onPick: (x) => this.#pick(x),
      onZoom: (zoom) => this.#change({ zoom }),
      onResize: () => this.#schedule(),
    };
    const chart = before.get(key) ?? new TrainingChart(lines(), title, note, hooks);
    this.#charts.set(key, chart);
    return chart;
  }

  #seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const chart = this.#ofElement.get(target);
      if (!chart) continue;
      chart.near = isIntersecting;
      if (isIntersecting) this.#redraw(chart);
      else chart.release();
    }
  }

  #redraw(chart) {
    if (!chart) return;
    chart.dirty = true;
    this.#schedule();
  }

  #recolour = () => {
    this.colours = trainingColours();
    for (const chart of this.#charts.values()) this.#redraw(chart);
  };

  #schedule() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      const began = performance.now();
      for (const chart of this.#charts.values()) {
        if (!chart.near || !chart.dirty || !this.view || !this.ready) continue;
        if (performance.now() - began > TRAINING_FRAME_MS) return this.#schedule();
        chart.draw(this.view, this.colours);
      }
    });
  }

  #hover(chart, x, event) {
    const at = x ?? this.pickedX;
    if (chart.at !== at || x === null) for (const one of this.#charts.values()) if (one.near) one.showAt(at, one === chart && x !== null);
    this.tip.hidden = x === null;
    if (x === null) return;
    clear(this.tip).append(...trainingTip(chart.lines, x, this.view));
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const left = event.clientX + 18 + width > innerWidth ? event.clientX - 18 - width : event.clientX + 18;
    this.tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.min(event.clientY + 12, innerHeight - height - 8)}px)`;
  }

  #pick(x) {
    if (x === null) return;
    const step = this.settings.axis === "step" ? x : stepAt(this.view.runs, x);
    this.#change({ picked: step === this.settings.picked ? null : step });
  }
}

/** What a metric that never changes is, "0" or "0 · 0.1" of several runs; null if one of them changes. */
function flatValues(name, runs) {
  const values = runs.filter((run) => run.data.columns.has(name)).map((run) => run.data.constant(name));
  return values.length && values.every((value) => value !== null) ? [...new Set(values.map(trainingNumber))].join(" · ") : null;
}

/** [first, last] x of all runs. */
function trainingSpan(runs, axis) {
  const some = runs.filter((run) => run.data.count).map(({ data }) => [data.along(axis)[0], data.along(axis)[data.count - 1]]);
  return some.length ? [Math.min(...some.map(([first]) => first)), Math.max(...some.map(([, last]) => last))] : [0, 1];
}

/** The position of the selected step on the axis; by time as in the first run. */
function pickedPlace(runs, { picked, axis }) {
  const run = runs.find((one) => one.data.count);
  return picked === null || axis === "step" || !run ? picked : run.data.seconds[trainingRowAt(run.data.steps, picked, run.data.count)];
}

function stepAt(runs, seconds) {
  const near = runs.filter((run) => run.data.count).map(({ data }) => {
    const row = trainingRowAt(data.seconds, seconds, data.count);
    return { step: data.steps[row], far: Math.abs(data.seconds[row] - seconds) };
  });
  return near.reduce((best, one) => (one.far < best.far ? one : best)).step;
}

function phaseLegend(phases) {
  return el("div", { class: "training-legend" }, phases.map((name, colour) => el("span", null, trainingSwatch({ colour }), trainingPhase(name))));
}

/** The page's colours as a canvas takes them. */
function trainingColours() {
  const probe = document.body.appendChild(el("span", { class: "training-probe" }));
  const resolved = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const colours = { grid: resolved("line"), axis: resolved("muted"), muted: resolved("muted"), series: Array.from({ length: 8 }, (_, i) => resolved(`s${i}`)) };
  probe.remove();
  return colours;
}
