// The phases of a step, stacked; the mean of the steps that share a pixel.
import { trainingNearestRow, trainingSmoothed } from "./run_data.js";
import { seenRows, trainingFaded } from "./curves.js";

const TRAINING_PLACES = 400; // for which the height is found

/** What a chart needs to draw the phases of this run. */
export class TrainingStack {
  constructor(phases, runId) {
    this.phases = phases;
    this.runId = runId;
  }

  runs(view) {
    return view.runs.filter((run) => run.id === this.runId && this.phases.some((name) => run.data.columns.has(name)));
  }

  /** [first, last] x of the run, or null. */
  span(view) {
    const [run] = this.runs(view);
    return run?.data.count ? [run.data.along(view.axis)[0], run.data.along(view.axis)[run.data.count - 1]] : null;
  }

  /** From nothing to the highest of all runs, so that their charts can be compared. */
  spread(view) {
    if (!this.runs(view).length) return null;
    const tops = view.runs.map((run) => this.#levels(run, view, TRAINING_PLACES).tops.at(-1));
    return [0, Math.max(...tops.map((top) => top.reduce((most, one) => Math.max(most, one), 0))) || 1];
  }

  /** What uPlot draws: as that of TrainingLines. */
  plot(view, colours, width) {
    const drawn = { tables: [], series: [], bands: [], marks: [] };
    const [run] = this.runs(view);
    if (!run) return drawn;
    const { xs, tops } = this.#levels(run, view, width);
    drawn.tables.push([xs, ...tops].map((column) => Array.from(column)));
    tops.forEach((_, phase) => {
      const fill = trainingFaded(colours.series[phase], 0.75);
      drawn.series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, ...(phase === 0 && { fill, fillTo: 0 }) });
      if (phase > 0) drawn.bands.push({ series: [phase + 1, phase], fill });
    });
    return drawn;
  }

  valuesAt(x, view) {
    const [run] = this.runs(view);
    if (!run) return [];
    const columns = this.phases.map((name) => run.data.columns.get(name) ?? new Float64Array(0));
    const row = trainingNearestRow(run.data.along(view.axis), columns, x, run.data.count);
    if (row < 0) return [];
    let sum = 0;
    return columns.map((column, phase) => {
      sum += column[row] || 0;
      return { run, row, value: column[row] ?? NaN, y: sum, colour: phase, name: trainingPhase(this.phases[phase]) };
    });
  }

  /** {xs, tops}: the mean x of each pixel, and of each phase the sum up to it there. */
  #levels(run, view, pixels) {
    const [from, to] = seenRows(run, view);
    const along = run.data.along(view.axis);
    const columns = this.phases.map((name) => run.data.columns.get(name)).map((raw) => raw && (view.smooth ? trainingSmoothed(raw, view.smooth, to) : raw));
    const rows = [];
    for (let row = from; row < to; row++) if (columns.some((column) => column && Number.isFinite(column[row]))) rows.push(row);
    const each = Math.max(1, Math.ceil(rows.length / pixels));
    const places = Math.ceil(rows.length / each);
    const xs = new Float64Array(places);
    const tops = columns.map(() => new Float64Array(places));
    for (let place = 0; place < places; place++) {
      const some = rows.slice(place * each, (place + 1) * each);
      for (const row of some) {
        xs[place] += along[row] / some.length;
        let sum = 0;
        columns.forEach((column, phase) => {
          sum += (column && column[row]) || 0;
          tops[phase][place] += sum / some.length;
        });
      }
    }
    return { xs, tops };
  }
}

/** time/weight_sync -> weight sync */
export function trainingPhase(metric) {
  return metric.replace(/^time\//, "").replace(/_/g, " ");
}
