// Where are we? The address's hash: "#/r/r1/row/12?q=reward%3C1" is the path ["r","r1","row","12"] and its params.

export function parseHash(hash) {
  const [path, query] = split(hash.replace(/^#\/?/, ""), "?");
  return { path: path.split("/").filter(Boolean).map(decoded), params: new URLSearchParams(query) };
}

/** hrefOf(["r", "r1"], {q: "reward<1"}); params that are null or "" are left out. */
export function hrefOf(path, params) {
  const entries = params instanceof URLSearchParams ? [...params] : Object.entries(params ?? {});
  const said = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(said.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${query && `?${query}`}`;
}

/** A new page in the history. */
export function go(href) {
  location.hash = href;
}

/** The same page, other words: no new entry in the history. */
export function goInPlace(href) {
  history.replaceState(null, "", href);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

function split(text, mark) {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
