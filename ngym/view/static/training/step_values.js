// The values of a step: the box beside the pointer, and the bar of the selected step.
import { button, clear, el } from "../dom.js";
import { formatNumber } from "../format.js";
import { safeLine } from "../safetext.js";
import { trainingDuration, trainingNumber } from "./axes.js";
import { trainingLowerBound } from "./run_data.js";
import { heldOutLink, sampleLink, trainingSwatch } from "./tables.js";

/** The values of all runs at x, the highest first; of a smoothed line also the value itself. */
export function trainingTip(lines, x, view) {
  const values = lines.valuesAt(x, view);
  if (!values.length) return [];
  const { run, row } = values.find((one) => one.run.data.along(view.axis)[one.row] === x) ?? values[0];
  const step = run.data.steps[row];
  const sorted = lines.metric ? [...values].sort((a, b) => b.y - a.y) : [...values].reverse();
  const resumed = values.some((one) => one.run.data.resumed.includes(step)) && el("span", { class: "muted" }, " · resumed");
  return [el("div", { class: "muted num" }, `step ${formatNumber(step)} · ${trainingDuration(run.data.seconds[row])}`, resumed), ...sorted.map((one) => tipLine(one, step, lines.isSmoothed?.(view)))];
}

function tipLine({ name, colour, value, y, run, row }, step, smoothed) {
  const at = run.data.steps[row];
  return el(
    "div", { class: "training-tip-line" },
    trainingSwatch({ colour }), el("span", { class: "fill" }, safeLine(name)),
    at !== step && el("span", { class: "muted num" }, `step ${formatNumber(at)}`),
    smoothed && el("span", { class: "muted num", title: "not smoothed" }, trainingNumber(value)),
    el("b", { class: "num" }, trainingNumber(smoothed ? y : value)),
  );
}

/** Of every run the reward (or loss) at the picked step, and its rollouts. pick(step|null). */
export function trainingStepBar(bar, runs, picked, pick) {
  const move = (text, by, label) => button(text, () => pick(Math.max(0, picked + by)), { class: "button quiet icon", "aria-label": label });
  const ofRuns = runs.map((run) => {
    const [metric, value] = tellingValue(run, picked);
    return el("span", null, trainingSwatch(run), safeLine(run.name), " ", el("span", { class: "muted" }, metric ?? ""), " ", el("b", { class: "num" }, value), " ", sampleLink(run, picked, "rollouts"), " ", heldOutLink(run, picked, "held-out"));
  });
  const close = button("×", () => pick(null), { class: "button quiet icon", "aria-label": "Close" });
  clear(bar).append(move("‹", -1, "The step before"), el("b", { class: "num" }, `step ${formatNumber(picked)}`), move("›", 1, "The next step"), ...ofRuns, el("span", { class: "fill" }), close);
}

function tellingValue({ data }, step) {
  const metric = ["reward/mean", "loss"].find((name) => data.columns.has(name));
  const row = trainingLowerBound(data.steps, step, data.count);
  const there = metric && row < data.count && data.steps[row] === step;
  return [metric, there ? trainingNumber(data.columns.get(metric)[row]) : "–"];
}
