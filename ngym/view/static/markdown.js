// Markdown of a model's text as DOM nodes. Every text goes through safeText: no HTML of the text is used, no address can be followed,
// and nothing is fetched. What is not Markdown stays as it is written, newlines included.
import { el } from "./dom.js";
import { foldedText, longText, safeText } from "./safetext.js";
import { mathElement } from "./math.js";
import { remember, remembered } from "./theme.js";

const MOST_MARKED = 100_000; // characters; a longer text is shown as it is written
const MOST_DEPTH = 8; // of lists, quotations and emphasis in each other
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>[ ]?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+)(?=\S)/;
const TABLE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = /^\s*(?:(\$\$)|(\\\[)|\\begin\{((?:align|gather|equation|multline)\*?)\})/;
// Lengths are bounded: an opening mark without its end may not cost a look at all that follows, for each mark.
const INLINE = new RegExp(
  [
    String.raw`(?<!${"`"})(?<tick>${"`"}{1,8})(?!${"`"})(?<code>[^]{1,2000}?)(?<!${"`"})\k<tick>(?!${"`"})`,
    String.raw`\$\$(?<shown>[^$]{1,2000}?)\$\$|\\\[(?<bracketed>[^]{1,2000}?)\\\]`,
    String.raw`\\\((?<inline>[^]{1,2000}?)\\\)|(?<![\\$\w])\$(?![\s$])(?<dollars>[^$\n]{1,500}?)(?<![\s\\])\$(?![\w$])`,
    String.raw`(?<escaped>\\[!-\/:-@[-${"`"}{-~])`,
    String.raw`\*\*(?=\S)(?<strong>[^]{1,1000}?\S?)(?<!\s)\*\*(?!\*)|(?<!\w)__(?=\S)(?<strong2>[^]{1,1000}?)(?<!\s)__(?!\w)`,
    String.raw`(?<![\w*])\*(?![\s*])(?<em>[^*\n]{1,1000}?)(?<!\s)\*(?!\w)|(?<!\w)_(?![\s_])(?<em2>[^_\n]{1,1000}?)(?<!\s)_(?!\w)`,
    String.raw`~~(?=\S)(?<gone>[^]{1,1000}?)(?<!\s)~~`,
    String.raw`(?<picture>!?)\[(?<label>[^\]\n]{0,500})\]\((?<address>[^()\s]{1,1000})(?:[ ]"[^"\n]{0,200}")?\)`,
  ].join("|"),
  "gu",
);

/** Whether the reader wants texts as they are written. */
export function isRaw() {
  return remembered("raw", false);
}

/** Two buttons: texts with their Markdown and formulas, or as they are written; onChange() after a choice. */
export function rawSwitch(onChange) {
  const choose = (raw) => {
    remember("raw", raw);
    onChange();
  };
  const one = (text, raw, title) =>
    el("button", { type: "button", class: "chip", title, "aria-pressed": String(isRaw() === raw), on: { click: () => choose(raw) } }, text);
  return el(
    "div",
    { class: "choice", role: "group", "aria-label": "Texts" },
    one("Rendered", false, "Markdown, code and formulas (m)"),
    one("Raw", true, "Every character as it was written (m)"),
  );
}

/** A block of text as the reader wants it; what is long is folded. */
export function shownText(text, className = "") {
  if (isRaw() || text.length > MOST_MARKED) return longText(text, className);
  return foldedText(text, `markdown ${className}`, markdown);
}

export function markdown(text) {
  return blocksOf(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocksOf(lines, depth) {
  const made = [];
  for (let at = 0; at < lines.length;) {
    const [nodes, next] = blockAt(lines, at, depth);
    made.push(...[nodes].flat());
    at = next;
  }
  return made;
}

/** [nodes, the line after them] */
function blockAt(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [[], at + 1];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const math = MATH.exec(line);
  const shown = math && displayed(lines, at, math);
  if (shown) return shown;
  const heading = HEADING.exec(line);
  if (heading) return [el("p", { class: `heading is-h${heading[1].length}` }, inline(heading[2], depth)), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (depth < MOST_DEPTH && QUOTE.test(line)) return quoted(lines, at, depth);
  if (depth < MOST_DEPTH && ITEM.test(line)) return itemised(lines, at, depth);
  if (line.includes("|") && lines[at + 1]?.includes("-") && TABLE.test(lines[at + 1])) return tabled(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !beginsBlock(lines[end])) end++;
  return [el("p", null, inline(lines.slice(at, end).join("\n"), depth)), end];
}

function beginsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM, MATH].some((pattern) => pattern.test(line));
}

function fenced(lines, at, [, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ""))) end++;
  const name = language.trim() && el("div", { class: "code-language" }, safeText(language.trim()));
  const code = el("pre", { tabindex: 0 }, el("code", null, safeText(lines.slice(at + 1, end).join("\n"))));
  return [el("div", { class: "code-block" }, name || null, code), end + 1];
}

/** A formula in lines of its own; null if it does not end. */
function displayed(lines, at, [mark, dollars, , environment]) {
  const close = dollars ?? (environment ? `\\end{${environment}}` : "\\]");
  const text = lines.slice(at, at + 100).join("\n");
  const start = environment ? 0 : mark.length;
  const end = text.indexOf(close, mark.length);
  if (end < 0) return null;
  const rest = text.slice(end + close.length).split("\n", 1)[0].trim();
  if (rest && !/^[.,;:]$/.test(rest)) return null;
  const used = text.slice(0, end).split("\n").length;
  return [el("p", null, mathElement(text.slice(start, environment ? end + close.length : end), true), rest), at + used];
}

function quoted(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [el("blockquote", null, blocksOf(inner, depth + 1)), end];
}

function itemised(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const isNext = (line) => {
    const found = ITEM.exec(line);
    return found !== null && found[1].length <= indent.length + 1 && found[1].length >= indent.length && /\d/.test(found[2]) === isOrdered;
  };
  const items = [];
  while (at < lines.length && isNext(lines[at]) && !RULE.test(lines[at])) {
    const width = ITEM.exec(lines[at])[0].length;
    const own = [lines[at].slice(width)];
    for (at++; at < lines.length && !isNext(lines[at]); at++) {
      const inside = /^ */.exec(lines[at])[0].length > indent.length + 1;
      if (lines[at].trim() && !inside && (!own.at(-1).trim() || beginsBlock(lines[at]))) break;
      own.push(lines[at].slice(Math.min(width, /^ */.exec(lines[at])[0].length)));
    }
    items.push(el("li", null, blocksOf(own, depth + 1)));
  }
  return [el(isOrdered ? "ol" : "ul", { start: isOrdered ? parseInt(mark, 10) : null }, items), at];
}

function tabled(lines, at, depth) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split(/(?<!\\)\|/)
      .map((cell) => cell.trim().replace(/\\\|/g, "|"));
  const ways = cells(lines[at + 1]).map((cell) => (/^:-+:$/.test(cell) ? "is-centred" : /-:$/.test(cell) ? "num" : null));
  const row = (tag, line) => el("tr", null, cells(line).map((cell, i) => el(tag, { class: ways[i] }, inline(cell, depth))));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const body = lines.slice(at + 2, end).map((line) => row("td", line));
  return [el("div", { class: "table-scroll", tabindex: 0 }, el("table", null, el("thead", null, row("th", lines[at])), el("tbody", null, body))), end];
}

function inline(text, depth) {
  const nodes = [];
  let at = 0;
  for (const found of depth > MOST_DEPTH ? [] : text.matchAll(INLINE)) {
    nodes.push(...safeText(text.slice(at, found.index)), ...[inlineNode(found, depth + 1)].flat());
    at = found.index + found[0].length;
  }
  return [...nodes, ...safeText(text.slice(at))];
}

function inlineNode({ 0: whole, groups }, depth) {
  const { code, shown, bracketed, inline: round, dollars, escaped, strong, strong2, em, em2, gone, picture, label, address } = groups;
  if (code !== undefined) return el("code", null, safeText(code.replace(/^ (.*\S.*) $/s, "$1")));
  if (shown ?? bracketed) return mathElement(shown ?? bracketed, true);
  if (round ?? dollars) return mathElement(round ?? dollars, false);
  if (escaped) return safeText(escaped.slice(1));
  if (strong ?? strong2) return el("strong", null, inline(strong ?? strong2, depth));
  if (em ?? em2) return el("em", null, inline(em ?? em2, depth));
  if (gone !== undefined) return el("s", null, inline(gone, depth));
  if (address === undefined) return safeText(whole);
  const where = el("span", { class: "address" }, " ⟨", picture ? "image elsewhere, not fetched: " : "", safeText(address), "⟩");
  return [el("span", { class: "linked" }, inline(label, depth)), where];
}
