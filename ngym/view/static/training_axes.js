// Axes of a canvas: the position of a value, and the labels.
import { formatCount, formatNumber } from "./format.js";
import { extent, ticks } from "./scale.js";

export const TRAINING_PAD = { left: 48, right: 12, top: 8, bottom: 22 };
const TRAINING_FONT = "11px system-ui, sans-serif";
const TRAINING_DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000];

/** Canvas places of values. spread: [lowest, highest] of what is drawn, in its own units; log: y as powers of ten. */
export function trainingPlan({ width, height, span, spread, axis, log }) {
  const { left, right, top, bottom } = TRAINING_PAD;
  const inner = { w: Math.max(1, width - left - right), h: Math.max(1, height - top - bottom) };
  const [x0, x1] = span[0] < span[1] ? span : [span[0], span[0] + 1];
  const [y0, y1] = extent(log ? spread.map(Math.log10) : spread, 0.06);
  const scale = { x: inner.w / (x1 - x0), y: inner.h / (y1 - y0) };
  const level = log ? Math.log10 : (y) => y;
  return {
    width, height, inner, axis, log, x0, x1, y0, y1,
    x: (x) => left + (x - x0) * scale.x,
    y: (y) => top + (y1 - level(y)) * scale.y,
    valueAt: (px) => x0 + (px - left) / scale.x,
    shows: trainingShows(log),
  };
}

/** Whether a value has a place: a run without this row has none, and a logarithm needs a positive one. */
export function trainingShows(log) {
  return log ? (y) => y > 0 && Number.isFinite(y) : (y) => Number.isFinite(y);
}

/** The grid and the numbers beside it. */
export function paintTrainingAxes(context, plan, colours) {
  const { left, right, top, bottom } = TRAINING_PAD;
  context.font = TRAINING_FONT;
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const mark of yMarks(plan)) {
    const y = Math.round(plan.y(mark)) + 0.5;
    context.strokeStyle = colours.grid;
    strokeLine(context, left, y, plan.width - right, y);
    context.fillStyle = colours.muted;
    context.fillText(trainingTick(mark), left - 6, y);
  }
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  const base = plan.height - bottom;
  context.strokeStyle = colours.axis;
  strokeLine(context, left, base + 0.5, plan.width - right, base + 0.5);
  for (const mark of xMarks(plan)) {
    const x = Math.round(plan.x(mark)) + 0.5;
    strokeLine(context, x, base + 0.5, x, base + 4.5);
    context.fillText(plan.axis === "time" ? trainingDuration(mark) : trainingTick(mark), x, base + 16);
  }
  context.save();
  context.beginPath();
  context.rect(left, top - 2, plan.inner.w + 1, plan.inner.h + 4);
  context.clip();
}

/** 0.25, 12k, 3.2M, 1.5e-6 */
function trainingTick(value) {
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-4)) return value.toExponential(1).replace(".0e", "e");
  if (size >= 1e6) return `${formatNumber(value / 1e6, 2)}M`;
  return size >= 1e4 ? `${formatNumber(value / 1e3, 1)}k` : formatNumber(value, 4);
}

/** 22,035; 316.9; 0.9324: the digits that matter. */
export function trainingNumber(value) {
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e9) return formatCount(Math.round(value));
  return formatNumber(value, size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

/** 45 s, 12 min, 3.5 h, 2 d */
export function trainingDuration(seconds) {
  if (seconds < 60) return `${formatNumber(seconds, 1)} s`;
  if (seconds < 5400) return `${formatNumber(seconds / 60, 1)} min`;
  return seconds < 172800 ? `${formatNumber(seconds / 3600, 1)} h` : `${formatNumber(seconds / 86400, 1)} d`;
}

function xMarks({ x0, x1, axis, inner }) {
  const count = Math.max(2, Math.floor(inner.w / 56));
  if (axis !== "time") return ticks(x0, x1, count).filter((x) => Number.isInteger(x));
  const step = TRAINING_DURATIONS.find((one) => one >= (x1 - x0) / count) ?? TRAINING_DURATIONS.at(-1);
  const first = Math.ceil(x0 / step);
  return Array.from({ length: Math.max(0, Math.floor(x1 / step) - first + 1) }, (_, i) => (first + i) * step);
}

function yMarks({ y0, y1, log, inner }) {
  const count = Math.max(2, Math.floor(inner.h / 24));
  if (!log) return ticks(y0, y1, count);
  const powers = ticks(y0, y1, count).filter((power) => Number.isInteger(power));
  return powers.length > 1 ? powers.map((power) => 10 ** power) : ticks(10 ** y0, 10 ** y1, count).filter((y) => y > 0);
}

function strokeLine(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
