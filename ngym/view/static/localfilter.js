// The filter of an exported report: the server's language, but a text is searched in a row's line, not in its rollout.

const NUMBER_NAMES = new Set(
  "reward task rollout turns tool_calls tool_errors tokens output_tokens input_tokens seconds attempt policy_version learned".split(" "),
);
const GROUP_NAMES = new Set(["group_mean", "group_size", "advantage"]);
const WORD_NAMES = new Set(["agent", "status", "stop", "stop_reason", "failure", "task_id", "rollout_id", "row", "prompt", "answer"]);
const STATUSES = ["ok", "truncated", "unscored", "failed"];
const COMPONENT = "component."; // before the name of a part of the reward
const SAME = { stop: "stop_reason", tokens: "output_tokens" };
const NAMED = /^(?:"([^"\\]+)"|([^\s":<>=!]+?))(<=|>=|!=|[:<>=])(.*)$/s;
const ONE_VALUE = /"((?:[^"\\]|\\.)*)"|([^",]*)/sy;
const ONE_NUMBER = /^[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?$/i;
const COMPARISONS = { "<": (x, y) => x < y, "<=": (x, y) => x <= y, ">": (x, y) => x > y, ">=": (x, y) => x >= y };

/** (row) -> boolean. fields: the names of the run's own scalar fields. Throws where a term says nothing. */
export function localFilter(q, fields = []) {
  const terms = termsOf(q ?? "").map((term) => termTest(term, fields));
  return (row) => terms.every((term) => term(row));
}

/** Whether some term is a text: it is looked for in the rows' lines alone. */
export function looksForText(q) {
  return termsOf(q ?? "").some((term) => !isNamed(term.replace(/^-/, "")));
}

/** A copy, sorted by "-reward,tokens"; rows that lack the value come last. */
export function localSort(rows, sort) {
  const keys = (sort || "")
    .split(",")
    .filter(Boolean)
    .map((key) => [key.replace(/^-/, ""), key.startsWith("-") ? -1 : 1]);
  return [...rows].sort((a, b) => {
    for (const [key, sign] of keys) {
      const order = ordered(valueOf(a, key), valueOf(b, key), sign);
      if (order) return order;
    }
    return 0;
  });
}

export function onePage(rows, { offset = 0, limit = 200 }) {
  return { total: rows.length, indexed: rows.length, rows: rows.slice(offset, offset + limit) };
}

/** The parts between spaces outside of quotes. */
function termsOf(q) {
  if (!/^(?:[^"]|"(?:[^"\\]|\\.)*")*$/s.test(q)) throw new Error("A quote in the filter does not end; close it, or leave it out.");
  return q.match(/(?:[^\s"]|"(?:[^"\\]|\\.)*")+/gs) ?? [];
}

function termTest(term, fields) {
  const bare = term.replace(/^-/, "");
  const found = isNamed(bare) ? NAMED.exec(bare) : null;
  const test = found ? namedTest(term, found[1] ?? found[2], found[3], found[4], fields) : textTest(bare, term);
  return bare === term ? test : (row) => !test(row);
}

function isNamed(bare) {
  return NAMED.test(bare);
}

function textTest(bare, term) {
  const wanted = (/^".*"$/s.test(bare) ? plainText(bare.slice(1, -1)) : bare).toLowerCase();
  if (!wanted) throw new Error(`Nothing to look for in '${term}'; write a word or "a text in quotes" after it.`);
  return (row) => leavesOf(row).some((value) => String(value).toLowerCase().includes(wanted));
}

function leavesOf(value) {
  if (value === null) return [];
  return typeof value === "object" ? Object.values(value).flatMap(leavesOf) : [value];
}

function namedTest(term, name, sign, value, fields) {
  const read = readerOf(name, fields);
  if (!read) throw new Error(`No field '${name}' in '${term}'; to look for the text itself, put it in quotes.`);
  if (!value) throw new Error(`No value in '${term}'; say ${name}${sign}VALUE, or ${name}:null for what is not known.`);
  const compare = COMPARISONS[sign];
  if (compare) {
    const bound = numberOf(term, value);
    return (row) => typeof read(row) === "number" && compare(read(row), bound);
  }
  const tests = valuesOf(term, value).map(({ text, quoted }) => equalTest(term, name, text, quoted));
  const holds = (row) => tests.some((test) => test(read(row)));
  return sign === "!=" ? (row) => read(row) !== null && !holds(row) : holds;
}

/** (row) -> its value of this name, or null; null for a name that is not known. */
function readerOf(name, fields) {
  if (isNumberName(name) || WORD_NAMES.has(name)) {
    if (name.startsWith(COMPONENT)) return (row) => ownOf(row.components, name.slice(COMPONENT.length));
    return (row) => row[SAME[name] ?? name] ?? null;
  }
  return fields.includes(name) ? (row) => ownOf(row.fields, name) : null;
}

function ownOf(values, name) {
  return values && Object.hasOwn(values, name) ? values[name] : null;
}

function isNumberName(name) {
  return NUMBER_NAMES.has(name) || GROUP_NAMES.has(name) || name.startsWith(COMPONENT);
}

/** The alternatives of `a,"b c",d*`. */
function valuesOf(term, value) {
  const found = [];
  for (let place = 0; place <= value.length; place = ONE_VALUE.lastIndex + 1) {
    ONE_VALUE.lastIndex = place;
    const [, quoted, bare] = ONE_VALUE.exec(value);
    const next = value[ONE_VALUE.lastIndex];
    if ((next !== undefined && next !== ",") || (quoted === undefined && !bare))
      throw new Error(`The values in '${term}' are not parted by commas; put a value with quotes or commas in quotes.`);
    found.push(quoted === undefined ? { text: bare, quoted: false } : { text: plainText(quoted), quoted: true });
  }
  return found;
}

/** (value) -> whether it is this one. */
function equalTest(term, name, text, quoted) {
  if (text === "null" && !quoted) return (value) => value === null;
  if (isNumberName(name)) {
    const number = numberOf(term, text);
    return (value) => value === number;
  }
  if (name === "status" && !STATUSES.includes(text)) throw new Error(`No status '${text}' in '${term}'; there are ${STATUSES.join(", ")}.`);
  if (text.includes("*") && !quoted) {
    const parts = text.split("*").map((part) => part.replace(/[^\w\s]/g, "\\$&"));
    const pattern = new RegExp(`^${parts.join(".*")}$`, "is");
    return (value) => value !== null && pattern.test(String(value));
  }
  const wanted = text.toLowerCase();
  const number = !quoted && !WORD_NAMES.has(name) && ONE_NUMBER.test(text) ? Number(text) : null;
  const truth = quoted || !["true", "false"].includes(text) ? null : text === "true";
  return (value) =>
    value !== null && (value === number || value === truth || (typeof value === "string" && value.toLowerCase() === wanted));
}

function numberOf(term, text) {
  if (!ONE_NUMBER.test(text)) throw new Error(`'${text}' in '${term}' is no number.`);
  return Number(text);
}

function plainText(quoted) {
  return quoted.replace(/\\(.)/gs, "$1");
}

/** What a list is sorted by: a column, a part of the reward, or a field of the run. */
function valueOf(row, name) {
  if (name.startsWith(COMPONENT)) return ownOf(row.components, name.slice(COMPONENT.length));
  return row[SAME[name] ?? name] ?? ownOf(row.fields, name);
}

function ordered(x, y, sign) {
  if (x === y) return 0;
  if (x === null) return 1;
  if (y === null) return -1;
  return (x < y ? -1 : 1) * sign;
}
