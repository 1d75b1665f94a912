// The controls: which runs, which charts, and how they are drawn; kept in the address, so that it can be shared.
import { button, el, released } from "../dom.js";
import { formatNumber } from "../format.js";
import { hrefOf } from "../router.js";
import { safeLine } from "../safetext.js";
import { remember, remembered } from "../theme.js";
import { trainingSwatch } from "./tables.js";

const TRAINING_TABS = [["charts", "Charts"], ["values", "Last values"], ["config", "Configuration"], ["samples", "Sample rollouts"]];
const TRAINING_MOST_AT_FIRST = 8; // runs that are shown without being asked for

/** The settings, from the address's params. */
export class TrainingSettings {
  constructor(params) {
    const number = (name) => (params.get(name) ? Number(params.get(name)) : null);
    this.shown = params.get("runs") ? new Set(params.get("runs").split(",")) : null; // null: the first runs
    this.tab = TRAINING_TABS.some(([key]) => key === params.get("tab")) ? params.get("tab") : "charts";
    this.find = params.get("find") ?? "";
    this.axis = params.get("x") === "time" ? "time" : "step";
    this.smooth = Math.min(0.99, Math.max(0, number("smooth") ?? remembered("training.smooth", 0)));
    this.log = params.get("log") === "1";
    this.fit = params.get("fit") === "1";
    this.zoom = number("to") === null ? null : [number("from") ?? 0, number("to")];
    this.picked = number("step");
  }

  shows(run, place) {
    return this.shown ? this.shown.has(run.id) : place < TRAINING_MOST_AT_FIRST;
  }

  /** The address says what is shown. */
  keep() {
    remember("training.smooth", this.smooth);
    const [from, to] = this.zoom ?? [];
    const said = {
      runs: this.shown && [...this.shown].join(","),
      tab: this.tab === "charts" ? null : this.tab,
      find: this.find,
      x: this.axis === "time" ? "time" : null,
      smooth: this.smooth || null,
      log: this.log ? 1 : null,
      fit: this.fit ? 1 : null,
      from: from ?? null,
      to: to ?? null,
      step: this.picked,
    };
    history.replaceState(null, "", hrefOf(["training"], said));
  }

  /** Whether a metric's name holds every word that is looked for. */
  finds(name) {
    return this.find.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word));
  }
}

/** The bar above the charts. changed(what): "runs", "tab", "find" or "draw". -> {element, status, change(what, values), runs(list)} */
export function trainingControls(settings, changed) {
  const change = (what, values) => {
    Object.assign(settings, values);
    settings.keep();
    sync();
    changed(what);
  };
  const chips = el("div", { class: "training-runs", role: "group", "aria-label": "Runs" });
  const tabs = TRAINING_TABS.map(([key, label]) => button(label, () => change("tab", { tab: key }), { class: "tab", "data-key": key }));
  const find = el("input", { type: "search", placeholder: "find a metric", "aria-label": "Find a metric", value: settings.find, on: { input: () => change("find", { find: find.value }) } });
  const axes = [["step", "by step"], ["time", "by time"]].map(([key, label]) => settingChip(label, () => change("draw", { axis: key, zoom: null }), key));
  const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "Smoothing", on: { input: () => change("draw", { smooth: Number(slider.value) }) } });
  const told = el("output", { class: "num muted" });
  const smoothing = el("label", { class: "training-smooth", title: "weight of the past in an exponential moving average" }, "smooth", slider, told);
  const log = settingChip("log", () => change("draw", { log: !settings.log }), "log", "logarithmic values, where all are positive");
  const fit = settingChip("ignore outliers", () => change("draw", { fit: !settings.fit }), "fit", "fit the axis to all values but half a percent at either end");
  const whole = button("Whole run", () => change("draw", { zoom: null }), { class: "button quiet", title: "undo the zoom (double click on a chart)" });
  const drawing = el("div", { class: "training-drawing" }, find, axes, smoothing, log, fit, whole);
  const status = el("span", { class: "note", role: "status" });
  const sync = () => {
    for (const tab of tabs) {
      if (tab.dataset.key === settings.tab) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    for (const one of axes) one.setAttribute("aria-pressed", String(one.dataset.key === settings.axis));
    log.setAttribute("aria-pressed", String(settings.log));
    fit.setAttribute("aria-pressed", String(settings.fit));
    slider.value = settings.smooth;
    told.textContent = formatNumber(settings.smooth, 2);
    whole.hidden = settings.zoom === null;
    for (const one of [...axes, smoothing, log, fit]) one.hidden = settings.tab !== "charts";
    find.hidden = settings.tab === "samples";
    find.placeholder = settings.tab === "config" ? "find a key" : "find a metric";
  };
  sync();
  const head = el("div", { class: "training-top" }, el("div", { class: "tabs" }, tabs), el("div", { class: "fill" }), status);
  return {
    element: el("div", { class: "training-bar" }, head, chips, drawing),
    change,
    status,
    runs: (runs) => syncRuns(chips, runs, settings, change),
  };
}

/** A chip for each run; a click switches it, a double click leaves it alone. */
function syncRuns(chips, runs, settings, change) {
  if (chips.matches(":active")) {
    released(chips).then(() => syncRuns(chips, runs, settings, change));
    return;
  }
  const shown = runs.filter((run, place) => settings.shows(run, place)).map((run) => run.id);
  const said = JSON.stringify([shown, runs.map((run) => [run.id, run.name, run.growing, run.data.lastStep ?? run.steps])]);
  if (chips.dataset.said === said) return;
  chips.dataset.said = said;
  const pick = (ids) => change("runs", { shown: new Set(ids) });
  const made = runs.map((run) => {
    const on = shown.includes(run.id);
    const steps = el("span", { class: "muted num" }, formatNumber(run.data.lastStep ?? run.steps));
    const words = [trainingSwatch(run), safeLine(run.name), steps, run.growing && el("span", { class: "badge is-live" }, "live")];
    return el("button", { type: "button", class: "chip training-run", "aria-pressed": String(on), title: `${safeLine(run.path)}\ndouble click: only this one`, on: {
      click: () => pick(on ? shown.filter((id) => id !== run.id) : [...shown, run.id]),
      dblclick: () => pick([run.id]),
    } }, words);
  });
  chips.replaceChildren(...made);
}

function settingChip(label, onClick, key, title) {
  return el("button", { type: "button", class: "chip", "data-key": key, title, on: { click: onClick } }, label);
}
