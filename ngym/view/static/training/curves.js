// One metric of several runs as lines; where a pixel holds many values, their mean upon their range.
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

  /** What uPlot draws: {tables, series, bands, marks}; tables[i] holds x and the columns of its series. */
  plot(view, colours, width) {
    const drawn = { tables: [], series: [], bands: [], marks: [] };
    for (const run of this.runs(view)) {
      const [from, to] = seenRows(run, view);
      const colour = colours.series[run.colour];
      const along = run.data.along(view.axis);
      const [raw, shown] = [run.data.columns.get(this.metric), this.#shown(run, view)];
      const rows = shownRows(raw, from, to, view.log);
      const isDense = rows.length > TRAINING_DENSE * width;
      this.#addBand(drawn, run, view, colour);
      const behind = isDense || this.isSmoothed(view);
      if (behind) addLine(drawn, rows.map((row) => along[row]), rows.map((row) => raw[row]), { stroke: trainingFaded(colour, 0.2), width: 1, dash: run.dash, points: { show: false } });
      const [xs, ys] = isDense ? means(rows, along, shown, view.span, width) : [rows.map((row) => along[row]), rows.map((row) => shown[row])];
      const points = { show: rows.length <= TRAINING_FEW, size: rows.length === 1 ? 6 : 4, width: 0, fill: colour };
      addLine(drawn, xs, ys, { stroke: colour, width: 1.6, dash: run.dash, points });
      for (const step of run.data.resumed) drawn.marks.push({ colour, x: along[trainingRowAt(run.data.steps, step, run.data.count)] });
    }
    return drawn;
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

  #addBand(drawn, run, view, colour) {
    const names = this.#band(run);
    if (!names.length) return;
    const [low, high] = names.map((name) => run.data.columns.get(name));
    const along = run.data.along(view.axis);
    const shows = trainingShows(view.log);
    const rows = shownRows(low, ...seenRows(run, view), view.log).filter((row) => shows(high[row]));
    if (!rows.length) return;
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    const first = drawn.series.length + 1;
    drawn.tables.push([rows.map((row) => along[row]), rows.map((row) => high[row]), rows.map((row) => low[row])]);
    drawn.series.push({ ...edge, spanGaps: true, pxAlign: 0 }, { ...edge, spanGaps: true, pxAlign: 0 });
    drawn.bands.push({ series: [first, first + 1], fill: trainingFaded(colour, 0.14) });
  }
}

function addLine(drawn, xs, ys, style) {
  if (!xs.length) return;
  drawn.tables.push([xs, ys]);
  drawn.series.push({ ...style, spanGaps: true, pxAlign: 0 });
}

/** rgb(1, 2, 3) with this opacity. */
export function trainingFaded(colour, alpha) {
  return colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

function shownRows(column, from, to, log) {
  const shows = trainingShows(log);
  const rows = [];
  for (let row = from; row < to; row++) if (shows(column[row])) rows.push(row);
  return rows;
}

/** [xs, ys]: the mean of each pixel. */
function means(rows, along, column, [first, last], width) {
  const [xs, ys] = [[], []];
  const scale = width / (last - first || 1);
  let pixel = NaN;
  let [sum, count] = [0, 0];
  const leave = () => count && (xs.push(first + (pixel + 0.5) / scale), ys.push(sum / count));
  for (const row of rows) {
    const place = Math.floor((along[row] - first) * scale);
    if (place !== pixel) {
      leave();
      pixel = place;
      sum = count = 0;
    }
    sum += column[row];
    count += 1;
  }
  leave();
  return [xs, ys];
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
