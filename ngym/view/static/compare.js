// The comparison of two runs: counts, the mean difference with its interval, and the tasks, largest difference first.
import { rewardMark } from "./columns.js";
import { clear, el, link } from "./dom.js";
import { DASH, formatCount, formatNumber, formatPercent, formatSigned, isNumber, plural } from "./format.js";
import { go, hrefOf } from "./router.js";
import { safeLine } from "./safetext.js";
import { Table } from "./table.js";

/** #/compare/{a}/{b}?q=&sort= */
export function comparePage(context, route) {
  const [, a, b] = route.path;
  const runs = context.live.state.runs.filter((run) => run.kind === "rollouts");
  const [left, right] = [a, b].map((id) => runs.find((run) => run.id === id));
  if (!left || !right) throw new Error(`No run '${left ? b : a}' is open; go back to the list of runs.`);
  const summary = el("div", { class: "compare-summary" });
  let { q, sort } = wordsOf(route);
  const source = () => (offset, limit, signal) => context.api.compare(a, b, { q, sort, offset, limit }, signal);
  const to = (change) => go(hrefOf(["compare", a, b], { q, sort, ...change }));
  const href = (row) =>
    hrefOf(["compare", a, b, "task", String(row.a?.task ?? "-"), String(row.b?.task ?? "-")], { a: row.a?.agent, b: row.b?.agent });
  const table = new Table({
    label: "Tasks of both runs",
    columns: columnsFor(left, right),
    sort,
    fetchPage: source(),
    hrefOf: href,
    empty: () => "No task is in both runs.",
    onOpen: (row) => go(href(row)),
    onSort: (key) => to({ sort: sort === `-${key}` ? key : sort === key ? "" : `-${key}` }),
    onState: ({ answer, error }) =>
      clear(summary).append(
        error
          ? el("p", { class: "problem", role: "alert" }, safeLine(error.message))
          : answer
            ? summaryOf(answer, left, right, sort === "-abs_delta")
            : "",
      ),
  });
  context.crumbs([{ text: `${left.name} against ${right.name}` }]);
  const stop = context.live.onChange(({ runs: now }) => now?.some((run) => run.growing && [a, b].includes(run.id)) && table.refresh());
  return {
    element: el(
      "main",
      { class: "page compare-page" },
      el(
        "div",
        { class: "compare-head" },
        chooser(runs, a, (id) => go(hrefOf(["compare", id, b])), "First run"),
        el("span", { class: "muted" }, "against"),
        chooser(runs, b, (id) => go(hrefOf(["compare", a, id])), "Second run"),
        link(hrefOf(["compare", b, a]), "⇄ swap", { class: "button quiet" }),
      ),
      summary,
      table.element,
    ),
    keys: [
      ["j ArrowDown", "next task", () => table.move(1)],
      ["k ArrowUp", "previous task", () => table.move(-1)],
      ["Enter", "both groups side by side", () => table.openSelected()],
      ["Escape Backspace", "back", () => history.back()],
    ],
    update(next) {
      if (hrefOf(next.path) !== hrefOf(route.path)) return false;
      ({ q, sort } = wordsOf(next));
      table.setSource(source(), sort);
      return true;
    },
    again: () => table.again(),
    close() {
      stop();
      table.close();
    },
  };
}

function wordsOf({ params }) {
  return { q: params.get("q") ?? "", sort: params.get("sort") ?? "-abs_delta" };
}

function summaryOf(answer, left, right, byDifference) {
  const { better, worse, same, only_a: onlyA, only_b: onlyB, delta, interval, matched_by: matchedBy } = answer;
  if (!matchedBy) {
    const counts = `${plural(onlyA, "task")} only in ${safeLine(left.name)}, ${plural(onlyB, "task")} only in ${safeLine(right.name)}`;
    return el("p", { class: "verdict-line" }, "No task in common: these runs cannot be compared. ", el("span", { class: "muted" }, counts));
  }
  const chance = !interval ? "; too few different tasks to say whether by chance" : interval[0] > 0 || interval[1] < 0 ? "" : ", within chance";
  const verdict = !isNumber(delta)
    ? "No task has a reward in both runs."
    : delta === 0
      ? "Both runs have the same mean."
      : `${safeLine((delta > 0 ? right : left).name)} is better by ${formatNumber(Math.abs(delta))}${chance}.`;
  const count = (figure, text, mood) => el("div", { class: mood }, el("dd", { class: "num" }, formatCount(figure)), el("dt", null, text));
  return el(
    "div",
    { class: "compare-figures" },
    el(
      "div",
      { class: "headline" },
      el(
        "div",
        null,
        el("div", { class: "label" }, "difference of the means"),
        el("span", { class: `big num ${delta > 0 ? "is-good" : delta < 0 ? "is-bad" : ""}` }, formatSigned(delta)),
        interval &&
          el(
            "span",
            { class: "muted num", title: "95 % interval, over the tasks" },
            `  95 %: ${formatSigned(interval[0])} to ${formatSigned(interval[1])}`,
          ),
      ),
      el(
        "div",
        null,
        el("div", { class: "label" }, "means"),
        el("span", { class: "num" }, `${formatNumber(answer.mean_a)} → ${formatNumber(answer.mean_b)}`),
        el(
          "span",
          { class: "muted num", title: "rollouts without a reward, which no mean has" },
          `  unscored: ${formatPercent(answer.unscored_a)} → ${formatPercent(answer.unscored_b)}`,
        ),
      ),
      el(
        "dl",
        { class: "counts" },
        count(better, "better", "is-good"),
        count(worse, "worse", "is-bad"),
        count(same, "same", ""),
        onlyA > 0 && count(onlyA, safeLine(`only in ${left.name}`), ""),
        onlyB > 0 && count(onlyB, safeLine(`only in ${right.name}`), ""),
      ),
    ),
    share(better, same, worse),
    el(
      "p",
      { class: "verdict-line" },
      verdict,
      byDifference && el("span", { class: "muted" }, " The task on which the runs differ most is the first line."),
      matchedBy === "task" &&
        el("span", { class: "muted" }, " The rows have no task ids: tasks were matched by their index, which is right for the same input only."),
    ),
  );
}

function share(better, same, worse) {
  const parts = [
    [better, "var(--good)", "better"],
    [same, "var(--line)", "same"],
    [worse, "var(--bad)", "worse"],
  ];
  return el(
    "div",
    { class: "share-bar", "aria-hidden": "true" },
    parts.map(([count, colour, name]) =>
      el("span", { title: `${name}: ${count}`, vars: { "flex-grow": String(count || 0), background: colour } }),
    ),
  );
}

function columnsFor(left, right) {
  const side = (key, name) => ({
    key,
    label: name,
    title: name,
    width: "minmax(104px, 150px)",
    sort: null,
    cell: (row) =>
      row[key]
        ? [rewardMark(row[key].mean), el("span", { class: "muted num" }, ` n ${scoredOf(row[key])}`)]
        : el("span", { class: "muted" }, "not in this run"),
  });
  const all = [
    { key: "delta", label: "difference", width: "minmax(124px, 150px)", sort: "delta", cell: (row) => deltaMark(row.delta) },
    side("a", safeLine(left.name)),
    side("b", safeLine(right.name)),
    { key: "task", label: "task", width: "64px", class: "num", sort: "task", cell: (row) => formatNumber(row.task) },
    {
      key: "prompt",
      label: "prompt",
      width: "minmax(200px, 1fr)",
      class: "words",
      sort: null,
      cell: (row) => safeLine(row.prompt ?? DASH),
    },
  ];
  return innerWidth >= 700 ? all : all.filter(({ key }) => key === "delta" || key === "prompt");
}

/** `8`, or `6 of 8` where some have no reward. */
function scoredOf({ n, scored }) {
  return isNumber(scored) && scored < n ? `${scored} of ${n}` : n;
}

function deltaMark(delta) {
  if (!isNumber(delta)) return DASH;
  const size = Math.min(1, Math.abs(delta));
  const bar = el("span", { class: `delta-bar ${delta < 0 ? "is-minus" : "is-plus"}`, vars: { "--share": String(size) } });
  return el(
    "span",
    { class: "delta" },
    el("span", { class: "delta-track" }, bar),
    el("span", { class: `num ${delta > 0 ? "is-good" : delta < 0 ? "is-bad" : ""}` }, formatSigned(delta)),
  );
}

function chooser(runs, now, onChoose, label) {
  const select = el(
    "select",
    { "aria-label": label },
    runs.map((run) => el("option", { value: run.id, selected: run.id === now }, safeLine(run.name))),
  );
  select.addEventListener("change", () => onChoose(select.value));
  return select;
}
