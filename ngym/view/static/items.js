// A row's input and output as turns; tool calls are shown with their results.

const OWN_FIELDS = new Set(["responses_create_params", "response", "reward", "reward_components", "reward_range", "agent_ref", "ng", "failure", "attempt"]);
const ROLES = new Set(["system", "developer", "user", "assistant", "tool"]);
const THINKING = /^(?:\s*<think>)?((?:(?!<think>)[^])*?)<\/think>/;

/**
 * A list of turns, each with `given` (it stood in the task's input):
 * {kind: "message", role, parts: [{kind: "text"|"image"|"other", ...}]}, {kind: "reasoning", text},
 * {kind: "call", name, args, id, result: parts, answered}, {kind: "result", id, parts} (without its call), {kind: "other", name, value}
 */
export function turnsOf(row) {
  const params = row.responses_create_params ?? {};
  const input = typeof params.input === "string" ? [{ role: "user", content: params.input }] : listOf(params.input);
  const instructions = params.instructions ? [{ role: "system", content: params.instructions }] : [];
  const given = [...instructions, ...input].map((item) => ({ item, given: true }));
  const said = listOf(row.response?.output).map((item) => ({ item, given: false }));
  return paired([...given, ...said].flatMap(({ item, given }) => turnsOrItem(item).map((turn) => ({ ...turn, given }))));
}

/** The assistant's last text; "" where it said none. */
export function finalText(row) {
  const said = turnsOf(row).filter((turn) => !turn.given && turn.kind === "message");
  return said.length ? textOf(said.at(-1)) : "";
}

export function textOf(turn) {
  if (turn.kind === "message")
    return turn.parts
      .filter((part) => part.kind === "text")
      .map((part) => part.text)
      .join("\n");
  if (turn.kind === "reasoning") return turn.text;
  if (turn.kind === "call") return `${turn.name}(${turn.args})`;
  return JSON.stringify(turn.value);
}

/** The failure of a failed attempt; undefined for a rollout, whose task may have a field of that name. */
export function failureOf(row) {
  return row.response ? undefined : row.failure;
}

/** Why an attempt failed; of an odd failure all that it says. */
export function failureMessage(failure) {
  return asText(failure.message ?? failure);
}

/** The task's and the verifier's own fields: everything in the row that is not ngym's. [[name, value]] */
export function extraFields(row) {
  return Object.entries(row).filter(([name]) => !OWN_FIELDS.has(name) && !name.startsWith("_ng_"));
}

/** Text with its JSON value, or undefined when it is none worth printing as JSON. */
export function parsedJson(text) {
  if (typeof text !== "string" || !/^\s*[{[]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** An unknown item hides no other: it is one turn, unchanged. */
function turnsOrItem(item) {
  try {
    return turnsOfItem(item);
  } catch {
    return [{ kind: "other", name: "unreadable", value: item }];
  }
}

function turnsOfItem(item) {
  if (item === null || typeof item !== "object") return [{ kind: "other", name: typeof item, value: item }];
  const type = String(item.type ?? (item.role ? "message" : "unknown"));
  if (type === "function_call")
    return [
      { kind: "call", name: String(item.name ?? "?"), args: asText(item.arguments), id: item.call_id, result: null, answered: false },
    ];
  if (type === "function_call_output") return [{ kind: "result", id: item.call_id, parts: partsOf(item.output) }];
  if (type === "reasoning") return [{ kind: "reasoning", text: reasoningText(item) }];
  if (type === "message" && ROLES.has(item.role ?? "assistant")) return messageTurns(item);
  return [{ kind: "other", name: type === "message" ? `message of ${item.role}` : type, value: item }];
}

function messageTurns(item) {
  const role = item.role ?? "assistant";
  const parts = partsOf(item.content);
  const thought = role === "assistant" && parts[0]?.kind === "text" ? THINKING.exec(parts[0].text) : null;
  if (!thought) return [{ kind: "message", role, parts }];
  const rest = { kind: "text", text: parts[0].text.slice(thought[0].length).trimStart() };
  return [
    { kind: "reasoning", text: thought[1].trim() },
    { kind: "message", role, parts: [rest, ...parts.slice(1)] },
  ];
}

function paired(turns) {
  const calls = new Map();
  const kept = [];
  for (const turn of turns) {
    if (turn.kind === "call") calls.set(turn.id, turn);
    const call = turn.kind === "result" ? calls.get(turn.id) : undefined;
    if (call && !call.answered) Object.assign(call, { result: turn.parts, answered: true });
    else kept.push(turn);
  }
  return kept;
}

function partsOf(content) {
  if (content === null || content === undefined) return [];
  if (typeof content === "string") return [{ kind: "text", text: content }];
  if (!Array.isArray(content)) return [{ kind: "other", name: "content", value: content }];
  return content.map((part) => {
    if (typeof part === "string") return { kind: "text", text: part };
    if (typeof part?.text === "string") return { kind: "text", text: part.text };
    if (typeof part?.refusal === "string") return { kind: "text", text: part.refusal, refusal: true };
    if (part?.type === "input_image" || part?.type === "image_url") return { kind: "image", url: imageUrl(part) };
    return { kind: "other", name: part?.type ?? "part", value: part };
  });
}

function imageUrl(part) {
  const url = typeof part.image_url === "string" ? part.image_url : part.image_url?.url;
  return typeof url === "string" ? url : String(part.file_id ?? "");
}

function reasoningText(item) {
  const parts = [...listOf(item.summary), ...listOf(item.content)].map((part) => asText(part?.text ?? part)).filter(Boolean);
  return parts.join("\n\n") || (item.encrypted_content ? "(encrypted by the provider)" : "");
}

/** Any value as a text; what is missing is an empty one. */
export function asText(value) {
  return typeof value === "string" ? value : value === undefined || value === null ? "" : JSON.stringify(value);
}

function listOf(value) {
  return Array.isArray(value) ? value : value === null || value === undefined ? [] : [value];
}
