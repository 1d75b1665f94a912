// The data of an exported report: the same calls as the server's, answered from the file.
import { localFilter, localSort, looksForText, onePage } from "./localfilter.js";

/** data: {runs, rows: {run: [row]}, full: {run: {row: rollout}}, stats: {run: ..}, compare: {"a,b": ..}, training}. */
export function packedApi(data) {
  const rowsOf = (run) => data.rows?.[run] ?? [];
  const fullOf = (run, row) => data.full?.[run]?.[row] ?? null;
  const fitting = (run, q) => rowsOf(run).filter(localFilter(q, data.runs.find(({ id }) => id === run)?.fields));
  return {
    packed: data,
    runs: async () => ({ title: data.title ?? "ngym", runs: data.runs.map((run) => ({ ...run, growing: false })) }),
    rows: async (run, query) => listed(fitting(run, query.q), query),
    rowText: async (run, row) => {
      const rollout = fullOf(run, row);
      if (!rollout) throw new Error("This report does not hold this rollout in full; open the file itself with ng_view to see it.");
      return typeof rollout === "string" ? rollout : JSON.stringify(rollout);
    },
    tokens: async (run, row) => ({
      segments: idsOnly(fullOf(run, row)),
      note: "an exported report holds no token texts; these are the ids",
    }),
    trained: async () => null,
    group: async (run, task) => ({ task: Number(task), rows: groupOf(rowsOf(run), task) }),
    task: async (run, task) => ({ task: Number(task), rows: taskOf(rowsOf(run), task) }),
    tasks: async (run, query) => listed(taskRows(fitting(run, query.q)), query),
    stats: async (run) => data.stats?.[run] ?? null,
    compare: async (a, b, query) => {
      const found = data.compare?.[`${a},${b}`];
      if (!found) throw new Error("This report does not hold this comparison.");
      const sort = query.sort === "-abs_delta" ? "" : query.sort; // as they were packed: the largest difference first
      return { ...found, ...onePage(localSort(found.rows, sort), query) };
    },
    training: async () => ({ runs: [] }),
    trainingMetrics: async () => ({ next: 0, entries: [] }),
    trainingConfig: async () => ({ recipe: {}, text: "" }),
    trainingSamples: async () => ({ steps: [], file: null }),
    ...packedTraining(data.training),
  };
}

/** A page; it says so where a text was looked for, which may be in a part of the rollout that is not listed. */
function listed(rows, query) {
  const note = looksForText(query.q) ? "texts are looked for in the lines of this report only" : null;
  return { ...onePage(localSort(rows, query.sort), query), note };
}

/** How many of a run's rollouts are in the report: {listed, full, of}. */
export function packedShare(data, run) {
  return { listed: data.rows?.[run.id]?.length ?? 0, full: Object.keys(data.full?.[run.id] ?? {}).length, of: run.rows + run.failures };
}

/** The tokens of a row without their texts. */
function idsOnly(rollout) {
  return (rollout?.ng?.segments ?? []).map((segment) => ({ advantage: null, tokens: tokensOf(segment) }));
}

function tokensOf({ token_ids: ids, mask, logprobs, policy_version: versions }) {
  const tokens = ids.map((id) => ({ id, text: null, logprob: null, trained: false, version: null }));
  let place = 0;
  for (const [start, end] of mask) {
    for (let at = start; at < end; at++) Object.assign(tokens[at], { trained: true, logprob: logprobs[place++] ?? null });
  }
  for (const [start, end, version] of versions) for (let at = start; at < end; at++) tokens[at].version = version;
  return tokens;
}

/** The rollouts of a task in the server's order: by their numbers. */
function groupOf(rows, task) {
  return rows.filter((row) => String(row.task) === String(task)).sort((a, b) => (a.rollout ?? Infinity) - (b.rollout ?? Infinity));
}

/** What makes two rows rollouts of the same task: its id; its index where the rows have none. */
const taskKey = ({ agent, task_id: id, task }) => JSON.stringify([agent, id ?? task]);

/** All rollouts of the task that has this index, of its other groups, too. */
function taskOf(rows, task) {
  const keys = new Set(groupOf(rows, task).map(taskKey));
  return rows.filter((row) => keys.has(taskKey(row))).sort((a, b) => a.task - b.task || (a.rollout ?? Infinity) - (b.rollout ?? Infinity));
}

function taskRows(rows) {
  return [...grouped(rows).values()].map((group) => {
    const rewards = group.map((row) => row.reward).filter((reward) => reward !== null);
    const [best, worst] = rewards.length ? [Math.max(...rewards), Math.min(...rewards)] : [null, null];
    const { task, task_id, agent, prompt } = group[0];
    const groups = new Set(group.map((row) => row.task)).size;
    const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
    const failures = group.filter((row) => row.status === "failed").length;
    return {
      task,
      task_id,
      groups,
      agent,
      prompt,
      n: group.length - failures,
      mean,
      best,
      worst,
      spread: best === null ? null : best - worst,
      failures,
      ...trendOf(group),
      tokens: null,
    };
  });
}

/** As the server has it: the curve [[weights, mean reward, rollouts]], and the rise of the least-squares line through the rollouts. */
export function trendOf(group) {
  const points = group.map((row) => [weightsOf(row), row.reward]).filter(([x, y]) => x !== null && y !== null);
  const versions = [...new Set(points.map(([x]) => x))].sort((a, b) => a - b);
  const sum = (value) => points.reduce((total, point) => total + value(point), 0);
  const [n, sx, sy] = [points.length, sum(([x]) => x), sum(([, y]) => y)];
  const spread = n * sum(([x]) => x * x) - sx * sx;
  const curve = versions.map((version) => {
    const own = points.filter(([x]) => x === version);
    return [version, own.reduce((total, [, y]) => total + y, 0) / own.length, own.length];
  });
  return { curve, trend: spread ? ((n * sum(([x, y]) => x * y) - sx * sy) * (versions.at(-1) - versions[0])) / spread : null };
}

/** How many batches the weights of a rollout had learned; the policy version where no trainer says so. */
export function weightsOf(row) {
  return row.learned ?? row.policy_version ?? null;
}

function grouped(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(taskKey(row), [...(groups.get(taskKey(row)) ?? []), row]);
  return groups;
}

/** {runs: [...], metrics: {id: ..}, config: {id: ..}, samples: {id: ..}} as the server's four calls. */
function packedTraining(training) {
  if (!training) return {};
  return {
    training: async () => ({ runs: training.runs ?? [] }),
    trainingMetrics: async (run, after) => (after ? { next: after, entries: [] } : (training.metrics?.[run] ?? { next: 0, entries: [] })),
    trainingConfig: async (run) => training.config?.[run] ?? { recipe: {}, text: "" },
    trainingSamples: async (run) => training.samples?.[run] ?? { steps: [], file: null, held_out: null },
  };
}
