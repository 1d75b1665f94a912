// One metric of several runs as lines: at most four points for each pixel, and where it holds many, their mean upon their range.
import { trainingShows } from "./axes.js";
import { trainingLowerBound, trainingNearestRow, trainingRowAt, trainingSmoothed } from "./run_data.js";

const TRAINING_FEW = 40; // points that are marked each
const TRAINING_DENSE = 4; // values of a pixel from which on their mean is drawn
const TRAINING_QUANTILE = 0.005; // at either end, that "ignore outliers" leaves out
const TRAINING_ASKED = 4000; // values of a run from which quantiles are taken

/** What a chart needs to draw this metric. */
export class TrainingLines {
  #smoothed = new Map(); // run id -> {version, weight, values}

  constructor(metric) {
    this.metric = metric;
  }

  /** Evaluations are few, and means already: they are drawn as they are. */
  isSmoothed(view) {
    return view.smooth > 0 && !/^(eval|val)\//.test(this.metric);
  }

  /** The runs that have it. */
  runs(view) {
    return view.runs.filter((run) => run.data.columns.has(this.metric));
  }

  /** [first, last] x at which a run has a value, or null. */
  span(view) {
    const ends = this.runs(view).flatMap((run) => {
      const column = run.data.columns.get(this.metric).subarray(0, run.data.count);
      const [first, last] = [column.findIndex(Number.isFinite), column.findLastIndex(Number.isFinite)];
      return first < 0 ? [] : [run.data.along(view.axis)[first], run.data.along(view.axis)[last]];
    });
    return ends.length ? [Math.min(...ends), Math.max(...ends)] : null;
  }

  /** [lowest, highest] of what is seen, or null. */
  spread(view) {
    const seen = { low: Infinity, high: -Infinity };
    for (const run of this.runs(view)) {
      const [from, to] = seenRows(run, view);
      const columns = [this.metric, ...this.#band(run)].map((name) => run.data.columns.get(name));
      if (this.isSmoothed(view)) columns.push(this.#shown(run, view));
      for (const column of columns) widenSpread(seen, column, from, to, view);
    }
    return seen.low <= seen.high ? [seen.low, seen.high] : null;
  }

  paint(context, plan, view, colours) {
    const runs = this.runs(view);
    for (const run of runs) {
      paintResumed(context, plan, run, view, colours);
      this.#paintBand(context, plan, run, view, colours);
    }
    for (const run of runs) {
      const [from, to] = seenRows(run, view);
      const raw = run.data.columns.get(this.metric);
      const stroke = { colour: colours.series[run.colour], dash: run.dash, width: 1.6, alpha: 1 };
      const along = run.data.along(view.axis);
      const dense = countShown(plan, raw, from, to) > TRAINING_DENSE * plan.inner.w;
      if (dense || this.isSmoothed(view)) paintColumn(context, plan, along, raw, from, to, traceRange, { ...stroke, width: 1, alpha: 0.2 });
      paintColumn(context, plan, along, this.#shown(run, view), from, to, dense ? traceMeans : traceRange, stroke);
    }
  }

  /** [{run, row, value, y}] at the place nearest to x of each run; y is what the line shows there. */
  valuesAt(x, view) {
    return this.runs(view).flatMap((run) => {
      const column = run.data.columns.get(this.metric);
      const row = trainingNearestRow(run.data.along(view.axis), [column], x, run.data.count);
      return row < 0 ? [] : [{ run, row, value: column[row], y: this.#shown(run, view)[row], colour: run.colour, name: run.name }];
    });
  }

  #shown(run, view) {
    const raw = run.data.columns.get(this.metric);
    if (!this.isSmoothed(view)) return raw;
    const known = this.#smoothed.get(run.id);
    if (known?.version === run.data.version && known.weight === view.smooth) return known.values;
    const values = trainingSmoothed(raw, view.smooth, run.data.count);
    this.#smoothed.set(run.id, { version: run.data.version, weight: view.smooth, values });
    return values;
  }

  #band(run) {
    const names = [`${this.metric}/low`, `${this.metric}/high`];
    return names.every((name) => run.data.columns.has(name)) ? names : [];
  }

  #paintBand(context, plan, run, view, colours) {
    const names = this.#band(run);
    if (!names.length) return;
    const [low, high] = names.map((name) => run.data.columns.get(name));
    const along = run.data.along(view.axis);
    const [from, to] = seenRows(run, view);
    const rows = [];
    for (let row = from; row < to; row++) if (plan.shows(low[row]) && plan.shows(high[row])) rows.push(row);
    context.beginPath();
    for (const row of rows) context.lineTo(plan.x(along[row]), plan.y(high[row]));
    for (const row of rows.reverse()) context.lineTo(plan.x(along[row]), plan.y(low[row]));
    context.globalAlpha = 0.14;
    context.fillStyle = colours.series[run.colour];
    context.fill();
    context.globalAlpha = 1;
  }
}

/** A column as a line; `trace` makes its path. */
function paintColumn(context, plan, along, column, from, to, trace, { colour, dash, width, alpha }) {
  context.strokeStyle = colour;
  context.fillStyle = colour;
  context.lineWidth = width;
  context.globalAlpha = alpha;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  trace(context, plan, along, column, from, to);
  context.stroke();
  context.setLineDash([]);
  const count = alpha === 1 ? countShown(plan, column, from, to) : Infinity;
  if (count <= TRAINING_FEW) {
    for (let row = from; row < to; row++) {
      if (!plan.shows(column[row])) continue;
      context.beginPath();
      context.arc(plan.x(along[row]), plan.y(column[row]), count === 1 ? 3 : 2, 0, 2 * Math.PI);
      context.fill();
    }
  }
  context.globalAlpha = 1;
}

/** Where a later life of the run began. */
function paintResumed(context, plan, { data, colour }, { axis }, colours) {
  context.strokeStyle = colours.series[colour];
  context.lineWidth = 1;
  context.globalAlpha = 0.6;
  context.setLineDash([1, 3]);
  context.beginPath();
  for (const step of data.resumed) {
    const x = Math.round(plan.x(data.along(axis)[trainingRowAt(data.steps, step, data.count)])) + 0.5;
    context.moveTo(x, 0);
    context.lineTo(x, plan.height);
  }
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
}

function countShown(plan, column, from, to) {
  let count = 0;
  for (let row = from; row < to; row++) if (plan.shows(column[row])) count += 1;
  return count;
}

/** The mean of each pixel. */
function traceMeans(context, plan, along, column, from, to) {
  let pixel = NaN;
  let [sum, count] = [0, 0];
  for (let row = from; row < to; row++) {
    if (!plan.shows(column[row])) continue;
    const x = Math.round(plan.x(along[row]));
    if (x !== pixel) {
      if (count) context.lineTo(pixel, plan.y(sum / count));
      pixel = x;
      sum = count = 0;
    }
    sum += column[row];
    count += 1;
  }
  if (count) context.lineTo(pixel, plan.y(sum / count));
}

/** The first, lowest, highest and last value of each pixel. */
function traceRange(context, plan, along, column, from, to) {
  let pixel = NaN;
  let [low, high, last] = [0, 0, 0];
  const leave = () => {
    if (low === high) return;
    context.lineTo(pixel, plan.y(low));
    context.lineTo(pixel, plan.y(high));
    context.lineTo(pixel, plan.y(last));
  };
  for (let row = from; row < to; row++) {
    const value = column[row];
    if (!plan.shows(value)) continue;
    const x = Math.round(plan.x(along[row]) * 2) / 2; // half a pixel is one of most screens
    if (x === pixel) {
      if (value < low) low = value;
      if (value > high) high = value;
      last = value;
      continue;
    }
    leave();
    pixel = x;
    low = high = last = value;
    context.lineTo(x, plan.y(value));
  }
  leave();
}

/** [from, to): the rows within the span, and one beyond it at each end. */
export function seenRows(run, { axis, span }) {
  const along = run.data.along(axis);
  const { count } = run.data;
  return [Math.max(0, trainingLowerBound(along, span[0], count) - 1), Math.min(count, trainingLowerBound(along, span[1], count) + 1)];
}

function widenSpread(seen, column, from, to, { log, fit }) {
  const counts = trainingShows(log);
  let values = column.subarray(from, to);
  if (fit) values = withoutOutliers(values.filter(counts));
  for (const value of values) {
    if (!counts(value)) continue;
    if (value < seen.low) seen.low = value;
    if (value > seen.high) seen.high = value;
  }
}

function withoutOutliers(values) {
  const every = Math.ceil(values.length / TRAINING_ASKED) || 1;
  const some = values.filter((_, i) => i % every === 0).sort();
  const cut = Math.floor(some.length * TRAINING_QUANTILE);
  return some.subarray(cut, some.length - cut);
}
