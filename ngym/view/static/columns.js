// The columns of the table of rollouts: a small default choice; the reader's own choice is kept.
import { rewardColour } from "./charts.js";
import { button, clear, el } from "./dom.js";
import { DASH, formatCount, formatNumber, formatSeconds, formatSigned, isNumber, plural } from "./format.js";
import { safeLine } from "./safetext.js";
import { remember, remembered } from "./theme.js";

const NARROW_PX = 700;

/** A reward as a bar and a figure; `range` is [lowest, highest] of the run. */
export function rewardMark(reward, range = [0, 1]) {
  if (!isNumber(reward)) return el("span", { class: "muted" }, "none");
  const share = Math.max(0, Math.min(1, (reward - range[0]) / (range[1] - range[0] || 1)));
  const colour = rewardColour(share);
  const bar = el("span", { class: "reward-bar", vars: { "--share": String(share), "--colour": colour } });
  return el("span", { class: "reward" }, bar, el("span", { class: "num" }, formatNumber(reward)));
}

export function statusBadge(row) {
  const said = text(row.status === "failed" ? (row.failure ?? "failed") : row.status);
  const badge = el("span", { class: `badge is-${row.status}` }, said);
  if (!row.tool_errors) return badge;
  return el("span", null, badge, el("span", { class: "badge is-truncated", title: plural(row.tool_errors, "failed tool call") }, `⚒ ${row.tool_errors}`));
}

/** All columns of a run, whether shown or not. */
export function rolloutColumns(run, range) {
  const count = (key, label, width, title) => column(key, label, width, (row) => formatCount(row[key]), { class: "num", title });
  return [
    column("reward", "reward", "96px", (row) => rewardMark(row.reward, range)),
    column("status", "status", "92px", (row) => statusBadge(row)),
    column("task", "task", "50px", (row) => formatNumber(row.task), { class: "num", title: "the task's number" }),
    column("rollout", "no.", "34px", (row) => formatNumber(row.rollout), { class: "num", title: "which of the task's rollouts" }),
    column("agent", "agent", "130px", (row) => text(row.agent), { titleOf: (row) => text(row.agent) }),
    column("prompt", "prompt", "minmax(130px, 3fr)", (row) => text(row.prompt), {
      class: "words",
      sort: null,
      titleOf: (row) => text(row.prompt),
    }),
    column("answer", "end of the answer", "minmax(110px, 2fr)", (row) => text(row.answer), {
      class: "words",
      sort: null,
      titleOf: (row) => text(row.answer),
    }),
    ...(run.fields ?? []).map((name) => fieldColumn(name)),
    column("stop_reason", "stop", "92px", (row) => text(row.stop_reason)),
    count("turns", "turns", "58px", "model calls"),
    count("tool_calls", "tools", "58px", "tool calls"),
    count("tool_errors", "errors", "62px", "tool calls that failed"),
    count("input_tokens", "tokens in", "84px", "input tokens, all turns"),
    count("output_tokens", "tokens", "62px", "output tokens, all turns"),
    column("seconds", "time", "64px", (row) => formatSeconds(row.seconds), { class: "num" }),
    column("group_mean", "group", "70px", (row) => formatNumber(row.group_mean), {
      class: "num",
      title: "mean reward of the task's rollouts",
    }),
    column("advantage", "adv.", "70px", (row) => formatSigned(row.advantage), { class: "num", title: "reward minus the group's mean" }),
    count("policy_version", "version", "72px", "the largest policy version that sampled it"),
    count("attempt", "attempt", "72px", "0 is the first"),
    column("row", "row", "70px", (row) => row.row, { class: "num", title: "the line of the file, from 0; f for the failures file" }),
  ];
}

/** The keys that are shown: the reader's choice, or what suits the run and the window. */
export function chosenKeys(run) {
  const kept = remembered(keptName());
  if (kept) return kept;
  if (innerWidth < NARROW_PX) return ["reward", "status", "prompt"];
  const own = ["expected_answer", "extracted_answer"].filter((name) => run.fields?.includes(name)).map((name) => `fields.${name}`);
  const agent = (run.environments?.length ?? 0) > 1 ? ["agent"] : [];
  const said = own.length < 2 ? ["answer"] : [];
  return ["reward", "status", "task", "rollout", ...agent, "prompt", ...said, ...own, "output_tokens", "seconds"];
}

/** A narrow window has a choice of its own. */
function keptName() {
  return innerWidth < NARROW_PX ? "columns.narrow" : "columns";
}

/** A button with the list of all columns. now() -> {columns, keys}: all of them, and those that are shown; onChange() when one is switched. */
export function columnChooser(now, onChange) {
  const list = el("div", { class: "popover columns", role: "group", "aria-label": "Columns", tabindex: -1, hidden: true });
  const boxes = () => [...list.querySelectorAll("input")];
  const fill = () => {
    const { columns, keys } = now();
    const areThere = String(boxes().map((box) => box.dataset.key)) === String(columns.map(({ key }) => key));
    if (!areThere)
      clear(list).append(
        ...columns.map(boxOf),
        button("As at first", () => change(null), { class: "button quiet" }),
      );
    for (const box of boxes()) box.checked = keys.includes(box.dataset.key);
  };
  const change = (keys) => {
    remember(keptName(), keys);
    onChange();
  };
  const switchList = () => {
    fill();
    list.hidden = !list.hidden;
  };
  list.addEventListener("change", () =>
    change(
      boxes()
        .filter((box) => box.checked)
        .map((box) => box.dataset.key),
    ),
  );
  const open = button("Columns", switchList, { class: "button quiet", "aria-haspopup": "true" });
  const element = el("div", { class: "with-popover" }, open, list);
  element.addEventListener("focusout", (event) => !element.contains(event.relatedTarget) && (list.hidden = true));
  return { element, show: fill };
}

function boxOf({ key, label, title }) {
  return el("label", { title }, el("input", { type: "checkbox", "data-key": key }), label);
}

function column(key, label, width, cell, more) {
  return { key, label, width, cell, sort: key, ...more };
}

function fieldColumn(name) {
  const value = (row) => (row.fields?.[name] === undefined || row.fields[name] === null ? DASH : text(String(row.fields[name])));
  return {
    key: `fields.${name}`,
    label: text(name.replace(/_answer$/, "").replace(/_/g, " ")),
    width: "minmax(80px, 0.6fr)",
    cell: value,
    sort: name,
    titleOf: value,
    title: text(name),
  };
}

function text(value) {
  return value === null || value === undefined ? DASH : safeLine(value);
}
