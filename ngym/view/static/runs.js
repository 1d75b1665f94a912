// The list of open runs, one line each; a single one is opened at once.
import { clear, columnTable, el, link } from "./dom.js";
import { formatBytes, formatCount, formatNumber, formatPercent } from "./format.js";
import { isIndexing } from "./run_list_feed.js";
import { go, hrefOf } from "./router.js";
import { safeLine } from "./safetext.js";

/** #/ */
export function runsPage(context) {
  const element = el("main", { class: "page runs-page" });
  const chosen = new Set();
  let said = "";
  const draw = () => {
    const { runs } = context.live.state;
    const says = JSON.stringify([runs, [...chosen]]);
    if (says === said) return;
    said = says;
    const name = nameOfPart(document.activeElement);
    clear(element).append(...listing(runs, chosen, draw));
    if (name) [...element.querySelectorAll("a, input")].find((part) => nameOfPart(part) === name)?.focus();
  };
  context.crumbs([]);
  draw();
  const stop = context.live.onChange(() => element.matches(":active") || draw()); // never under a finger that is down
  return { element, keys: [["t", "training curves", () => go("#/training")]], update: (route) => route.path.length === 0, close: stop };
}

/** What the reader's focus is found by again. */
function nameOfPart(part) {
  return part?.getAttribute("aria-label") ?? part?.getAttribute("href") ?? null;
}

/** Where the page goes at first: to the run itself where only one is open. */
export function homeOf(runs) {
  if (runs.length !== 1) return null;
  return runs[0].kind === "rollouts" ? hrefOf(["r", runs[0].id]) : hrefOf(["training"], { runs: runs[0].id });
}

function listing(runs, chosen, draw) {
  if (!runs.length) return [el("p", { class: "empty" }, "No run is open. Start it with a file or a folder: ng_view out.jsonl")];
  const rollouts = runs.filter((run) => run.kind === "rollouts");
  const training = runs.filter((run) => run.kind === "training");
  return [
    rollouts.length > 0 &&
      el(
        "section",
        { class: "panel" },
        el(
          "div",
          { class: "section-head" },
          el("h2", null, "Rollouts"),
          el("div", { class: "fill" }),
          rollouts.length > 1 && compareLink(chosen),
        ),
        rolloutTable(rollouts, chosen, draw),
      ),
    training.length > 0 &&
      el(
        "section",
        { class: "panel" },
        el(
          "div",
          { class: "section-head" },
          el("h2", null, "Training"),
          el("div", { class: "fill" }),
          link(hrefOf(["training"], { runs: training.map((run) => run.id).join(",") }), "All curves", { class: "button" }),
        ),
        trainingTable(training),
      ),
  ].filter(Boolean);
}

function compareLink(chosen) {
  const both = [...chosen];
  if (both.length === 2) return link(hrefOf(["compare", ...both]), "Compare the two", { class: "button is-main" });
  return el("span", { class: "muted" }, "tick two to compare them");
}

function rolloutTable(runs, chosen, draw) {
  const tick = (run) => {
    const box = el("input", { type: "checkbox", checked: chosen.has(run.id), "aria-label": safeLine(`compare ${run.name}`) });
    box.addEventListener("change", () => {
      if (!chosen.delete(run.id)) chosen.add(run.id);
      if (chosen.size > 2) chosen.delete(chosen.values().next().value);
      draw();
    });
    return box;
  };
  const line = (run) =>
    el(
      "tr",
      null,
      runs.length > 1 && el("td", null, tick(run)),
      el(
        "td",
        { class: "run-name" },
        link(hrefOf(["r", run.id]), safeLine(run.name)),
        el("div", { class: "muted path", title: safeLine(run.path) }, el("bdi", null, safeLine(run.path))),
      ),
      el("td", { class: "num" }, formatNumber(run.mean_reward)),
      el("td", { class: `num ${run.unscored_share ? "is-warn" : ""}` }, formatPercent(run.unscored_share)),
      el("td", { class: "num" }, formatCount(run.rows)),
      el("td", { class: `num ${run.failures ? "is-bad" : ""}` }, formatCount(run.failures)),
      el("td", { class: "wide" }, safeLine((run.environments ?? []).join(", "))),
      el("td", { class: "num wide" }, formatBytes(run.bytes)),
      el("td", null, stateOf(run)),
    );
  const columns = { run: null, "mean reward": "num", unscored: "num", rollouts: "num", failed: "num", environments: "wide", size: "num wide", " ": null };
  return columnTable("runs", runs.length > 1 ? { "": null, ...columns } : columns, runs.map(line));
}

function stateOf(run) {
  if (run.error) return el("span", { class: "is-bad" }, safeLine(run.error));
  if (isIndexing(run)) return el("span", { class: "badge" }, `reading ${formatPercent(run.indexed_bytes / run.bytes)}`);
  return run.growing ? el("span", { class: "badge is-live" }, "growing") : null;
}

function trainingTable(runs) {
  const line = (run) =>
    el(
      "tr",
      null,
      el(
        "td",
        { class: "run-name" },
        link(hrefOf(["training"], { runs: run.id }), safeLine(run.name)),
        el("div", { class: "muted path", title: safeLine(run.path) }, el("bdi", null, safeLine(run.path))),
      ),
      el("td", { class: "num" }, formatNumber(run.last?.["reward/mean"])),
      el("td", { class: `num ${run.last?.frac_unscored ? "is-warn" : ""}` }, formatPercent(run.last?.frac_unscored)),
      el("td", { class: "num" }, formatCount(run.steps)),
      el("td", null, stateOf(run)),
    );
  return columnTable("runs", { run: null, "last reward": "num", unscored: "num", steps: "num", "": null }, runs.map(line));
}
