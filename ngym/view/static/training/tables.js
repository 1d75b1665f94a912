// The tables below the charts: last values, differences of the recipes, and rollouts of a step.
import { el, folded, link } from "../dom.js";
import { DASH, formatNumber, isNumber } from "../format.js";
import { hrefOf } from "../router.js";
import { prettyJson, safeLine, safeText } from "../safetext.js";
import { trainingDuration, trainingNumber } from "./axes.js";
import { trainingGroups } from "./chart_groups.js";

const TRAINING_OFFERED = 24; // steps of a run whose rollouts are offered

export function trainingSwatch(run) {
  return el("span", { class: "training-swatch", vars: { "--colour": `var(--s${run.colour})` } });
}

/** The last value of every metric of every run; of two runs also the difference. */
export function lastValuesTable(runs, wanted) {
  const names = [...new Set(runs.flatMap((run) => [...run.data.columns.keys()]))];
  const rows = trainingGroups(names).flatMap(({ title, metrics, phases }) => {
    const shown = [...metrics, ...phases].filter(wanted);
    return shown.length ? [el("tr", { class: "training-section" }, el("th", { colspan: runs.length + 2 }, title)), ...shown.map((name) => valueRow(name, runs))] : [];
  });
  const steps = el("tr", null, el("td", null, "step"), runs.map((run) => el("td", { class: "num" }, formatNumber(run.data.lastStep))), differenceCell(runs));
  const took = el("tr", null, el("td", null, "time"), runs.map((run) => el("td", { class: "num" }, timeOf(run))), differenceCell(runs));
  return valuesTable(runs, "metric", [steps, took, ...rows], runs.length === 2 ? "difference" : null);
}

/** The keys in which the recipes differ, or all of them. */
export function configTable(runs, all, wanted) {
  const known = runs.filter((run) => run.config);
  const keys = [...new Set(known.flatMap((run) => Object.keys(run.config.recipe)))].sort().filter(wanted);
  const differs = (key) => new Set(known.map((run) => JSON.stringify(run.config.recipe[key]))).size > 1;
  const shown = all || known.length < 2 ? keys : keys.filter(differs);
  const rows = shown.map((key) => el("tr", { class: differs(key) ? "is-different" : null }, el("td", null, el("code", null, brokenAtDots(key))), known.map((run) => configCell(run.config.recipe, key))));
  const texts = known.filter((run) => run.config.text).map((run) => {
    const title = el("span", null, trainingSwatch(run), safeLine(`recipe.yaml of ${run.name}`));
    return folded(title, () => el("pre", { class: "training-recipe" }, safeText(run.config.text)));
  });
  const none = known.length > 1 ? "The recipes are the same." : "There is no recipe.yaml in the run's folder.";
  return el("div", null, rows.length ? valuesTable(known, "key", rows, null) : el("p", { class: "empty" }, none), texts);
}

/** Links to the rollouts that the weights before a step sampled; `picked` is a step or null. */
export function samplesList(runs, picked) {
  return el("div", { class: "training-samples" }, runs.map((run) => el("section", null, el("h3", null, trainingSwatch(run), safeLine(run.name)), samplesOf(run, picked))));
}

/** One link to the rollouts of a step, or why there is none. */
export function sampleLink(run, step, text) {
  const { file, field } = run.samples ?? {};
  if (!file || !field || step < 1) return el("span", { class: "muted" }, text);
  return link(hrefOf(["r", file], { q: `${field}:${step - 1}` }), text, { title: `rollouts sampled by the weights after step ${step - 1}` });
}

/** One link to the held-out rollouts of the evaluation after a step; nothing where there was none. */
export function heldOutLink(run, step, text) {
  const file = run.samples?.held_out;
  if (!file || !evaluatedSteps(run).includes(step)) return null;
  return link(hrefOf(["r", file], { q: `learned:${step}` }), text, { title: `held-out rollouts of the weights after step ${step}` });
}

function samplesOf(run, picked) {
  return [trainedOn(run, picked), heldOutOf(run, picked)];
}

function heldOutOf(run, picked) {
  const steps = run.samples?.held_out ? evaluatedSteps(run) : [];
  if (!steps.length) return null;
  return [
    el("p", { class: "muted" }, "Held-out rollouts of the weights after a step:"),
    el("p", { class: "training-steps" }, steps.map((step) => el("span", { class: step === picked ? "is-picked" : null }, heldOutLink(run, step, `step ${formatNumber(step)}`)))),
  ];
}

/** The steps after which the policy was evaluated on tasks. */
function evaluatedSteps({ data }) {
  const columns = [...data.columns].filter(([name]) => name.startsWith("eval/")).map(([, values]) => values);
  return Array.from(data.steps.subarray(0, data.count)).filter((_, row) => columns.some((values) => isNumber(values[row])));
}

function trainedOn(run, picked) {
  if (!run.samples) return [el("p", { class: "muted" }, "not read yet")];
  if (!run.samples.field) return [el("p", { class: "muted" }, safeLine(run.samples.note))];
  if (!run.samples.file) return [el("p", { class: "muted" }, "its rollouts.jsonl is not open here: give ng_view the run's folder")];
  const steps = rolloutSteps(run);
  const every = Math.max(1, Math.ceil(steps.length / TRAINING_OFFERED));
  const offered = steps.filter(({ step }, i) => i % every === 0 || i === steps.length - 1 || step === picked);
  return [
    el("p", { class: "muted" }, `Step n trained the rollouts that the weights after step n − 1 sampled${run.samples.note ? `; ${safeLine(run.samples.note)}` : ""}.`),
    el("p", { class: "training-steps" }, offered.map(({ step, reward }) => {
      const mean = el("span", { class: "num muted", title: "reward/mean" }, formatNumber(reward));
      return el("span", { class: step === picked ? "is-picked" : null }, sampleLink(run, step, `step ${formatNumber(step)}`), " ", mean);
    })),
  ];
}

function rolloutSteps({ data }) {
  const rewards = data.columns.get("reward/mean");
  if (!rewards) return [];
  return Array.from(data.steps.subarray(0, data.count), (step, row) => ({ step, reward: rewards[row] })).filter(({ step, reward }) => isNumber(reward) && step >= 1);
}

function valueRow(name, runs) {
  const values = runs.map((run) => run.data.lastValue(name));
  return el("tr", null, el("td", null, safeLine(name)), values.map((value) => el("td", { class: "num" }, trainingNumber(value))), differenceCell(runs, values));
}

function differenceCell(runs, values = []) {
  if (runs.length !== 2) return null;
  const [a, b] = values;
  return el("td", { class: "num muted" }, isNumber(a) && isNumber(b) ? `${b > a ? "+" : ""}${trainingNumber(b - a)}` : "");
}

function timeOf({ data }) {
  return data.count ? trainingDuration(data.seconds[data.count - 1]) : DASH;
}

/** A key that may break after each dot. */
function brokenAtDots(key) {
  return key.split(/(?<=\.)/).flatMap((part) => [el("wbr"), safeLine(part)]);
}

function configCell(recipe, key) {
  if (!(key in recipe)) return el("td", { class: "muted" }, DASH);
  const value = recipe[key];
  return el("td", null, el("code", null, safeLine(typeof value === "string" ? value : prettyJson(value))));
}

function valuesTable(runs, first, rows, last) {
  const heads = runs.map((run) => el("th", { class: "num" }, trainingSwatch(run), safeLine(run.name)));
  const made = el("table", { class: `training-table is-${first}` }, el("thead", null, el("tr", null, el("th", null, first), heads, last && el("th", { class: "num" }, last))));
  made.append(el("tbody", null, rows));
  return el("div", { class: "training-scroll", tabindex: 0 }, made);
}
