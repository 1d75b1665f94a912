// The data of a page. `api`: the server's answers as objects; in an exported report, its packed data.
import { packedApi } from "./packed.js";

const TOKEN_KEY = "ngym.token";

/** A refusal, as a problem document says it. */
class ApiError extends Error {
  constructor(status, title, detail) {
    super(detail || title);
    this.status = status;
    this.title = title;
  }
}

/** Whether the server said nothing at all: what was asked for may come yet. */
export function isSilence(error) {
  return error?.status === 0;
}

/** The data packed into this file, or null if a server answers. */
function packed() {
  const element = document.getElementById("ngym-data");
  return element && JSON.parse(element.textContent);
}

/** "#token=..." in the address goes into this tab's storage, and out of the address. */
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  keepToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", "#/");
}

export function keepToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

/** All calls of the server. A signal, where one is taken, ends the call. */
function serverApi() {
  return {
    packed: null,
    runs: (signal) => getJson("/api/runs", {}, signal),
    rows: (run, query, signal) => getJson(`/api/runs/${run}/rows`, query, signal),
    rowText: (run, row, signal) => getText(`/api/runs/${run}/rows/${row}`, {}, signal),
    tokens: (run, row, signal) => getJson(`/api/runs/${run}/rows/${row}/tokens`, {}, signal),
    trained: (run, row, signal) => getJson(`/api/runs/${run}/rows/${row}/trained`, {}, signal),
    group: (run, task, signal) => getJson(`/api/runs/${run}/groups/${task}`, {}, signal),
    task: (run, task, signal) => getJson(`/api/runs/${run}/tasks/${task}`, {}, signal),
    tasks: (run, query, signal) => getJson(`/api/runs/${run}/tasks`, query, signal),
    stats: (run, q, signal) => getJson(`/api/runs/${run}/stats`, { q }, signal),
    report: (run, query, signal) => getText(`/api/runs/${run}/report`, query, signal),
    compare: (a, b, query, signal) => getJson("/api/compare", { a, b, ...query }, signal),
    training: (signal) => getJson("/api/training", {}, signal),
    trainingMetrics: (run, after, signal) => getJson(`/api/training/${run}/metrics`, { after }, signal),
    trainingConfig: (run, signal) => getJson(`/api/training/${run}/config`, {}, signal),
    trainingSamples: (run, signal) => getJson(`/api/training/${run}/samples`, {}, signal),
  };
}

export function openApi() {
  const data = packed();
  return data ? packedApi(data) : serverApi();
}

async function getJson(path, query, signal) {
  return JSON.parse(await getText(path, query, signal));
}

async function getText(path, query, signal) {
  const said = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const url = said.length ? `${path}?${new URLSearchParams(said)}` : path;
  const token = sessionStorage.getItem(TOKEN_KEY);
  try {
    const reply = await fetch(url, { signal, headers: token ? { authorization: `Bearer ${token}` } : {} });
    const text = await reply.text();
    if (!reply.ok) throw refusal(reply, text);
    return text;
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "No answer", "ng_view does not answer; is it still running? Start it again, and this page goes on.");
  }
}

function refusal(reply, text) {
  try {
    const problem = JSON.parse(text);
    return new ApiError(reply.status, problem.title ?? "Refused", problem.detail ?? text);
  } catch {
    return new ApiError(reply.status, "Refused", `${reply.status} ${text.slice(0, 200)}`);
  }
}
