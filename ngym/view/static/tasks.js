// The table of tasks, one line each: difficulty and disagreement of their rollouts.
import { rewardMark } from "./columns.js";
import { el } from "./dom.js";
import { sparkline } from "./charts.js";
import { DASH, formatCount, formatNumber, formatSigned, isNumber, plural } from "./format.js";
import { safeLine } from "./safetext.js";

function taskColumns(range) {
  const number = (key, label, width, title, cell) => ({
    key,
    label,
    width,
    title,
    sort: key,
    class: "num",
    cell: cell ?? ((row) => formatNumber(row[key])),
  });
  return [
    { key: "mean", label: "mean reward", width: "118px", sort: "mean", cell: (row) => rewardMark(row.mean, range) },
    { ...number("spread", "spread", "72px", "best minus worst: where it is not 0, the rollouts of the task disagree"), descends: true },
    {
      ...number("trend", "trend", "178px", "how far the mean reward rose from the first to the last weights: a line through all rollouts", trendCell),
      descends: true,
    },
    number("best", "best", "64px"),
    number("worst", "worst", "64px"),
    number("n", "n", "52px", "rollouts", (row) => formatCount(row.n)),
    number("groups", "groups", "64px", "groups of rollouts that were sampled together: how often the task was drawn", (row) => formatCount(row.groups)),
    number("unscored", "unscored", "76px", "rollouts without a reward, which the mean does not have", (row) => formatCount(row.unscored)),
    number("failures", "failed", "62px", "failed attempts", (row) => formatCount(row.failures)),
    number("task", "task", "62px", "the task's number"),
    { key: "agent", label: "agent", width: "140px", sort: "agent", cell: (row) => safeLine(row.agent ?? DASH) },
    {
      key: "prompt",
      label: "prompt",
      width: "minmax(130px, 1fr)",
      class: "words",
      sort: null,
      cell: (row) => safeLine(row.prompt ?? DASH),
    },
  ];
}

function trendCell({ trend, curve }) {
  if (!isNumber(trend)) return DASH;
  const title = `mean reward under ${plural(curve.length, "version")} of the weights: ${formatSigned(trend)}`;
  return el(
    "span",
    { class: "trend" },
    sparkline(curve, { title }),
    el("span", { class: `num ${trend > 0.005 ? "is-good" : trend < -0.005 ? "is-bad" : ""}` }, formatSigned(trend, 2)),
  );
}

/** Of one environment without its name; in a narrow window only what finds a task, so that the prompt has a place. */
export function fittingTaskColumns(range, run) {
  const all = taskColumns(range).filter(({ key }) => key !== "agent" || run.environments?.length > 1);
  if (innerWidth >= 700 && innerWidth < 1500) return all.filter(({ key }) => !["best", "worst", "groups"].includes(key));
  return innerWidth >= 700 ? all : all.filter((column) => ["mean", "trend", "prompt"].includes(column.key));
}
