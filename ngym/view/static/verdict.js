// Why this reward? The reward and its parts, what the verifier noted, the failure, and where time and tokens went.
import { bars } from "./charts.js";
import { rewardMark } from "./columns.js";
import { copyButton, el, folded } from "./dom.js";
import { DASH, formatCount, formatNumber, formatSigned, isNumber, plural } from "./format.js";
import { asText, extraFields, failureMessage, failureOf } from "./items.js";
import { jsonText, longText, safeText } from "./safetext.js";
import { waterfall } from "./waterfall.js";

const STOPPED = {
  answer: "it gave its answer",
  user_done: "the user was done",
  max_steps: "cut off: the limit of steps",
  context: "cut off: the context was full",
  length: "cut off: the answer was too long",
};
const FIRST = ["expected_answer", "extracted_answer"];
const LONG_VALUE = 160;

/** Everything about a rollout but what was said. slim: its line in the table, or null. */
export function verdictPanel(row, text, slim) {
  const trace = row.ng ?? {};
  const failure = failureOf(row);
  return el(
    "aside",
    { class: "verdict", "aria-label": "Why this reward" },
    failure ? failureBox(failure) : rewardBox(row, trace, slim),
    part("The task’s and the verifier’s fields", fieldsList(row), "is-why"),
    part("Time", trace.timings && waterfall(trace.timings, trace.spans)),
    part("Tokens", usageList(row.response?.usage, trace)),
    part("Which rollout", identity(row, trace)),
    folded(
      "Raw JSON",
      () =>
        el(
          "div",
          null,
          copyButton(() => text),
          jsonText(row),
        ),
      { class: "raw" },
    ),
  );
}

function failureBox(failure) {
  const where = [
    failure.stage && `while: ${failure.stage}`,
    failure.service && `service: ${failure.service}`,
    failure.http_status && `HTTP ${failure.http_status}`,
  ].filter(Boolean);
  return el(
    "section",
    { class: "failure is-why", role: "note" },
    el("h2", null, "Failed: ", el("span", { class: "failure-class" }, safeText(String(failure.class ?? "unknown")))),
    where.length > 0 && el("p", { class: "muted" }, safeText(where.join(" · "))),
    longText(failureMessage(failure), "code"),
    el("p", { class: "note" }, failure.retryable ? "Such a failure is tried again." : "Such a failure is not tried again."),
  );
}

function rewardBox(row, trace, slim) {
  const components = Object.entries(trace.reward_components ?? row.reward_components ?? {});
  const scored = isNumber(row.reward);
  const range = Array.isArray(row.reward_range) && row.reward_range.every(isNumber) ? row.reward_range : undefined;
  const against = isNumber(slim?.group_mean) && slim.group_size > 1;
  return el(
    "section",
    { class: "reward-box is-why" },
    el("h2", null, scored ? "Reward" : "No reward"),
    el(
      "div",
      { class: "big-reward" },
      scored ? [el("span", { class: "big num" }, formatNumber(row.reward)), rewardMark(row.reward, range)] : "the verifier could not score it",
    ),
    range && el("p", { class: "muted" }, `rewards are from ${formatNumber(range[0])} to ${formatNumber(range[1])}`),
    against && el("p", { class: "muted" }, `${formatSigned(slim.advantage)} against its group’s mean of ${formatNumber(slim.group_mean)}`),
    el(
      "p",
      null,
      el("span", { class: `badge is-${trace.status ?? "ok"}` }, safeText(String(trace.status ?? "ok"))),
      " ",
      el("span", { class: "muted" }, stopped(trace.stop_reason)),
      trace.tool_errors > 0 && [" ", el("span", { class: "badge is-truncated" }, plural(trace.tool_errors, "tool error"))],
    ),
    components.length > 0 &&
      bars(
        components.map(([name, value]) => ({
          name,
          count: value ?? 0,
          said: formatSigned(value),
          colour: value < 0 ? "var(--bad)" : "var(--good)",
        })),
        null,
      ),
  );
}

function stopped(reason) {
  return Object.hasOwn(STOPPED, reason) ? STOPPED[reason] : safeText(String(reason ?? ""));
}

function fieldsList(row) {
  const fields = extraFields(row);
  if (!fields.length) return null;
  const sorted = [...fields].sort(([a], [b]) => rank(a) - rank(b));
  const differ = FIRST.every((name) => name in row) && asText(row.expected_answer) !== asText(row.extracted_answer);
  const entries = sorted.map(([name, value]) => [
    el("dt", null, safeText(name.replace(/_/g, " "))),
    el("dd", { class: differ && name === "extracted_answer" ? "is-wrong" : null }, fieldValue(value)),
  ]);
  return el("dl", { class: "pairs fields" }, entries);
}

function fieldValue(value) {
  if (value === null) return el("span", { class: "muted" }, "null");
  if (typeof value === "object")
    return folded(Array.isArray(value) ? `list of ${value.length}` : safeText(`object: ${Object.keys(value).slice(0, 4).join(", ")}`), () =>
      jsonText(value),
    );
  if (typeof value === "string" && value.length > LONG_VALUE) return folded(safeText(`${value.slice(0, 60)} …`), () => longText(value));
  return safeText(typeof value === "number" ? formatNumber(value, 6) : String(value) || "(empty)");
}

function usageList(usage, trace) {
  const details = [
    ["cached", usage?.input_tokens_details?.cached_tokens],
    ["reasoning", usage?.output_tokens_details?.reasoning_tokens],
  ];
  const entries = [
    ["input", usage?.input_tokens],
    ["output", usage?.output_tokens],
    ...details.filter(([, value]) => value),
    ["model calls", trace.turns],
    ["tool calls", trace.tool_calls],
    ["tool errors", trace.tool_errors],
  ];
  const known = entries.filter(([, value]) => isNumber(value));
  return (
    known.length > 0 &&
    el(
      "dl",
      { class: "pairs" },
      known.map(([name, value]) => [el("dt", null, name), el("dd", { class: "num" }, formatCount(value))]),
    )
  );
}

function identity(row, trace) {
  const entries = [
    ["task", row._ng_task_index],
    ["rollout", row._ng_rollout_index],
    ["attempt", trace.attempt ?? row.attempt],
    ["agent", row.agent_ref?.name],
    ["model", row.response?.model],
    ["turns ended", [trace.finish_reasons ?? []].flat().join(", ")],
    ["policy versions", [trace.policy_version ?? []].flat().join(", ")],
    ["started", trace.started_at],
    ["run", trace.run_id],
    ["task id", trace.task_id],
    ["rollout id", trace.rollout_id],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    { class: "pairs" },
    entries.map(([name, value]) => [el("dt", null, name), el("dd", { class: "id" }, safeText(String(value ?? DASH)))]),
  );
}

function part(title, content, className) {
  return content ? el("section", { class: className }, el("h3", null, title), content) : null;
}

function rank(name) {
  const at = FIRST.indexOf(name);
  return at < 0 ? FIRST.length : at;
}
