// Shows a model's text as text, with every character that hides or reorders others made visible; long texts are folded.
import { button, el } from "./dom.js";
import { formatCount } from "./format.js";

// Hidden is what no font draws, and what turns text around: controls but newline and tab, formats, separators, fillers. Seen are the
// joiners and selectors that change how their neighbours look: of emoji, and of scripts that are written with them.
const EMOJI = String.raw`\p{Extended_Pictographic}`;
const JOINED =
  "[" + "Arab Syrc Deva Beng Gujr Guru Knda Mlym Orya Sinh Taml Telu Khmr Mymr".replace(/(\w+) ?/g, String.raw`\p{Script=$1}`) + "]";
const SEEN = [
  String.raw`(?<=${EMOJI})[\ufe0e\ufe0f]`,
  String.raw`(?<=[#*0-9])\ufe0f(?=\u20e3)`,
  String.raw`(?<=[${EMOJI}\p{Emoji_Modifier}\ufe0f])\u200d(?=${EMOJI})`,
  String.raw`(?<=${JOINED})[\u200c\u200d](?=${JOINED})`,
];
const HIDDEN = new RegExp(
  String.raw`(?!\n|\t|${SEEN.join("|")})[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]`,
  "gu",
);
const CONTROLS =
  "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");
const FOLD_CHARACTERS = 6000;
const FOLD_LINES = 80;
const BLOCK = 20_000; // one layout block: the browser skips those that are off the screen

/** The text as DOM nodes; nothing in it can run, hide or turn around. */
export function safeText(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > at) nodes.push(text.slice(at, found.index));
    nodes.push(el("span", { class: "hidden-character", title: "a character that is not seen otherwise" }, nameOf(found[0])));
    at = found.index + found[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

/** The same as a plain string, for cells and titles. */
export function safeLine(text) {
  return text.replace(HIDDEN, nameOf);
}

/** A block of text; what is long is folded behind a button. */
export function longText(text, className = "") {
  return foldedText(text, className, blocks);
}

/** A text as draw(text) -> nodes makes it: at first its beginning, if it is long. */
export function foldedText(text, className, draw) {
  const element = el("div", { class: `text ${className}` });
  const head = headOf(text);
  element.append(...draw(head));
  if (head.length === text.length) return element;
  const all = button(`Show all ${formatCount(text.length)} characters`, () => element.replaceChildren(...draw(text)), {
    class: "button more",
  });
  element.append(all);
  return element;
}

/** Any JSON value, pretty-printed and folded the same way. */
export function jsonText(value) {
  return longText(prettyJson(value), "code");
}

/** What draw() makes of a value; where the value is too odd for it, the value as JSON. */
export function drawnOrRaw(draw, value) {
  try {
    return draw();
  } catch {
    return jsonText(value);
  }
}

/** JSON with an indent of two; arrays of plain values stay on one line. */
export function prettyJson(value, indent = "") {
  if (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object")) return JSON.stringify(value);
  if (value === null || typeof value !== "object") return JSON.stringify(value) ?? "null";
  const inner = `${indent}  `;
  const parts = Array.isArray(value)
    ? value.map((item) => inner + prettyJson(item, inner))
    : Object.entries(value).map(([key, item]) => `${inner}${JSON.stringify(key)}: ${prettyJson(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return parts.length ? `${open}\n${parts.join(",\n")}\n${indent}${close}` : open + close;
}

function headOf(text) {
  let end = Math.min(text.length, FOLD_CHARACTERS);
  let lines = 0;
  for (let at = text.indexOf("\n"); at >= 0 && at < end; at = text.indexOf("\n", at + 1)) {
    if (++lines === FOLD_LINES) end = at;
  }
  return text.length - end < 200 ? text : text.slice(0, end);
}

function blocks(text) {
  const made = [];
  for (let at = 0; at < text.length;) {
    const end = blockEnd(text, at);
    made.push(el("div", { class: "text-block" }, safeText(text.slice(at, end))));
    at = end;
  }
  return made;
}

/** Blocks end at a newline where there is one (the newline goes: the block's end represents it). */
function blockEnd(text, start) {
  if (text.length - start <= BLOCK) return text.length;
  const newline = text.lastIndexOf("\n", start + BLOCK);
  if (newline > start) return newline + 1;
  const high = text.charCodeAt(start + BLOCK - 1);
  return start + BLOCK - (high >= 0xd800 && high < 0xdc00 ? 1 : 0);
}

function nameOf(character) {
  const code = character.codePointAt(0);
  return `⟨${CONTROLS[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`}⟩`;
}
