// One chart: a canvas that is drawn only while it is near the screen, a crosshair above it, a zoom by dragging.
import { button, clear, el } from "../dom.js";
import { safeLine } from "../safetext.js";
import { TRAINING_PAD, paintTrainingAxes, trainingNumber, trainingPlan } from "./axes.js";

const TRAINING_DRAG_PX = 6;

/**
 * lines: TrainingLines or TrainingStack. title: the text above. note: a node below it, or null.
 * hooks: {onHover(chart, x|null, event), onPick(x), onZoom([from, to]), onResize(chart)}.
 */
export class TrainingChart {
  #plan = null;
  #drag = null;

  constructor(lines, title, note, hooks) {
    this.lines = lines;
    this.hooks = hooks;
    this.near = false; // the screen
    this.dirty = true;
    this.canvas = el("canvas", { role: "img", "aria-label": safeLine(title) });
    this.cross = el("div", { class: "training-cross", hidden: true });
    this.marks = el("div", { class: "training-marks" });
    this.selected = el("div", { class: "training-selected", hidden: true });
    this.plot = el("div", { class: "training-plot" }, this.canvas, this.marks, this.cross, this.selected);
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
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.#plan = trainingPlan({ width, height, span: view.span, spread, axis: view.axis, log: view.log && spread[0] > 0 });
    paintTrainingAxes(context, this.#plan, colours);
    this.lines.paint(context, this.#plan, view, colours);
    this.#tellLast(view);
    this.showAt(this.at ?? null);
  }

  /** Far from the screen: its pixels are given back. */
  release() {
    this.canvas.width = this.canvas.height = 0;
    this.#plan = null;
  }

  /** The crosshair at x, or none. marked: also a dot on each line. */
  showAt(x, marked = false) {
    this.at = x;
    const seen = this.#plan !== null && x !== null && x >= this.#plan.x0 && x <= this.#plan.x1;
    this.cross.hidden = !seen;
    if (seen) this.cross.style.transform = `translateX(${this.#plan.x(x)}px)`;
    clear(this.marks).append(...(seen && marked ? this.lines.valuesAt(x, this.view).map((one) => this.#mark(one)).filter(Boolean) : []));
  }

  /** The x of what is drawn nearest to the pointer, or null. */
  nearest(event) {
    if (!this.#plan) return null;
    const x = this.#plan.valueAt(event.clientX - this.plot.getBoundingClientRect().left);
    const xs = this.lines.valuesAt(x, this.view).map(({ run, row }) => run.data.along(this.view.axis)[row]);
    return xs.length ? xs.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best)) : null;
  }

  #mark({ run, row, y, colour }) {
    if (!this.#plan.shows(y)) return null;
    const dot = el("span", { class: "training-dot", vars: { "--colour": `var(--s${colour})` } });
    dot.style.transform = `translate(${this.#plan.x(run.data.along(this.view.axis)[row])}px, ${this.#plan.y(y)}px)`;
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
      if (event.button !== 0 || !this.#plan) return;
      this.#drag = this.#within(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", (event) => this.#released(event));
    plot.addEventListener("pointercancel", () => this.#endDrag());
    plot.addEventListener("dblclick", () => this.hooks.onZoom(null));
  }

  #within(event) {
    const { left } = this.plot.getBoundingClientRect();
    return Math.min(Math.max(event.clientX - left, this.#plan.left), this.#plan.width - TRAINING_PAD.right);
  }

  #stretch(event) {
    if (this.#drag === null || !this.#plan) return;
    const [a, b] = [this.#drag, this.#within(event)].sort((one, other) => one - other);
    this.selected.hidden = b - a < TRAINING_DRAG_PX;
    this.selected.style.transform = `translateX(${a}px)`;
    this.selected.style.width = `${b - a}px`;
  }

  #released(event) {
    if (this.#drag === null || !this.#plan) return this.#endDrag();
    const [a, b] = [this.#drag, this.#within(event)].sort((one, other) => one - other);
    this.#endDrag();
    if (b - a >= TRAINING_DRAG_PX) this.hooks.onZoom([a, b].map((px) => Number(this.#plan.valueAt(px).toPrecision(6))));
    else this.hooks.onPick(this.nearest(event));
  }

  #endDrag() {
    this.#drag = null;
    this.selected.hidden = true;
  }
}
