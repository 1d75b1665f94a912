// The rows of a long list: pages of 200 are fetched on demand; old ones are shown until new ones arrive.

const PAGE_ROWS = 200;
const KEPT_PAGES = 50;
const AGAIN_MS = 500; // a search of whole texts goes on in the server; it is asked again

export class Pages {
  #fetch;
  #changed;
  #pages = new Map(); // page number -> {rows, fresh}
  #underway = new Map(); // page number -> AbortController
  #again = null;
  #version = 0; // of the file: what was asked for before it grew is old when it comes

  /** fetchPage(offset, limit, signal) -> {total, rows, searching?, scanned?}; changed() is called after every answer. */
  constructor(fetchPage, changed) {
    this.#fetch = fetchPage;
    this.#changed = changed;
    this.total = null;
    this.answer = null; // the last one, for what else it says
    this.error = null;
  }

  row(index) {
    return this.#pages.get(Math.floor(index / PAGE_ROWS))?.rows[index % PAGE_ROWS] ?? null;
  }

  /** Fetch what is missing of rows first..last; end what is under way elsewhere. */
  want(first, last) {
    const pages = [];
    const end = Math.floor(Math.max(first, last) / PAGE_ROWS);
    for (let page = Math.floor(first / PAGE_ROWS); page <= end; page++) pages.push(page);
    for (const [page, control] of this.#underway) if (!pages.includes(page)) control.abort();
    for (const page of pages) if (!this.#pages.get(page)?.fresh && !this.#underway.has(page)) this.#load(page);
  }

  /** The file has grown: the old rows are shown until the new ones are fetched. */
  refresh() {
    this.#version++;
    for (const page of this.#pages.values()) page.fresh = false;
  }

  close() {
    clearTimeout(this.#again);
    for (const control of this.#underway.values()) control.abort();
  }

  async #load(page) {
    const control = new AbortController();
    const version = this.#version;
    this.#underway.set(page, control);
    try {
      const answer = await this.#fetch(page * PAGE_ROWS, PAGE_ROWS, control.signal);
      this.#keep(page, answer, version === this.#version);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.error = error;
    } finally {
      this.#underway.delete(page);
    }
    this.#changed();
  }

  #keep(page, answer, fresh) {
    this.#pages.delete(page); // the map's order is that of arrival
    this.#pages.set(page, { rows: answer.rows, fresh });
    if (this.#pages.size > KEPT_PAGES) this.#pages.delete(this.#pages.keys().next().value);
    this.total = answer.total;
    this.answer = answer;
    this.error = null;
    clearTimeout(this.#again);
    if (answer.searching) {
      this.#again = setTimeout(() => {
        this.refresh();
        this.#changed();
      }, AGAIN_MS);
    }
  }
}
