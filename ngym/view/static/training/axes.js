// Axes of a chart: its scales for uPlot, the marked values, and their labels.
import { formatCount, formatNumber } from "../format.js";
import { extent, ticks } from "../scale.js";

const TRAINING_PAD = { left: 48, right: 12, top: 8, bottom: 22 };
const TRAINING_DIGIT_PX = 6.2; // the width of a digit in this font
const TRAINING_MOST_DIGITS = 9; // after the point
const TRAINING_FONT = "11px system-ui, sans-serif";
const TRAINING_DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000];

/**
 * uPlot's options for size, scales and axes. span: [first, last] x. spread: [lowest, highest] of what is drawn; log: y
 * in powers of ten. Log needs a positive spread.
 */
export function trainingAxes({ width, height, span, spread, axis, log }, colours) {
  const { right, top, bottom } = TRAINING_PAD;
  const [x0, x1] = span[0] < span[1] ? span : [span[0] - 1, span[0] + 1];
  const [y0, y1] = extent(log ? spread.map(Math.log10) : spread, 0.06);
  const marks = yMarks(y0, y1, log, height - top - bottom);
  const texts = log ? marks.flatMap((mark) => trainingTicks([mark])) : trainingTicks(marks);
  const left = Math.max(TRAINING_PAD.left, TRAINING_DIGIT_PX * Math.max(0, ...texts.map((text) => text.length)) + 10);
  const along = xMarks(x0, x1, axis, width - left - right);
  const alongTexts = axis === "time" ? along.map(trainingDuration) : trainingTicks(along);
  const line = { font: TRAINING_FONT, stroke: colours.muted };
  const range = log ? [10 ** y0, 10 ** y1] : [y0, y1];
  return {
    width,
    height,
    padding: [top, right, 0, 0],
    scales: { x: { time: false, range: () => [x0, x1] }, y: { distr: log ? 3 : 1, range: () => range } },
    axes: [
      { ...line, size: bottom, gap: 4, grid: { show: false }, ticks: { stroke: colours.axis, width: 1, size: 4 }, border: { show: true, stroke: colours.axis, width: 1 }, splits: () => along, values: () => alongTexts },
      { ...line, size: left, gap: 6, grid: { stroke: colours.grid, width: 1 }, ticks: { show: false }, splits: () => marks, values: () => texts, filter: (_, splits) => splits },
    ],
  };
}

/** Whether a value has a place: a run without this row has none, and a logarithm needs a positive one. */
export function trainingShows(log) {
  return log ? (y) => y > 0 && Number.isFinite(y) : (y) => Number.isFinite(y);
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

function xMarks(x0, x1, axis, width) {
  const count = Math.max(2, Math.floor(width / 56));
  if (axis !== "time") return ticks(x0, x1, count).filter((x) => Number.isInteger(x));
  const step = TRAINING_DURATIONS.find((one) => one >= (x1 - x0) / count) ?? TRAINING_DURATIONS.at(-1);
  const first = Math.ceil(x0 / step);
  return Array.from({ length: Math.max(0, Math.floor(x1 / step) - first + 1) }, (_, i) => (first + i) * step);
}

function yMarks(y0, y1, log, height) {
  const count = Math.max(2, Math.floor(height / 24));
  if (!log) return ticks(y0, y1, count);
  const powers = ticks(y0, y1, count).filter((power) => Number.isInteger(power));
  return powers.length > 1 ? powers.map((power) => 10 ** power) : ticks(10 ** y0, 10 ** y1, count).filter((y) => y > 0);
}
