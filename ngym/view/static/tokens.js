// The tokens of a rollout, coloured by logprob, advantage or policy version; context is dimmed.
import { button, clear, el } from "./dom.js";
import { DASH, formatCount, formatNumber, formatSigned, isNumber, plural } from "./format.js";
import { safeLine } from "./safetext.js";

const BLOCK_TOKENS = 400; // one layout block: the browser skips those that are off the screen
const LOGPROB_STEPS = [-0.1, -0.5, -1, -2, -4]; // a token below the last is the reddest
const WAYS = { logprob: "logprob", advantage: "advantage", version: "policy version" };
const LEAST_LIKELY = 8;

/** answer: {segments: [{tokens: [{id, text, logprob, trained, version}], advantage}], note}. way: a key of WAYS; onWay(way). */
export function tokensView({ segments, note }, way, onWay) {
  if (!segments.length) return el("p", { class: "empty" }, note ? safeLine(note) : "This rollout holds no tokens: its model gave no token ids.");
  const readout = el(
    "div",
    { class: "token-readout", "aria-live": "polite" },
    "Point at a token to see its id, logprob and policy version.",
  );
  const versions = [...new Set(segments.flatMap(({ tokens }) => tokens.map(({ version }) => version)))]
    .filter(isNumber)
    .sort((a, b) => a - b);
  const span = Math.max(0, ...segments.map(({ advantage }) => Math.abs(advantage ?? 0)));
  const scale = { way: Object.hasOwn(WAYS, way) ? way : "logprob", versions, span };
  const places = new Map();
  const drawn = segments.map((segment, i) => segmentElement(segment, i, segments.length, scale, places));
  const element = el(
    "div",
    { class: "tokens-view" },
    el(
      "div",
      { class: "tokens-head" },
      el(
        "div",
        { class: "choice", role: "group", "aria-label": "Colour by" },
        el("span", { class: "label" }, "Colour by"),
        Object.entries(WAYS).map(([key, name]) =>
          button(name, () => onWay(key), { class: "chip", "aria-pressed": String(key === scale.way) }),
        ),
      ),
      legendOf(scale, segments),
      readout,
    ),
    note && el("p", { class: "note" }, safeLine(note)),
    surprises(segments),
    drawn,
  );
  const tell = (event) => {
    const told = places.get(event.target);
    if (told) clear(readout).append(...describe(told));
  };
  element.addEventListener("pointerover", tell);
  element.addEventListener("focusin", tell);
  return element;
}

function segmentElement({ tokens, advantage }, i, of, scale, places) {
  const trained = tokens.filter((token) => token.trained);
  const known = trained.map(({ logprob }) => logprob).filter(isNumber);
  const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  const figures = [
    plural(tokens.length, "token"),
    `${formatCount(trained.length)} sampled`,
    `mean logprob ${formatNumber(mean)}`,
    isNumber(advantage) && `advantage ${formatSigned(advantage)}`,
  ];
  const blocks = [];
  for (let at = 0; at < tokens.length; at += BLOCK_TOKENS)
    blocks.push(blockElement(tokens.slice(at, at + BLOCK_TOKENS), at, advantage, scale, places, i));
  return el(
    "section",
    { class: "segment" },
    el(
      "h3",
      null,
      of > 1 ? `Segment ${i + 1} of ${of}` : "One segment",
      el("span", { class: "muted" }, `  ${figures.filter(Boolean).join(" · ")}`),
    ),
    el("div", { class: "token-text" }, blocks),
  );
}

function blockElement(tokens, start, advantage, scale, places, segment) {
  return el(
    "span",
    { class: "token-block" },
    tokens.map((token, i) => {
      const made = el(
        "span",
        {
          class: `token ${token.trained ? colourClass(token, advantage, scale) : "is-context"}${token.text === null ? " is-id" : ""}`,
          id: token.trained ? `token-${segment}-${start + i}` : null,
        },
        shownToken(token),
      );
      places.set(made, { token, place: start + i, advantage });
      return made;
    }),
  );
}

function shownToken({ id, text, bytes }) {
  if (text === "" && bytes) return `⟨${bytes}⟩`; // a part of a character
  if (text === null || text === undefined) return String(id);
  return safeLine(text).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}

function colourClass({ logprob, version }, advantage, { way, versions, span }) {
  if (way === "version") return isNumber(version) ? `v${versions.indexOf(version) % 8}` : "";
  if (way === "advantage") {
    if (!isNumber(advantage) || !span) return "";
    const strength = Math.ceil((Math.abs(advantage) / span) * 4);
    return strength === 0 ? "" : `${advantage < 0 ? "minus" : "plus"}${strength}`;
  }
  if (!isNumber(logprob)) return "";
  const step = LOGPROB_STEPS.findIndex((bound) => logprob >= bound);
  return `p${step < 0 ? LOGPROB_STEPS.length : step}`;
}

function legendOf({ way, versions, span }, segments) {
  const swatch = (name, text) => el("span", { class: `token ${name}` }, text);
  const context = el("span", { class: "token is-context" }, "context");
  if (way === "version")
    return el(
      "div",
      { class: "token-legend" },
      context,
      versions.length ? versions.map((version, i) => swatch(`v${i % 8}`, `version ${version}`)) : "no policy version is known",
    );
  if (way === "advantage") {
    if (!segments.some(({ advantage }) => isNumber(advantage)))
      return el(
        "div",
        { class: "token-legend" },
        context,
        el("span", { class: "muted" }, "no advantage: the rollout has no reward, or is alone in its group"),
      );
    return el(
      "div",
      { class: "token-legend" },
      context,
      swatch("minus4", `−${formatNumber(span)}`),
      swatch("minus2", "pushed down"),
      swatch("", "0"),
      swatch("plus2", "pushed up"),
      swatch("plus4", `+${formatNumber(span)}`),
    );
  }
  const names = LOGPROB_STEPS.map((bound, i) => swatch(`p${i}`, `≥ ${formatNumber(bound)}`));
  return el(
    "div",
    { class: "token-legend" },
    context,
    names,
    swatch(`p${LOGPROB_STEPS.length}`, `< ${formatNumber(LOGPROB_STEPS.at(-1))}`),
  );
}

/** The tokens that the policy was least sure of: often where a rollout turns. */
function surprises(segments) {
  const all = segments.flatMap(({ tokens }, segment) => tokens.map((token, place) => ({ token, segment, place })));
  const least = all
    .filter(({ token }) => token.trained && isNumber(token.logprob))
    .sort((a, b) => a.token.logprob - b.token.logprob)
    .slice(0, LEAST_LIKELY);
  if (least.length < 2) return null;
  const jump = ({ segment, place }) => {
    const target = document.getElementById(`token-${segment}-${place}`);
    target?.scrollIntoView({ block: "center" });
    target?.classList.add("is-found");
    setTimeout(() => target?.classList.remove("is-found"), 1600);
  };
  return el(
    "div",
    { class: "surprises" },
    el("span", { class: "label" }, "Least likely"),
    least.map((one) =>
      button(
        [el("code", null, safeLine(one.token.text ?? String(one.token.id)).trim() || "␣"), ` ${formatNumber(one.token.logprob, 1)}`],
        () => jump(one),
        { class: "chip" },
      ),
    ),
  );
}

function describe({ token, place, advantage }) {
  const entries = [
    ["token", place],
    ["id", token.id],
    ["logprob", token.trained ? formatNumber(token.logprob, 4) : "not sampled"],
    ["probability", isNumber(token.logprob) ? formatNumber(Math.exp(token.logprob), 4) : DASH],
    ["version", token.version ?? DASH],
    ["advantage", formatSigned(advantage)],
  ];
  return [
    el(
      "code",
      { class: "token-told" },
      safeLine(token.text ?? String(token.id))
        .replace(/\n/g, "↵")
        .replace(/ /g, "␣"),
    ),
    ...entries.map(([name, value]) =>
      el("span", null, el("span", { class: "muted" }, `${name} `), el("span", { class: "num" }, String(value))),
    ),
  ];
}
