// A rollout as a conversation: roles at the left, tool calls with their results, reasoning folded.
import { el, folded, svgEl } from "./dom.js";
import { plural } from "./format.js";
import { parsedJson, turnsOf } from "./items.js";
import { shownText } from "./markdown.js";
import { drawnOrRaw, jsonText, longText, safeLine, safeText } from "./safetext.js";

const FOLDED_SYSTEM = 400; // characters; a longer system text is folded

/** The whole row as a conversation. */
export function conversation(row) {
  const turns = turnsOf(row);
  const given = turns.filter((turn) => turn.given);
  const said = turns.filter((turn) => !turn.given);
  return el(
    "div",
    { class: "conversation" },
    declaredTools(row.responses_create_params?.tools),
    given.map((turn) => turnElement(turn, shownText)),
    el(
      "div",
      { class: "divider" },
      said.length ? "the rollout" : row.response ? "the policy said nothing" : "no answer was kept: the attempt failed",
    ),
    said.map((turn) => turnElement(turn, shownText)),
  );
}

/** One turn. drawText, where given, draws a message's text (a diff does). */
export function turnElement(turn, drawText = longText) {
  return drawnOrRaw(() => drawnTurn(turn, drawText), turn);
}

function drawnTurn(turn, drawText) {
  if (turn.kind === "message") return line(turn.role === "developer" ? "system" : turn.role, messageBody(turn, drawText), turn.given);
  if (turn.kind === "reasoning") return line("reasoning", reasoningBody(turn, drawText), turn.given);
  if (turn.kind === "call") return line("call", callBody(turn), turn.given);
  if (turn.kind === "result")
    return line(
      "result",
      el("div", null, el("span", { class: "badge is-truncated" }, "a result without its call"), resultBody(turn.parts)),
      turn.given,
    );
  return line(
    "other",
    folded(`item of the type “${safeLine(turn.name)}”`, () => jsonText(turn.value)),
    turn.given,
  );
}

const LABELS = { call: "tool call", result: "tool result", other: "other item" };

function line(kind, body, given) {
  return el(
    "article",
    { class: `turn is-${kind}${given ? " is-given" : ""}` },
    el("div", { class: "who" }, LABELS[kind] ?? kind),
    el("div", { class: "said" }, body),
  );
}

function messageBody({ role, parts }, drawText) {
  const drawn = () => parts.map((part) => partBody(part, drawText));
  if (parts.length === 0 || (parts.length === 1 && parts[0].text === "")) return el("span", { class: "muted" }, "(empty)");
  const [first] = parts;
  const isLongSystem = (role === "system" || role === "developer") && first.kind === "text" && first.text.length > FOLDED_SYSTEM;
  if (!isLongSystem) return drawn();
  return folded(
    [safeLine(first.text.slice(0, 120).split("\n")[0]), " … ", el("span", { class: "muted" }, plural(first.text.length, "character"))],
    () => el("div", null, drawn()),
  );
}

function partBody(part, drawText) {
  if (part.kind === "text")
    return part.refusal ? el("div", null, el("span", { class: "badge is-unscored" }, "refusal"), drawText(part.text)) : drawText(part.text);
  if (part.kind === "image") return imageBody(part.url);
  return folded(`part of the type “${safeLine(String(part.name))}”`, () => jsonText(part.value));
}

/** An image that is in the row is shown; one that is elsewhere is named, never fetched, and so is one that cannot be shown. */
function imageBody(url) {
  if (!/^data:/i.test(url)) return imageName("image elsewhere, not fetched", url);
  if (!/^data:image\/(png|jpe?g|gif|webp);base64,/i.test(url)) return imageName("image in the row, not displayed", url);
  const failed = () => shown.replaceWith(imageName("image in the row that the browser cannot read", url));
  const shown = el("img", { class: "said-image", src: url, alt: "image in the row", on: { error: failed } });
  return shown;
}

function imageName(reason, url) {
  const text = url.slice(0, 300) || "(no address)";
  return el("div", { class: "image-name" }, imageIcon(), safeText(`${reason}: ${text}`));
}

function reasoningBody({ text }, drawText) {
  if (!text) return el("span", { class: "muted" }, "(no text was given)");
  const first = safeLine(text.trim().split("\n")[0].slice(0, 140));
  return folded([el("span", { class: "muted" }, first), text.length > first.length && " …"], () => drawText(text, "quiet-text"));
}

function callBody({ name, args, result, answered }) {
  return el(
    "div",
    { class: "call" },
    el("div", { class: "call-name" }, el("span", { class: "arrow", "aria-hidden": "true" }, "→ "), el("code", null, safeText(name))),
    argumentsBody(args),
    answered ? resultBody(result) : el("div", { class: "result is-missing muted" }, "no result: the rollout ended here"),
  );
}

function argumentsBody(args) {
  const value = parsedJson(args);
  if (value === undefined)
    return args.trim() ? el("div", null, el("span", { class: "badge is-failed" }, "not JSON"), longText(args, "code")) : null;
  if (Array.isArray(value)) return jsonText(value);
  const entries = Object.entries(value);
  if (!entries.length) return el("span", { class: "muted" }, "no arguments");
  return el(
    "dl",
    { class: "arguments" },
    entries.map(([key, item]) => [
      el("dt", null, safeText(key)),
      el("dd", null, typeof item === "string" ? longText(item, "code") : jsonText(item)),
    ]),
  );
}

function resultBody(parts) {
  const said = parts.length === 1 && parts[0].kind === "text" ? parts[0].text : null;
  const failed = said !== null && /^Error\b/.test(said);
  const value = parsedJson(said);
  const body = value === undefined ? parts.map((part) => partBody(part, (text) => longText(text, "code"))) : jsonText(value);
  return el(
    "div",
    { class: `result${failed ? " is-error" : ""}` },
    el("span", { class: "arrow", "aria-hidden": "true" }, "← "),
    el("div", { class: "result-body" }, parts.length ? body : el("span", { class: "muted" }, "(empty)")),
  );
}

function declaredTools(tools) {
  if (!Array.isArray(tools) || !tools.length) return null;
  const names = tools.map((tool) => safeLine(String(tool?.name ?? tool?.type ?? "?"))).join(", ");
  return el(
    "article",
    { class: "turn is-tools is-given" },
    el("div", { class: "who" }, "tools"),
    el(
      "div",
      { class: "said" },
      folded([plural(tools.length, "tool"), " ", el("span", { class: "muted" }, names.slice(0, 160))], () => jsonText(tools)),
    ),
  );
}

function imageIcon() {
  return svgEl(
    "svg",
    { class: "icon", viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" },
    svgEl("rect", { x: 1.5, y: 2.5, width: 13, height: 11, rx: 1.5, fill: "none", stroke: "currentColor" }),
    svgEl("path", { d: "M2 12l4-5 3 3 2-2 3 4", fill: "none", stroke: "currentColor" }),
  );
}
