// Axes of a canvas: the position of a value, and the labels.
import { formatCount, formatNumber } from "../format.js";
import { extent, ticks } from "../scale.js";

export const TRAINING_PAD = { left: 48, right: 12, top: 8, bottom: 22 };
const TRAINING_DIGIT_PX = 6.2; // the width of a digit in this font
const TRAINING_MOST_DIGITS = 9; // after the point
const TRAINING_FONT = "11px system-ui, sans-serif";
const TRAINING_DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000];

/** Canvas places of values. spread: [lowest, highest] of what is drawn, in its own units; log: y as powers of ten. */
export function trainingPlan({ width, height, span, spread, axis, log }) {
  const { right, top, bottom } = TRAINING_PAD;
  const [x0, x1] = span[0] < span[1] ? span : [span[0] - 1, span[0] + 1];
  const [y0, y1] = extent(log ? spread.map(Math.log10) : spread, 0.06);
  const h = Math.max(1, height - top - bottom);
  const marks = yMarks({ y0, y1, log, inner: { h } });
  const texts = log ? marks.flatMap((mark) => trainingTicks([mark])) : trainingTicks(marks);
  const left = Math.max(TRAINING_PAD.left, TRAINING_DIGIT_PX * Math.max(0, ...texts.map((text) => text.length)) + 10);
  const inner = { w: Math.max(1, width - left - right), h };
  const scale = { x: inner.w / (x1 - x0), y: inner.h / (y1 - y0) };
  const level = log ? Math.log10 : (y) => y;
  return {
    width, height, inner, left, marks, texts, axis, log, x0, x1, y0, y1,
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
  const { right, top, bottom } = TRAINING_PAD;
  const { left } = plan;
  context.font = TRAINING_FONT;
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  plan.marks.forEach((mark, i) => {
    const y = Math.round(plan.y(mark)) + 0.5;
    context.strokeStyle = colours.grid;
    strokeLine(context, left, y, plan.width - right, y);
    context.fillStyle = colours.muted;
    context.fillText(plan.texts[i], left - 6, y);
  });
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  const base = plan.height - bottom;
  context.strokeStyle = colours.axis;
  strokeLine(context, left, base + 0.5, plan.width - right, base + 0.5);
  const along = xMarks(plan);
  const alongTexts = trainingTicks(along);
  along.forEach((mark, i) => {
    const x = Math.round(plan.x(mark)) + 0.5;
    strokeLine(context, x, base + 0.5, x, base + 4.5);
    context.fillText(plan.axis === "time" ? trainingDuration(mark) : alongTexts[i], x, base + 16);
  });
  context.save();
  context.beginPath();
  context.rect(left, top - 2, plan.inner.w + 1, plan.inner.h + 4);
  context.clip();
}

/** 0.25, 12k, 3.2M, 1.5e-6: all in one unit, with as many digits as tell each from the next. */
export function trainingTicks(marks) {
  const size = Math.max(0, ...marks.map(Math.abs));
  const isOdd = size >= 1e9 || (size > 0 && size < 1e-3);
  const [unit, name] = isOdd || size < 1e4 ? [1, ""] : size < 1e6 ? [1e3, "k"] : [1e6, "M"];
  const told = (digits) => marks.map((mark) => (isOdd && mark ? mark.toExponential(digits).replace("e+", "e") : `${(mark / unit).toFixed(digits)}${mark ? name : ""}`));
  const gap = Math.min(...marks.slice(1).map((mark, i) => Math.abs(mark - marks[i])), size || 1);
  const isExact = (text, i) => Math.abs(Number.parseFloat(text) * (isOdd ? 1 : unit) - marks[i]) < gap / 50;
  for (let digits = 0; digits < TRAINING_MOST_DIGITS; digits++) {
    const texts = told(digits);
    if (texts.every(isExact)) return texts.map((text, i) => (marks[i] === 0 ? "0" : text).replace("-", "−").replace("e−", "e-"));
  }
  return told(TRAINING_MOST_DIGITS);
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
