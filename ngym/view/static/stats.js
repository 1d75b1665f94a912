// The figures of a run in one column; a click sets a filter or opens a rollout.
import { bars, histogram, scatter } from "./charts.js";
import { columnTable, el, folded } from "./dom.js";
import { filterValue } from "./filter.js";
import { DASH, formatCount, formatNumber, formatPercent, formatSeconds, isNumber, plural } from "./format.js";
import { safeLine } from "./safetext.js";

/** stats: as the server answers. actions: {filter(term), open(row)}. isPart: they are of the filtered rows only. */
export function statsColumn(stats, actions, isPart) {
  if (!stats) return el("p", { class: "muted" }, "This report holds no figures of this run.");
  return el(
    "div",
    { class: "stats" },
    isPart && el("p", { class: "note" }, `Figures of the ${plural(stats.n, "rollout")} that fit the filter.`),
    headline(stats),
    passTable(stats),
    section(
      "Rewards",
      hasCounts(stats.histogram) &&
        histogram(stats.histogram, (lo, hi, last) => actions.filter(`reward>=${lo} reward${last ? "<=" : "<"}${hi}`)),
      "click a bar to see its rollouts",
    ),
    section(
      "Failures by class",
      stats.failures?.length > 0 &&
        bars(
          stats.failures.map((one) => ({ name: one.class, count: one.count, colour: "var(--bad)" })),
          (entry) => actions.filter(`failure:${filterValue(entry.name)}`),
        ),
    ),
    section(
      "Reward against length",
      stats.length?.points?.length > 1 && scatter(stats.length.points, actions.open),
      stats.length?.sampled
        ? `output tokens; a sample of ${formatCount(stats.length.points.length)}${stats.length.of ? ` of ${formatCount(stats.length.of)}` : ""}`
        : "output tokens; click a point to open it",
    ),
    section("Why it stopped", stopBars(stats.stop_reasons, actions)),
    section(
      "Reward components (means)",
      stats.components?.length > 0 &&
        bars(
          stats.components.map((one) => ({ name: one.name, count: one.mean ?? 0, said: formatNumber(one.mean) })),
          null,
        ),
    ),
    environments(stats.by_environment ?? [], actions),
  );
}

/** "0.62 ± 0.03" as two parts; the interval is at 95 %. */
function meanWithInterval(mean, interval) {
  const half = interval ? (interval[1] - interval[0]) / 2 : null;
  const said = interval ? `95 % interval: ${formatNumber(interval[0])} to ${formatNumber(interval[1])}` : "no interval: too few tasks, or all are equal";
  return [
    el("span", { class: "big num", title: said }, formatNumber(mean)),
    half !== null && el("span", { class: "muted num", title: said }, ` ± ${formatNumber(half)}`),
  ];
}

/** Of how many rollouts the mean is not. */
function unscoredShare({ unscored, n }) {
  if (!n) return null;
  return el("span", { class: `num ${unscored ? "is-warn" : "muted"}` }, ` · ${formatPercent(unscored / n)} unscored`);
}

function headline(stats) {
  const counts = [
    [formatCount(stats.scored), "scored", ""],
    [formatCount(stats.failed), "failed", stats.failed ? "is-bad" : ""],
    [formatCount(stats.unscored), "unscored", stats.unscored ? "is-warn" : ""],
  ];
  return el(
    "div",
    { class: "headline" },
    el("div", null, el("div", { class: "label" }, "mean reward"), el("div", null, meanWithInterval(stats.mean, stats.interval), unscoredShare(stats))),
    el(
      "dl",
      { class: "counts" },
      counts.map(([figure, name, mood]) => el("div", { class: mood }, el("dd", { class: "num" }, figure), el("dt", null, name))),
    ),
  );
}

function passTable({ pass_at: passAt, binary }) {
  const entries = Object.entries(passAt ?? {}).filter(([, value]) => isNumber(value));
  if (!entries.length) return null;
  const [name, title] =
    binary === false
      ? ["best", "the expected best reward of k rollouts of a task"]
      : ["pass", "the chance that at least one of k rollouts of a task is right"];
  return el(
    "div",
    { class: "pass", title },
    entries.map(([k, value]) =>
      el("div", null, el("span", { class: "label" }, `${name}@${k}`), el("span", { class: "num" }, formatNumber(value))),
    ),
  );
}

function section(title, content, note) {
  return content ? el("section", null, el("h3", null, title), content, note && el("p", { class: "note" }, note)) : null;
}

function stopBars(reasons, actions) {
  const entries = Object.entries(reasons ?? {})
    .filter(([name]) => name && name !== "null")
    .sort((a, b) => b[1] - a[1]);
  return (
    entries.length > 1 &&
    bars(
      entries.map(([name, count]) => ({ name, count })),
      (entry) => actions.filter(`stop:${filterValue(entry.name === "unknown" ? null : entry.name)}`),
    )
  );
}

function environments(entries, actions) {
  if (!entries.length) return null;
  const line = (one) =>
    el(
      "tr",
      null,
      el(
        "td",
        null,
        el(
          "button",
          { type: "button", class: "as-link", on: { click: () => actions.filter(`agent:${filterValue(one.name)}`) } },
          safeLine(one.name ?? DASH),
        ),
      ),
      el("td", { class: "num" }, formatCount(one.n)),
      el("td", { class: "num" }, formatNumber(one.mean)),
      el("td", { class: `num ${one.unscored ? "is-warn" : ""}` }, formatCount(one.unscored)),
      el("td", { class: "num" }, formatCount(Math.round(one.tokens ?? NaN))),
      el("td", { class: "num" }, formatSeconds(one.seconds)),
    );
  const columns = { environment: null, n: "num", mean: "num", unscored: "num", tokens: "num", time: "num" };
  const table = () => columnTable("small", columns, entries.map(line));
  return el("section", null, entries.length > 1 ? [el("h3", null, "Environments"), table()] : folded("One environment", table));
}

function hasCounts(found) {
  return found?.counts?.some((count) => count > 0);
}
