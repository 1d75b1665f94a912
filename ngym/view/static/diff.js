// The words in which two texts differ: Myers' O(ND) difference; past a limit, the middle is one difference.

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MOST_EDITS = 1000;

/** [{kind: "same" | "gone" | "new", text}] that turns `before` into `after`. */
export function wordDiff(before, after) {
  const [a, b] = [before.match(WORDS) ?? [], after.match(WORDS) ?? []];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end++;
  const [middleA, middleB] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  return joined([
    ...a.slice(0, start).map((text) => ({ kind: "same", text })),
    ...(shortestEdits(middleA, middleB) ?? wholeEdits(middleA, middleB)),
    ...a.slice(a.length - end).map((text) => ({ kind: "same", text })),
  ]);
}

/** E. W. Myers, An O(ND) Difference Algorithm and Its Variations (1986); null past MOST_EDITS. */
function shortestEdits(a, b) {
  const most = Math.min(a.length + b.length, MOST_EDITS);
  const middle = most + 1;
  let furthest = new Int32Array(2 * most + 3);
  const trail = [];
  for (let edits = 0; edits <= most; edits++) {
    trail.push(furthest.slice(middle - edits - 1, middle + edits + 2)); // only what this many edits can reach
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && furthest[middle + k - 1] < furthest[middle + k + 1]);
      let x = down ? furthest[middle + k + 1] : furthest[middle + k - 1] + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      furthest[middle + k] = x;
      if (x >= a.length && x - k >= b.length) return walkedBack(a, b, trail);
    }
  }
  return null;
}

function walkedBack(a, b, trail) {
  const edits = [];
  let [x, y] = [a.length, b.length];
  for (let d = trail.length - 1; d >= 0; d--) {
    const at = (k) => trail[d][k + d + 1];
    const k = x - y;
    const down = k === -d || (k !== d && at(k - 1) < at(k + 1));
    const fromX = d === 0 ? 0 : down ? at(k + 1) : at(k - 1);
    const fromY = d === 0 ? 0 : fromX - (down ? k + 1 : k - 1);
    while (x > fromX && y > fromY && a[x - 1] === b[y - 1]) {
      edits.push({ kind: "same", text: a[--x] });
      y--;
    }
    if (d === 0) break;
    edits.push(down ? { kind: "new", text: b[--y] } : { kind: "gone", text: a[--x] });
  }
  return edits.reverse();
}

function wholeEdits(a, b) {
  return [...a.map((text) => ({ kind: "gone", text })), ...b.map((text) => ({ kind: "new", text }))];
}

function joined(parts) {
  const runs = [];
  for (const { kind, text } of parts) {
    if (runs.at(-1)?.kind === kind) runs.at(-1).words.push(text);
    else runs.push({ kind, words: [text] });
  }
  return runs.map(({ kind, words }) => ({ kind, text: words.join("") }));
}
