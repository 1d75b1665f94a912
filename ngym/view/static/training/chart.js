// One chart by uPlot: drawn only while it is near the screen, with a crosshair above it and a zoom by dragging.
import { button, clear, el } from "../dom.js";
import { safeLine } from "../safetext.js";
import { trainingAxes, trainingNumber, trainingShows } from "./axes.js";

const TRAINING_DRAG_PX = 6;
const TRAINING_LIBRARY = "/static/vendor/uPlot.iife.min.js";
let trainingLibrary = null;

/** uPlot, loaded once. */
export function loadTrainingLibrary() {
  trainingLibrary ??= new Promise((done, failed) => {
    const script = el("script", { src: TRAINING_LIBRARY, on: { load: () => done(window.uPlot), error: () => failed(new Error(`${TRAINING_LIBRARY} cannot be loaded`)) } });
    document.head.append(script);
  });
  return trainingLibrary;
}

/**
 * lines: TrainingLines or TrainingStack. title: the text above. note: a node below it, or null.
 * hooks: {onHover(chart, x|null, event), onPick(x), onZoom([from, to]), onResize(chart)}.
 */
export class TrainingChart {
  #uplot = null;
  #drag = null;

  constructor(lines, title, note, hooks) {
    this.lines = lines;
    this.hooks = hooks;
    this.near = false; // the screen
    this.dirty = true;
    this.drawn = el("div", { class: "training-drawn", role: "img", "aria-label": safeLine(title) });
    this.cross = el("div", { class: "training-cross", hidden: true });
    this.marks = el("div", { class: "training-marks" });
    this.selected = el("div", { class: "training-selected", hidden: true });
    this.plot = el("div", { class: "training-plot" }, this.drawn, this.marks, this.cross, this.selected);
    this.last = el("span", { class: "training-last num" });
    const enlarge = button("⤢", () => this.#enlarge(enlarge), { class: "button quiet icon training-enlarge", title: "Enlarge", "aria-label": `Enlarge ${safeLine(title)}`, "aria-pressed": "false" });
    const head = el("div", { class: "training-head" }, el("h3", { title: safeLine(title) }, safeLine(title)), this.last, enlarge);
    this.element = el("figure", { class: "training-chart" }, head, note, this.plot);
    this.#listen();
  }

  /** shared: {runs, axis, smooth, log, fit, span, isZoomed}. Without a zoom, the chart spans where its metric has values. */
  draw(shared, colours) {
    this.dirty = false;
    const view = shared.isZoomed ? shared : { ...shared, span: this.lines.span(shared) ?? shared.span };
    this.view = view;
    const [width, height] = [this.plot.clientWidth, this.plot.clientHeight];
    const spread = this.lines.spread(view);
    this.element.classList.toggle("is-empty", spread === null);
    if (!width || spread === null) return this.release();
    this.release();
    const log = view.log && spread[0] > 0;
    const frame = trainingAxes({ width, height, span: view.span, spread, axis: view.axis, log }, colours);
    const { tables, series, bands, marks } = this.lines.plot({ ...view, log }, colours, width);
    const hooks = { drawAxes: [(plot) => drawMarks(plot, marks)] };
    const options = { ...frame, series: [{}, ...series], bands, hooks, legend: { show: false }, cursor: { show: false } };
    this.#uplot = new window.uPlot(options, window.uPlot.join(tables), this.drawn);
    this.log = log;
    this.#tellLast(view);
    this.showAt(this.at ?? null);
  }

  /** Far from the screen: its pixels are given back. */
  release() {
    this.#uplot?.destroy();
    this.#uplot = null;
  }

  /** The crosshair at x, or none. marked: also a dot on each line. */
  showAt(x, marked = false) {
    this.at = x;
    const seen = this.#uplot !== null && x !== null && x >= this.#uplot.scales.x.min && x <= this.#uplot.scales.x.max;
    this.cross.hidden = !seen;
    if (seen) this.cross.style.transform = `translateX(${this.#place(x)}px)`;
    clear(this.marks).append(...(seen && marked ? this.lines.valuesAt(x, this.view).map((one) => this.#mark(one)).filter(Boolean) : []));
  }

  /** The x of what is drawn nearest to the pointer, or null. */
  nearest(event) {
    if (!this.#uplot) return null;
    const x = this.#valueAt(event.clientX - this.plot.getBoundingClientRect().left);
    const xs = this.lines.valuesAt(x, this.view).map(({ run, row }) => run.data.along(this.view.axis)[row]);
    return xs.length ? xs.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best)) : null;
  }

  #mark({ run, row, y, colour }) {
    if (!trainingShows(this.log)(y)) return null;
    const dot = el("span", { class: "training-dot", vars: { "--colour": `var(--s${colour})` } });
    dot.style.transform = `translate(${this.#place(run.data.along(this.view.axis)[row])}px, ${this.#uplot.valToPos(y, "y") + this.#box.top}px)`;
    return dot;
  }

  #tellLast(view) {
    const alone = view.runs.length === 1 && this.lines.metric;
    this.last.textContent = alone ? trainingNumber(view.runs[0].data.lastValue(this.lines.metric)) : "";
  }

  #enlarge(pressed) {
    const large = this.element.classList.toggle("is-large");
    pressed.setAttribute("aria-pressed", String(large));
    this.dirty = true;
    this.hooks.onResize(this);
  }

  #listen() {
    const { plot } = this;
    plot.addEventListener("pointermove", (event) => {
      this.#stretch(event);
      this.hooks.onHover(this, this.nearest(event), event);
    });
    plot.addEventListener("pointerleave", () => this.hooks.onHover(this, null, null));
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.#uplot) return;
      this.#drag = this.#within(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", (event) => this.#released(event));
    plot.addEventListener("pointercancel", () => this.#endDrag());
    plot.addEventListener("dblclick", () => this.hooks.onZoom(null));
  }

  /** Of the area in which lines are, in CSS pixels of the plot. */
  get #box() {
    const { left, top, width } = this.#uplot.bbox;
    const ratio = devicePixelRatio || 1;
    return { left: left / ratio, top: top / ratio, right: (left + width) / ratio };
  }

  #place(x) {
    return this.#uplot.valToPos(x, "x") + this.#box.left;
  }

  #valueAt(px) {
    return this.#uplot.posToVal(px - this.#box.left, "x");
  }

  #within(event) {
    const { left } = this.plot.getBoundingClientRect();
    return Math.min(Math.max(event.clientX - left, this.#box.left), this.#box.right);
  }

  #stretch(event) {
    if (this.#drag === null || !this.#uplot) return;
    const [a, b] = [this.#drag, this.#within(event)].sort((one, other) => one - other);
    this.selected.hidden = b - a < TRAINING_DRAG_PX;
    this.selected.style.transform = `translateX(${a}px)`;
    this.selected.style.width = `${b - a}px`;
  }

  #released(event) {
    if (this.#drag === null || !this.#uplot) return this.#endDrag();
    const [a, b] = [this.#drag, this.#within(event)].sort((one, other) => one - other);
    this.#endDrag();
    if (b - a >= TRAINING_DRAG_PX) this.hooks.onZoom([a, b].map((px) => Number(this.#valueAt(px).toPrecision(6))));
    else this.hooks.onPick(this.nearest(event));
  }

  #endDrag() {
    this.#drag = null;
    this.selected.hidden = true;
  }
}

/** Where a later life of a run began. */
function drawMarks(plot, marks) {
  const { ctx: context, bbox } = plot;
  context.save();
  context.globalAlpha = 0.6;
  context.lineWidth = devicePixelRatio || 1;
  context.setLineDash([context.lineWidth, 3 * context.lineWidth]);
  for (const { colour, x } of marks) {
    const at = Math.round(plot.valToPos(x, "x", true));
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    context.strokeStyle = colour;
    context.beginPath();
    context.moveTo(at, bbox.top);
    context.lineTo(at, bbox.top + bbox.height);
    context.stroke();
  }
  context.restore();
}
