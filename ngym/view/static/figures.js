// The figures beside the table: those of the filtered rows, requested again when there is enough new data.
import { isSilence } from "./data.js";
import { clear, el, folded, released } from "./dom.js";
import { formatCount, formatNumber, plural } from "./format.js";
import { packedShare } from "./packed.js";
import { go, hrefOf } from "./router.js";
import { safeLine } from "./safetext.js";
import { statsColumn } from "./stats.js";

const FIGURES_AGAIN_MS = 1000; // a search goes on in the server; its figures are asked for again
const FIGURES_GROWTH = 1.5; // figures of a large file cost the server what its reading needs; they wait for half as many rows more
const WIDE_PX = 900; // below, the figures are folded

/** The left column of a run's page; onRange([lowest, highest]) when the rewards of the whole run are known. */
export class Figures {
  #control = null;
  #timer = 0;
  #underway = false;
  #error = null;
  #rows = 0; // of the run, when the figures were asked for
  #column = el("aside", { class: "figures", "aria-label": "Figures of the run" });
  #summary = el("summary", null, "Figures");

  constructor(api, run, onRange) {
    Object.assign(this, { api, run, onRange, q: "", sort: "" });
    this.element = el("details", { class: "overview", open: innerWidth >= WIDE_PX }, this.#summary, this.#column);
  }

  /** Those of the rows that fit q; what is clicked narrows the filter, and keeps the order of the rollouts. */
  show(q, sort) {
    const areThere = this.#control !== null && q === this.q;
    Object.assign(this, { q, sort });
    if (!areThere) this.#fetch();
  }

  grown(run) {
    this.run = run;
    const rows = run.rows + run.failures;
    if (this.#underway || (run.growing && rows < this.#rows * FIGURES_GROWTH)) return;
    this.#rows = rows;
    this.#fetch();
  }

  /** The server answers again: ask for what it did not give. */
  again() {
    if (isSilence(this.#error)) this.#fetch();
  }

  close() {
    clearTimeout(this.#timer);
    this.#control?.abort();
  }

  async #fetch() {
    this.close();
    const control = new AbortController();
    this.#control = control;
    this.#underway = true;
    this.#error = null;
    const asked = this.run;
    try {
      const stats = await this.api.stats(asked.id, this.q, control.signal);
      await released(this.#column);
      if (control.signal.aborted) return;
      this.#draw(stats);
      this.#underway = false;
      if (this.run !== asked) this.grown(this.run); // it grew meanwhile
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#underway = false;
      this.#error = error;
      clear(this.#column).append(el("p", { class: "note" }, error.status === 400 ? "" : safeLine(error.message))); // the filter box reports a 400
    }
  }

  #draw(stats) {
    const edges = stats?.histogram?.edges;
    if (!this.q && edges?.length) this.onRange([Math.min(0, edges[0]), Math.max(1, edges.at(-1))]);
    if (stats) {
      const left = `${formatCount(stats.unscored)} unscored, ${formatCount(stats.failed)} failed`;
      this.#summary.textContent = `Figures: mean reward ${formatNumber(stats.mean)}, ${left}`;
    }
    if (stats?.searching) this.#timer = setTimeout(() => this.#fetch(), FIGURES_AGAIN_MS);
    const share = this.api.packed && packedShare(this.api.packed, this.run);
    const actions = {
      filter: (term) => go(hrefOf(["r", this.run.id], { q: [this.q, term].filter(Boolean).join(" "), sort: this.sort })),
      open: (row) => go(hrefOf(["r", this.run.id, "row", row])),
    };
    const parts = [share && shareNote(share), statsColumn(stats, actions, this.q !== "" && !share), badLines(this.run)];
    clear(this.#column).append(...parts.filter(Boolean));
  }
}

function shareNote({ listed, full, of }) {
  return el(
    "p",
    { class: "note packed-note" },
    `This report lists ${formatCount(listed)} of ${plural(of, "rollout")} and holds ${formatCount(full)} of them in full.`,
  );
}

/** Lines of the file that are no rollouts are told, never hidden. */
function badLines(run) {
  const note = run.note && el("p", { class: "note" }, safeLine(run.note));
  if (!run.bad_lines) return note;
  const told = () =>
    el(
      "ul",
      { class: "note bad-lines" },
      run.bad.map((problem) => el("li", null, safeLine(problem))),
      run.bad_lines > run.bad.length && el("li", null, `and ${formatCount(run.bad_lines - run.bad.length)} more`),
    );
  return el("div", null, note, folded(el("span", { class: "is-warn" }, `${plural(run.bad_lines, "line")} could not be read`), told));
}
