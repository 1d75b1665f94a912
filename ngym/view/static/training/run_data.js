// The metrics of a run as typed columns, a row for each step, filled piece by piece as the file grows.

const TRAINING_ROWS = 256;

/** One run's metrics. `version` changes with every piece that came. */
export class TrainingRunData {
  constructor() {
    this.clear();
    this.version = 0;
  }

  clear() {
    this.count = 0;
    this.steps = new Float64Array(TRAINING_ROWS);
    this.seconds = new Float64Array(TRAINING_ROWS);
    this.columns = new Map(); // metric -> Float64Array, NaN where there is no number
    this.resumed = []; // the first step of each later life of the run
    this.before = 0; // seconds of the lives before this one
    this.elapsed = 0;
  }

  /** A piece as the server gives it: {reset, entries, columns: {step: [..], metric: [..|null]}}. */
  add({ reset, columns }) {
    if (reset) this.clear();
    if (columns?.step?.length) {
      const rows = this.#placed(columns.step, columns["time/elapsed"] ?? []);
      for (const [name, values] of Object.entries(columns)) {
        if (name !== "step" && name !== "time/elapsed") this.#fill(name, values, rows);
      }
    }
    if (reset || columns?.step?.length) this.version += 1;
  }

  /** The x of all rows: steps, or seconds since the run began. */
  along(axis) {
    return axis === "time" ? this.seconds : this.steps;
  }

  /** The last finite value of a metric, or null; before this row. */
  lastValue(name, end = this.count) {
    const column = this.columns.get(name);
    if (column) for (let row = end - 1; row >= 0; row--) if (Number.isFinite(column[row])) return column[row];
    return null;
  }

  /** The one value that a metric always has, over at least three steps; null if it changes. */
  constant(name) {
    const column = this.columns.get(name);
    let [value, count] = [null, 0];
    for (let row = 0; column && row < this.count; row++) {
      if (!Number.isFinite(column[row])) continue;
      if (count++ && column[row] !== value) return null;
      value = column[row];
    }
    return count < 3 ? null : value;
  }

  get lastStep() {
    return this.count ? this.steps[this.count - 1] : null;
  }

  /** The row of each entry. A later entry of a step adds to its row; where steps go back, what was logged after is void. */
  #placed(steps, elapsed) {
    const rows = new Int32Array(steps.length).fill(-1);
    steps.forEach((step, i) => {
      const back = this.count > 0 && step < this.steps[this.count - 1];
      if (back) {
        const kept = trainingLowerBound(this.steps, step, this.count);
        for (let j = 0; j < i; j++) if (rows[j] >= kept) rows[j] = -1;
        for (const column of this.columns.values()) column.fill(NaN, kept, this.count);
        this.count = kept;
      }
      const seconds = elapsed[i] ?? this.elapsed;
      if (back || (this.count > 0 && seconds < this.elapsed)) {
        this.resumed.push(step);
        this.before = this.count ? this.seconds[this.count - 1] : 0;
      }
      this.elapsed = seconds;
      if (!this.count || step > this.steps[this.count - 1]) this.#append(step, this.before + seconds);
      rows[i] = this.count - 1;
    });
    return rows;
  }

  #append(step, seconds) {
    if (this.count === this.steps.length) {
      const size = this.count * 2;
      this.steps = grownColumn(this.steps, size);
      this.seconds = grownColumn(this.seconds, size);
    }
    this.steps[this.count] = step;
    this.seconds[this.count] = seconds;
    this.count += 1;
  }

  #fill(name, values, rows) {
    const known = this.columns.get(name) ?? new Float64Array(this.steps.length).fill(NaN);
    const column = known.length < this.steps.length ? grownColumn(known, this.steps.length) : known;
    values.forEach((value, i) => {
      if (value !== null && rows[i] >= 0) column[rows[i]] = value;
    });
    this.columns.set(name, column);
  }
}

/** The first place in values[0, end) whose value is not less than x; they ascend. */
export function trainingLowerBound(values, x, end) {
  let low = 0;
  let high = end;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The row of x, or the next one; the last one at the end. */
export function trainingRowAt(along, x, count) {
  return Math.min(count - 1, trainingLowerBound(along, x, count));
}

/** The row whose x is nearest, among those where one of the columns has a number; -1 if there is none. */
export function trainingNearestRow(along, columns, x, count) {
  const at = trainingLowerBound(along, x, count);
  const there = (row) => columns.some((column) => Number.isFinite(column[row]));
  let before = at - 1;
  let behind = at;
  while (before >= 0 && !there(before)) before--;
  while (behind < count && !there(behind)) behind++;
  if (behind >= count) return before;
  return before >= 0 && x - along[before] < along[behind] - x ? before : behind;
}

/** The exponential moving average, weight of the past in [0, 1), without its bias towards the first values; NaN stays. */
export function trainingSmoothed(column, weight, count) {
  const made = new Float64Array(count).fill(NaN);
  let mean = 0;
  let missing = 1;
  for (let row = 0; row < count; row++) {
    if (!Number.isFinite(column[row])) continue;
    mean = weight * mean + (1 - weight) * column[row];
    missing *= weight;
    made[row] = mean / (1 - missing);
  }
  return made;
}

function grownColumn(column, size) {
  const grown = new Float64Array(size).fill(NaN);
  grown.set(column);
  return grown;
}
