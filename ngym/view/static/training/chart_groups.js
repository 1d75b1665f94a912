// The charts and their order: those that show whether a run learns come first.

// title, metrics in the order of their patterns, whether it is open at first
export const TRAINING_FIRST = "Reward and held-out evaluation";
const TRAINING_GROUPS = [
  [TRAINING_FIRST, [
    /^reward\/mean$/, /^eval\/.*\/avg@\d+$/, /^eval\/.*\/greedy$/, /^eval\/.*\/pass@\d+$/, /^val\//, /^reward(s|_component)?\//, /^frac_reward/, /^eval\/(?!.*\/(count|failed|unscored)$)/,
  ], true],
  ["Lag, KL, mismatch, entropy", [/^lag$/, /^lag\//, /^stale/, /^kl/, /^token_mult/, /^mismatch/, /^probs_ratio/, /^is_/, /entropy/], true],
  ["Lengths and turns", [/^completions\//, /^num_turns$/, /^tool_/], true],
  ["Loss and clipping", [/^loss$/, /^grad_norm$/, /^lr$/, /^clip_ratio\//, /^value_/, /^explained_/, /^critic_/, /^logps\//, /^skipped_/], true],
  ["Throughput", [/^tokens_per_s$/, /^global_valid/, /^memory\//], true],
  ["Phases of a step", [/^time\//], true],
  ["Tasks and groups", [/^num_/, /^tasks\//], false],
  ["Held-out attempts", [/^eval\//], false],
  ["Other", [/./], true],
];
const TRAINING_PHASES = ["time/generation", "time/logprob", "time/train", "time/weight_sync"];
const TRAINING_NO_CHART = new Set(["step", "epoch", "time/elapsed", "policy_version"]);

/** [{title, open, metrics: [name], phases: [name]}] of these metrics; groups without any are left out. */
export function trainingGroups(names) {
  const known = new Set(names);
  const left = new Set(names.filter((name) => !TRAINING_NO_CHART.has(name) && !isTrainingBound(name, known)));
  const groups = TRAINING_GROUPS.map(([title, patterns, open]) => ({ title, open, metrics: takenMetrics(trainingPatterns(title, patterns, known), left), phases: [] }));
  const timed = groups.find((group) => group.title === "Phases of a step");
  timed.phases = TRAINING_PHASES.filter((name) => known.has(name));
  if (timed.phases.length < 2) timed.phases = [];
  timed.metrics = timed.metrics.filter((name) => !timed.phases.includes(name));
  return groups.filter((group) => group.metrics.length || group.phases.length);
}

/** A run without rewards is judged by its loss. */
function trainingPatterns(title, patterns, known) {
  return title.startsWith("Reward") && !known.has("reward/mean") ? [/^loss$/, ...patterns] : patterns;
}

function takenMetrics(patterns, left) {
  const found = [];
  for (const pattern of patterns) {
    const matching = [...left].filter((name) => pattern.test(name)).sort();
    for (const name of matching) left.delete(name);
    found.push(...matching);
  }
  return found;
}

/** x/low and x/high are drawn as the band of x. */
function isTrainingBound(name, known) {
  const found = /^(.*)\/(low|high)$/.exec(name);
  return found !== null && known.has(found[1]);
}
