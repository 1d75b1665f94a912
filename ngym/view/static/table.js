// A table of 100,000 rows: only visible rows are elements; scrolling reuses them.
import { isSilence } from "./data.js";
import { clear, el, released } from "./dom.js";
import { Pages } from "./pages.js";

const ROW_PX = 30;
const GAP_PX = 12; // between columns, as style.css has it
const SPARE_ROWS = 5; // above and below what is in sight
const MAX_PX = 12_000_000; // browsers draw no taller box; a longer list is scrolled faster than it moves
const SETTLED_MS = 40;
const NOT_HERE = Symbol("a row that has not come yet");

/**
 * A grid over pages of rows.
 * columns: [{key, label, width, cell(row) -> string|Node|array, sort, descends: the largest first, class, title, titleOf(row)}]
 * options: {label, columns, sort, fetchPage, hrefOf(row, index), onSort(key, descends), onOpen(row, index), onState(pages),
 *   empty() -> what is said of no rows, keep: a place}
 */
export class Table {
  #options;
  #columns;
  #pages;
  #slots = [];
  #frame = 0;
  #timer = 0;
  #size = new ResizeObserver(() => this.#soon());
  #box = el("div", { class: "rows", role: "presentation" });
  #head = el("div", { class: "table-head", role: "row" });
  #note = el("div", { class: "table-note" }); // no role: a grid has rows alone

  constructor(options) {
    this.#options = options;
    this.selected = options.keep?.selected ?? -1;
    this.element = el(
      "div",
      {
        class: "table",
        role: "grid",
        tabindex: 0,
        "aria-label": options.label,
        on: {
          scroll: () => this.#soon(),
          click: (event) => this.#clicked(event),
        },
      },
      this.#head,
      this.#box,
      this.#note,
    );
    this.#pages = new Pages(options.fetchPage, () => this.#answered());
    this.#size.observe(this.element);
    this.setColumns(options.columns, options.sort);
    this.#pages.want(0, 0);
  }

  get total() {
    return this.#pages.total;
  }

  /** The reader's position, to return to. */
  get place() {
    return { top: this.element.scrollTop, selected: this.selected };
  }

  setColumns(columns, sort) {
    this.#columns = columns;
    this.element.style.setProperty("--columns", columns.map((column) => column.width).join(" "));
    this.element.style.setProperty("--least", `${leastWidth(columns)}px`);
    clear(this.#head).append(...columns.map((column) => this.#headCell(column, sort)));
    for (const slot of this.#slots) slot.shows = null;
    this.#soon();
  }

  /** Other rows: another filter or another order. */
  setSource(fetchPage, sort) {
    this.#pages.close();
    this.#pages = new Pages(fetchPage, () => this.#answered());
    this.selected = -1;
    this.element.scrollTop = 0;
    this.setColumns(this.#columns, sort);
    this.#pages.want(0, 0);
  }

  /** The same rows, of which there may be more now. */
  refresh() {
    this.#pages.refresh();
    this.#soon();
  }

  /** The server answers again: ask for what it did not give. */
  again() {
    if (isSilence(this.#pages.error)) this.#soon();
  }

  /** Select the row `steps` further on, and bring it into sight. */
  move(steps) {
    if (!this.total) return;
    this.selected = Math.max(0, Math.min(this.total - 1, this.selected + steps));
    const inner = this.element.clientHeight - this.#head.offsetHeight;
    const y = this.selected * ROW_PX;
    const top = this.#virtualTop();
    if (y < top) this.#scrollTo(y);
    else if (y + ROW_PX > top + inner) this.#scrollTo(y + ROW_PX - inner);
    this.#draw();
  }

  openSelected() {
    const row = this.selected < 0 ? null : this.#pages.row(this.selected);
    if (row) this.#options.onOpen(row, this.selected);
  }

  close() {
    this.#size.disconnect();
    this.#pages.close();
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#timer);
  }

  #headCell({ key, label, sort, descends, class: name, title }, sorted) {
    const now = !sort || !sorted ? null : sorted === sort ? "ascending" : sorted === `-${sort}` ? "descending" : null;
    const mark = now && el("span", { class: "sort-mark", "aria-hidden": "true" }, now === "ascending" ? "▲" : "▼");
    const inside = sort ? el("button", { type: "button", on: { click: () => this.#options.onSort(sort, descends) } }, label, mark) : label;
    return el("div", { class: `cell ${name ?? ""}`, role: "columnheader", "aria-sort": now, title, "data-key": key }, inside);
  }

  #answered() {
    const { total, error } = this.#pages;
    this.element.setAttribute("aria-rowcount", String((total ?? 0) + 1));
    this.#box.style.setProperty("height", `${Math.min((total ?? 0) * ROW_PX, MAX_PX)}px`);
    const keep = this.#options.keep;
    if (keep && total !== null) {
      this.#options.keep = null;
      this.element.scrollTop = keep.top;
    }
    const searching = this.#pages.answer?.searching;
    this.#note.textContent = error ? "" : total === 0 && !searching ? this.#options.empty() : "";
    for (const slot of this.#slots) slot.shows = null;
    this.#options.onState?.(this.#pages);
    if (!error) this.#soon(); // what was refused is asked for again when the reader moves, or when the file has grown
  }

  #soon() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    if (this.#box.matches(":active")) {
      released(this.#box).then(() => this.#soon());
      return;
    }
    const total = this.total ?? 0;
    const top = this.#virtualTop();
    const first = Math.max(0, Math.floor(top / ROW_PX) - SPARE_ROWS);
    const last = Math.min(total - 1, Math.ceil((top + this.element.clientHeight) / ROW_PX) + SPARE_ROWS);
    this.#makeSlots(Math.max(0, last - first + 1));
    const shift = this.element.scrollTop - top;
    for (let index = first; index <= last; index++) this.#show(this.#slots[index % this.#slots.length], index, shift);
    this.#hideOthers(first, last);
    if (this.selected >= 0) this.element.setAttribute("aria-activedescendant", `row-${this.selected}`);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#pages.want(first, last), SETTLED_MS);
  }

  #makeSlots(wanted) {
    if (this.#slots.length >= wanted) return;
    for (const slot of this.#slots) slot.shows = null;
    while (this.#slots.length < wanted + SPARE_ROWS) {
      const element = el("div", { class: "table-row", role: "row" });
      this.#box.append(element);
      this.#slots.push({ element, shows: null, index: -1 });
    }
  }

  #show(slot, index, shift) {
    const row = this.#pages.row(index) ?? NOT_HERE;
    const { element } = slot;
    element.style.setProperty("transform", `translateY(${index * ROW_PX + shift}px)`);
    if ((index === this.selected) !== element.classList.contains("selected")) {
      element.classList.toggle("selected", index === this.selected);
      element.setAttribute("aria-selected", String(index === this.selected));
    }
    if (slot.index === index && slot.shows === row) return;
    if (slot.index !== index) {
      element.hidden = false;
      element.id = `row-${index}`;
      element.setAttribute("aria-rowindex", String(index + 2));
    }
    if (row !== NOT_HERE || slot.shows !== row) element.replaceChildren(...this.#cells(row, index));
    Object.assign(slot, { index, shows: row });
  }

  #cells(row, index) {
    if (row === NOT_HERE) return [el("span", { class: "waiting" })];
    return this.#columns.map((column, place) => {
      const inside = [column.cell(row)].flat();
      const content =
        place === 0 ? el("a", { class: "row-link", href: this.#options.hrefOf(row, index), tabindex: -1 }, ...inside) : inside;
      return el("div", { class: `cell ${column.class ?? ""}`, role: "gridcell", title: column.titleOf?.(row) }, content);
    });
  }

  #hideOthers(first, last) {
    for (const slot of this.#slots) {
      if (slot.index >= first && slot.index <= last) continue;
      slot.element.hidden = true;
      slot.index = -1;
    }
  }

  #clicked(event) {
    const id = event.target.closest(".table-row")?.id;
    if (id) this.selected = Number(id.slice(4));
  }

  #virtualTop() {
    const real = (this.total ?? 0) * ROW_PX;
    if (real <= MAX_PX) return this.element.scrollTop;
    const seen = this.element.clientHeight - this.#head.offsetHeight;
    return (this.element.scrollTop / (MAX_PX - seen)) * (real - seen);
  }

  #scrollTo(y) {
    const real = (this.total ?? 0) * ROW_PX;
    const seen = this.element.clientHeight - this.#head.offsetHeight;
    this.element.scrollTop = real <= MAX_PX ? y : (y / (real - seen)) * (MAX_PX - seen);
  }
}

/** Below this the table is scrolled sideways; every row must have the same, or columns do not align. */
function leastWidth(columns) {
  const widths = columns.map(({ width }) => Number(/\d+/.exec(width)[0]));
  return widths.reduce((sum, width) => sum + width + GAP_PX, 2 * GAP_PX);
}
