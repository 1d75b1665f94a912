// Two to four rollouts of a task side by side; words that the first does not have are marked.
import { sparkline } from "./charts.js";
import { rewardMark, statusBadge } from "./columns.js";
import { turnElement } from "./conversation.js";
import { isSilence } from "./data.js";
import { wordDiff } from "./diff.js";
import { clear, el, link } from "./dom.js";
import { formatNumber, formatSeconds, formatSigned, isNumber, plural } from "./format.js";
import { failureMessage, failureOf, finalText, textOf, turnsOf } from "./items.js";
import { shownText } from "./markdown.js";
import { trendOf, weightsOf } from "./packed.js";
import { goInPlace, hrefOf } from "./router.js";
import { drawnOrRaw, longText, safeLine, safeText } from "./safetext.js";

const MOST_COLUMNS = 4;
const COLUMN_PX = 330;
const MOST_DIFFED = 40_000; // characters; longer texts are shown without marks

/**
 * #/r/{run}/group/{task}?agent=NAME&cols=r1:0,r1:3: what was sampled together; #/r/{run}/task/{task}: all rollouts of the task.
 * Tasks of several agents may have the same number.
 */
export function groupPage(context, route) {
  const [, run, part, task] = route.path;
  const name = nameOfRun(context, run);
  context.crumbs([
    { text: name, href: hrefOf(["r", run]) },
    { text: "tasks", href: hrefOf(["r", run, "tasks"]) },
    { text: `task ${task}` },
  ]);
  return sideBySide(context, route, [{ run, task, agent: route.params.get("agent") }], part === "task" ? context.api.task : context.api.group);
}

/** #/compare/{a}/{b}/task/{task in a}/{task in b}?a=AGENT&b=AGENT: both groups; "-" for a run that has not the task. */
export function comparedGroupsPage(context, route) {
  const [, a, b, , taskA, taskB] = route.path;
  context.crumbs([
    { text: `${nameOfRun(context, a)} against ${nameOfRun(context, b)}`, href: hrefOf(["compare", a, b]) },
    { text: `task ${taskA === "-" ? taskB : taskA}` },
  ]);
  return sideBySide(
    context,
    route,
    [
      { run: a, task: taskA, agent: route.params.get("a") },
      { run: b, task: taskB, agent: route.params.get("b") },
    ].filter(({ task }) => task !== "-"),
    context.api.task,
  );
}

function sideBySide(context, route, groups, read) {
  const control = new AbortController();
  const element = el("main", { class: "page group-page" }, el("p", { class: "muted" }, "Reading the rollouts …"));
  const known = new Map();
  const agents = Object.fromEntries(["agent", "a", "b"].map((name) => [name, route.params.get(name)]));
  let params = route.params;
  let all = [];
  let isOwed = false; // the server did not answer
  let versions = null;

  const draw = async () => {
    const asked = params;
    const weights = asked.get("at");
    const some = weights === null ? all : all.filter(({ row }) => String(weightsOf(row)) === weights);
    const shown = chosen(some, groups, asked);
    await Promise.all(
      shown
        .filter(({ key }) => !known.has(key))
        .map(async ({ key, run, row }) => known.set(key, await rolloutOrProblem(context, run, row.row, control.signal))),
    );
    isOwed = [...known.values()].some(({ error }) => isSilence(error));
    if (control.signal.aborted || asked !== params) return; // another choice is drawn
    const select = (keys) => goInPlace(hrefOf(route.path, { ...agents, at: weights, cols: keys.join(",") }));
    const slide = (at) => goInPlace(hrefOf(route.path, { ...agents, at }));
    versions ??= groups.length === 1 ? versionsPanel(all, slide) : null;
    versions?.show(weights);
    for (const part of [...element.children]) if (part !== versions?.element) part.remove();
    element.prepend(promptOf(known));
    if (versions && !versions.element.isConnected) element.append(versions.element);
    element.append(picker(context, groups, some, shown, select), columnsOf(context, shown, known));
  };
  const load = async () => {
    const found = groups.map(async ({ run, task, agent }) =>
      (await read(run, task, control.signal)).rows
        .filter((row) => agent === null || row.agent === agent)
        .map((row) => ({ run, row, key: `${run}:${row.row}` })),
    );
    all = (await Promise.all(found)).flat();
    await draw();
  };
  const refuse = (error) => {
    if (error.name === "AbortError") return;
    isOwed = isSilence(error);
    clear(element).append(el("p", { class: "problem", role: "alert" }, safeLine(error.message)));
  };
  load().catch(refuse);
  return {
    element,
    keys: [["Escape Backspace", "back", () => history.back()]],
    close: () => control.abort(),
    again() {
      if (!isOwed) return;
      isOwed = false;
      for (const [key, { error }] of known) if (error) known.delete(key);
      load().catch(refuse);
    },
    update(next) {
      if (hrefOf(next.path) !== hrefOf(route.path)) return false;
      params = next.params;
      draw().catch(refuse);
      return true;
    },
  };
}

/** The task under one version of the weights after the other: a curve, and a slider; null where there are not several. slide(weights or null) */
function versionsPanel(all, slide) {
  const { curve, trend } = trendOf(all.map(({ row }) => row));
  if (curve.length < 2) return null;
  const said = el("output", { class: "num" });
  const slider = el("input", { type: "range", min: 0, max: curve.length, "aria-label": "Weights", on: { input: () => slide(curve[slider.value - 1]?.[0] ?? null) } });
  const drawn = el("div");
  const show = (weights) => {
    const place = curve.findIndex(([version]) => String(version) === weights);
    const [version, mean, n] = curve[place] ?? [];
    slider.value = String(place + 1);
    said.textContent =
      place < 0
        ? `all ${curve.length} versions of the weights; trend ${formatSigned(trend)}`
        : `weights of version ${version}: mean reward ${formatNumber(mean)} of ${plural(n, "rollout")}`;
    slider.setAttribute("aria-valuetext", said.textContent);
    clear(drawn).append(sparkline(curve, { width: 600, height: 70, at: version ?? null, title: "Mean reward by version of the weights" }));
  };
  const element = el("section", { class: "panel versions" }, el("h3", null, "Over the versions of the weights"), drawn, slider, said);
  return { element, show };
}

/** The columns to show: those of the address; else the best and the worst of a group, or of two groups what makes their difference. */
function chosen(all, groups, params) {
  const wanted = (params.get("cols") ?? "")
    .split(",")
    .map((key) => all.find((one) => one.key === key))
    .filter(Boolean);
  if (wanted.length) return wanted.slice(0, MOST_COLUMNS);
  if (groups.length > 1) return farthest(groups.map(({ run }) => all.filter((one) => one.run === run)));
  const first = all.find(({ row }) => row.row === params.get("first"));
  const scored = all.filter(({ row }) => row.reward !== null);
  const sorted = scored.length > 1 ? scored.sort((a, b) => b.row.reward - a.row.reward) : all;
  if (first) return [first, first === sorted[0] ? sorted.at(-1) : sorted[0]].filter((one, i, both) => both.indexOf(one) === i);
  const most = Math.max(2, Math.min(3, Math.floor(innerWidth / COLUMN_PX)));
  return sorted.length <= most ? sorted : [sorted[0], sorted.at(-1)];
}

/** The best of the group with the higher mean and the worst of the other; the first of each where there is no difference. */
function farthest(groups) {
  const scored = groups.map((group) => group.filter(({ row }) => isNumber(row.reward)));
  const [a, b] = scored.map((group) => group.reduce((sum, { row }) => sum + row.reward, 0) / group.length);
  if (!(a < b || a > b)) return groups.map(([first]) => first).filter(Boolean);
  const end = (group, sign) => group.reduce((found, one) => (sign * one.row.reward > sign * found.row.reward ? one : found));
  return [end(scored[0], Math.sign(a - b)), end(scored[1], Math.sign(b - a))];
}

function picker(context, groups, all, shown, select) {
  const keys = shown.map(({ key }) => key);
  const toggle = (key) =>
    select(keys.includes(key) ? (keys.length > 1 ? keys.filter((one) => one !== key) : keys) : [...keys, key].slice(-MOST_COLUMNS));
  return el(
    "div",
    { class: "picker" },
    groups.map(({ run }) =>
      el(
        "div",
        { class: "picker-line", role: "group", "aria-label": "Which rollouts are shown" },
        el(
          "span",
          { class: "label" },
          groups.length > 1 ? safeLine(nameOfRun(context, run)) : `${plural(all.length, "rollout")}, choose up to ${MOST_COLUMNS}`,
        ),
        all
          .filter((one) => one.run === run)
          .map(({ key, row }) =>
            el(
              "button",
              {
                type: "button",
                class: "chip",
                "aria-pressed": String(keys.includes(key)),
                title: safeLine(row.failure ?? row.status),
                on: { click: () => toggle(key) },
              },
              `${row.rollout ?? row.row} `,
              row.status === "failed" ? statusBadge(row) : rewardMark(row.reward),
            ),
          ),
      ),
    ),
    el(
      "p",
      { class: "note" },
      "Words marked ",
      el("ins", null, "so"),
      " are not in the first column; ",
      el("del", null, "so"),
      " are only there.",
    ),
  );
}

/** The prompt: the same for all. */
function promptOf(known) {
  const rollout = [...known.values()].find((one) => one.rollout)?.rollout;
  const asked = rollout ? turnsOf(rollout).findLast((turn) => turn.given && turn.kind === "message" && turn.role === "user") : null;
  return el("div", { class: "asked" }, asked ? turnElement(asked, shownText) : null);
}

function columnsOf(context, shown, known) {
  const first = known.get(shown[0]?.key);
  const columns = shown.map((one, i) => {
    const { rollout, error } = known.get(one.key);
    return el(
      "section",
      { class: "group-column", "aria-label": `rollout ${one.key}` },
      columnHead(context, one, new Set(shown.map(({ run }) => run)).size > 1),
      error
        ? el("p", { class: "problem" }, safeLine(error.message))
        : drawnOrRaw(() => columnBody(rollout, i === 0 ? null : first?.rollout), rollout),
    );
  });
  return el("div", { class: "group-columns", vars: { "--count": String(columns.length) } }, columns);
}

function columnHead(context, { run, row }, severalRuns) {
  const figures = [
    isNumber(row.output_tokens) && plural(row.output_tokens, "token"),
    isNumber(row.turns) && plural(row.turns, "turn"),
    isNumber(row.seconds) && formatSeconds(row.seconds),
  ];
  return el(
    "header",
    { class: "column-head" },
    el("h2", null, severalRuns && `${safeLine(nameOfRun(context, run))}, `, `rollout ${row.rollout ?? row.row}`),
    row.status === "failed" ? null : rewardMark(row.reward),
    statusBadge(row),
    el("span", { class: "muted num" }, figures.filter(Boolean).join(" · ")),
    link(hrefOf(["r", run, "row", row.row]), "open"),
  );
}

function columnBody(rollout, first) {
  const failure = failureOf(rollout);
  if (failure)
    return el(
      "div",
      { class: "failure" },
      el("b", null, safeText(String(failure.class ?? "unknown"))),
      longText(failureMessage(failure), "code"),
    );
  const others = first && !failureOf(first) ? turnsOf(first).filter((turn) => !turn.given) : null;
  const turns = turnsOf(rollout).filter((turn) => !turn.given);
  const last = turns.findLastIndex((turn) => turn.kind === "message");
  return el(
    "div",
    { class: "conversation" },
    turns.map((turn, i) => {
      if (!others || turn.kind !== "message") return marked(turn, others?.[i], Boolean(others));
      const against = i === last ? finalText(first) : others[i]?.kind === "message" ? textOf(others[i]) : "";
      return turnElement(turn, (text) => diffText(against, text));
    }),
  );
}

/** A step that the first rollout does not have at this position is highlighted. */
function marked(turn, other, compare) {
  const made = turnElement(turn);
  if (compare && turn.kind === "call" && (other?.kind !== "call" || textOf(other) !== textOf(turn))) made.classList.add("is-different");
  return made;
}

function diffText(before, after) {
  if (before.length + after.length > MOST_DIFFED) return longText(after);
  const marks = { same: "span", gone: "del", new: "ins" };
  return el(
    "div",
    { class: "text" },
    wordDiff(before, after).map(({ kind, text }) => el(marks[kind], null, safeText(text))),
  );
}

async function rolloutOrProblem(context, run, row, signal) {
  try {
    return { rollout: JSON.parse(await context.api.rowText(run, row, signal)), error: null };
  } catch (error) {
    return { rollout: null, error };
  }
}

function nameOfRun(context, id) {
  return context.live.state.runs.find((run) => run.id === id)?.name ?? id;
}
