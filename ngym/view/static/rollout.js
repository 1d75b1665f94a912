// The page of one rollout: its conversation or its tokens, the verdict beside it, its group above it.
import { conversation } from "./conversation.js";
import { isSilence } from "./data.js";
import { clear, el, link } from "./dom.js";
import { formatNumber, formatSigned, isNumber } from "./format.js";
import { rewardColour } from "./charts.js";
import { failureOf } from "./items.js";
import { isRaw, rawSwitch } from "./markdown.js";
import { go, goInPlace, hrefOf } from "./router.js";
import { shareButton } from "./runbar.js";
import { drawnOrRaw, safeLine } from "./safetext.js";
import { remember } from "./theme.js";
import { tokensView } from "./tokens.js";
import { verdictPanel } from "./verdict.js";

/** #/r/{run}/row/{row}?q=&sort=&at=&view=&colour= ; q, sort and at say in which list it was found. */
export function rolloutPage(context, route) {
  const page = new RolloutPage(context, route);
  return {
    element: page.element,
    keys: page.keys(),
    update: (next) => page.update(next),
    again: () => page.again(),
    close: () => page.close(),
  };
}

class RolloutPage {
  #control = new AbortController();
  #text = null;
  #group = [];
  #owed = null; // what is done again when the server answers again
  #problem = el("span", { class: "is-bad", role: "status" }); // why there is no group, or no neighbour

  constructor(context, route) {
    this.context = context;
    this.params = route.params;
    [, this.run, , this.row] = route.path;
    this.main = el("div", { class: "rollout-main" }, el("p", { class: "muted waiting-note" }, "Reading the rollout …"));
    this.side = el("div", { class: "rollout-side" });
    this.bar = el("div", { class: "group-bar" });
    this.element = el("main", { class: "page rollout-page" }, this.bar, el("div", { class: "rollout-columns" }, this.main, this.side));
    this.#crumbs([{ text: "reading …" }]);
    this.loaded = this.#load();
  }

  keys() {
    return [
      ["j ArrowRight", "next rollout of the list", () => this.#step(1)],
      ["k ArrowLeft", "previous rollout of the list", () => this.#step(-1)],
      ["]", "next rollout of the group", () => this.#stepInGroup(1)],
      ["[", "previous rollout of the group", () => this.#stepInGroup(-1)],
      ["s", "the group side by side", () => this.loaded.then(() => this.parsed && go(this.#groupHref()))],
      ["v", "conversation or tokens", () => go(this.#href({ view: this.#isTokens ? "" : "tokens" }))],
      ["m", "texts rendered or raw", () => (remember("raw", !isRaw()), this.parsed && this.#draw())],
      ["/", "back to the list, to filter", () => go(this.#listHref())],
      ["Escape Backspace", "back to the list", () => go(this.#listHref())],
    ];
  }

  update({ path, params }) {
    if (hrefOf(path) !== hrefOf(["r", this.run, "row", this.row])) return false;
    this.params = params;
    if (this.parsed) this.#draw();
    return true;
  }

  /** The server answers again. */
  again() {
    const owed = this.#owed;
    this.#owed = null;
    owed?.();
  }

  close() {
    this.#control.abort();
  }

  get #isTokens() {
    return this.params.get("view") === "tokens";
  }

  #crumbs(more) {
    const run = this.context.live.state.runs.find((one) => one.id === this.run);
    this.context.crumbs([{ text: run?.name ?? this.run, href: this.#listHref() }, ...more]);
  }

  async #load() {
    const { api } = this.context;
    const again = () => (this.loaded = this.#load());
    this.#problem.textContent = "";
    try {
      this.#text = await api.rowText(this.run, this.row, this.#control.signal);
      this.parsed = JSON.parse(this.#text);
      this.#group = await this.#readGroup(again);
      this.#show();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#crumbs([{ text: `line ${this.row}` }]);
      this.#refuse(error, again);
    }
  }

  /** A rollout is shown without its group, too. */
  async #readGroup(again) {
    const { _ng_task_index: task } = this.parsed;
    if (task === null || task === undefined) return [];
    try {
      const { rows } = await this.context.api.group(this.run, task, this.#control.signal);
      const own = rows.find((one) => one.row === this.row);
      return own ? rows.filter((one) => one.agent === own.agent) : rows; // other agents' tasks may have the same index
    } catch (error) {
      if (error.name === "AbortError") throw error;
      this.#tell(error, "The group of this rollout could not be read: ", again);
      return [];
    }
  }

  #show() {
    const slim = this.#group.find((one) => one.row === this.row) ?? null;
    const { _ng_task_index: task, _ng_rollout_index: number, attempt } = this.parsed;
    this.#crumbs([
      { text: `task ${task ?? "?"}`, href: this.#groupHref() },
      { text: failureOf(this.parsed) ? `rollout ${number ?? "?"}, attempt ${attempt ?? "?"}: failed` : `rollout ${number ?? "?"}` },
    ]);
    clear(this.side).append(drawnOrRaw(() => verdictPanel(this.parsed, this.#text, slim), this.parsed));
    this.#draw();
    this.#showTrained();
  }

  /** What the trainer made of it, if a trainer recorded that; the page is whole without it. */
  async #showTrained() {
    const found = await this.context.api.trained(this.run, this.row, this.#control.signal).catch(() => null);
    const text = isNumber(found?.step) ? `trained in step ${found.step} with the advantage ${formatSigned(found.advantage)}` : found && "in no training step so far";
    if (text) this.side.querySelector(".reward-box")?.append(el("p", { class: "muted trained" }, text));
  }

  #draw() {
    const tab = (text, view) =>
      link(this.#href({ view }), text, { class: "tab", "aria-current": this.#isTokens === (view === "tokens") ? "page" : null });
    clear(this.bar).append(
      el("nav", { class: "tabs", "aria-label": "Parts of the rollout" }, tab("Conversation", ""), tab("Tokens", "tokens")),
      ...(this.#group.length > 1
        ? [
            el("span", { class: "label" }, `task ${this.parsed._ng_task_index}, ${this.#group.length} rollouts`),
            groupStrip(this.#group, this.row, (row) => this.#href({ at: "" }, row)),
            link(this.#groupHref(), "Side by side", { class: "button quiet" }),
          ]
        : []),
      this.#problem,
      el("div", { class: "fill" }),
      ...(this.#isTokens ? [] : [rawSwitch(() => this.#draw())]),
      ...[shareButton(this.context.api, this.run, () => ({ row: this.row }), () => `rollout-${this.row}`)].filter(Boolean),
      ...this.#neighbours(),
    );
    if (this.#isTokens) this.#drawTokens();
    else clear(this.main).append(drawnOrRaw(() => conversation(this.parsed), this.parsed));
  }

  async #drawTokens() {
    try {
      const answer = this.tokens ?? (await this.context.api.tokens(this.run, this.row, this.#control.signal));
      this.tokens = answer;
      if (!this.#isTokens) return; // the reader has gone back to the conversation
      clear(this.main).append(tokensView(answer, this.params.get("colour") ?? "logprob", (way) => goInPlace(this.#href({ colour: way }))));
    } catch (error) {
      if (error.name !== "AbortError" && this.#isTokens) this.#refuse(error, () => this.#draw());
    }
  }

  #refuse(error, again) {
    if (isSilence(error)) this.#owed = again;
    clear(this.main).append(el("p", { class: "problem", role: "alert" }, safeLine(error.message)));
  }

  #tell(error, before, again) {
    if (isSilence(error)) this.#owed = again;
    this.#problem.textContent = before + safeLine(error.message);
  }

  #neighbours() {
    if (this.#at === null) return [];
    const step = (text, steps, title) =>
      el(
        "button",
        { type: "button", class: "button quiet icon", title, "aria-label": title, on: { click: () => this.#step(steps) } },
        text,
      );
    return [
      el("span", { class: "label num" }, `no. ${this.#at + 1} of the list`),
      step("↑", -1, "Previous rollout of the list (k)"),
      step("↓", 1, "Next rollout of the list (j)"),
    ];
  }

  get #at() {
    const at = this.params.get("at");
    return at === null || !/^\d+$/.test(at) ? null : Number(at);
  }

  #href(change, row = this.row) {
    return hrefOf(["r", this.run, "row", row], { ...Object.fromEntries(this.params), ...change });
  }

  #listHref() {
    return hrefOf(["r", this.run], { q: this.params.get("q"), sort: this.params.get("sort") });
  }

  #groupHref() {
    const agent = this.#group.find((one) => one.row === this.row)?.agent;
    return hrefOf(["r", this.run, "group", String(this.parsed._ng_task_index)], { first: this.row, agent });
  }

  async #step(steps) {
    if (this.#at === null) return this.#stepInGroup(steps);
    const at = this.#at + steps;
    if (at < 0) return;
    const query = { q: this.params.get("q"), sort: this.params.get("sort"), offset: at, limit: 1 };
    try {
      const { rows } = await this.context.api.rows(this.run, query, this.#control.signal);
      if (rows.length) goInPlace(this.#href({ at }, rows[0].row));
    } catch (error) {
      if (error.name !== "AbortError") this.#tell(error, "", () => (this.#problem.textContent = ""));
    }
  }

  async #stepInGroup(steps) {
    await this.loaded;
    const next = this.#group[this.#group.findIndex((one) => one.row === this.row) + steps];
    if (next) goInPlace(this.#href({ at: "" }, next.row));
  }
}

/** A group's rollouts as small marks; the shown one is highlighted. */
function groupStrip(rows, shown, hrefOfRow) {
  return el(
    "nav",
    { class: "group-strip", "aria-label": "Rollouts of the task" },
    rows.map((row) => {
      const said = row.status === "failed" ? "failed" : isNumber(row.reward) ? formatNumber(row.reward, 2) : "none";
      const colour = isNumber(row.reward) ? rewardColour(row.reward) : "var(--muted)";
      return link(hrefOfRow(row.row), said, {
        class: `mark is-${row.status}`,
        vars: { "--colour": colour },
        title: safeLine(`rollout ${row.rollout}${row.failure ? `: ${row.failure}` : ""}`),
        "aria-current": row.row === shown ? "true" : null,
      });
    }),
  );
}
