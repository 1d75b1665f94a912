// Creates elements: `el(tag, attributes, ...children)`; a string always becomes a text node.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const RELEASED_MS = 50;

/** An HTML element. attributes: `class`, `on: {event: f}`, `vars: {"--name": value}`, any attribute; null and false are left out. */
export function el(tag, attributes, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svgEl(tag, attributes, ...children) {
  return furnish(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

export function clear(node) {
  node.replaceChildren();
  return node;
}

/** A link that looks like one; href is one of the page's own. */
export function link(href, text, attributes) {
  return el("a", { href, ...attributes }, text);
}

export function button(text, onClick, attributes) {
  return el("button", { type: "button", class: "button", on: { click: onClick }, ...attributes }, text);
}

/** When no pointer is down on it: what is replaced under one cannot be clicked. */
export async function released(node) {
  while (node.matches(":active")) await new Promise((done) => setTimeout(done, RELEASED_MS));
}

/** A table of finished rows. columns: {heading: class or null}. */
export function columnTable(name, columns, rows) {
  const heads = Object.entries(columns).map(([heading, kind]) => el("th", { scope: "col", class: kind }, heading));
  return el("table", { class: name }, el("thead", null, el("tr", null, heads)), el("tbody", null, rows));
}

/** A folded part: its summary is always seen, `make()` is called when it is first opened. */
export function folded(summary, make, attributes) {
  const details = el("details", attributes, el("summary", null, summary));
  const unfold = () => details.children.length === 1 && details.append(make());
  details.addEventListener("toggle", () => details.open && unfold());
  if (details.open) unfold();
  return details;
}

/** Put text on the clipboard and say so on the button for a moment. */
export function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "The browser refused";
    }
    setTimeout(() => (made.textContent = label), 1500);
  });
  made.classList.add("quiet");
  return made;
}

export function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
