// Formats numbers. Unknown is a dash, never a 0.

export const DASH = "–";
const COUNTS = new Intl.NumberFormat("en-US");

/** At most `digits` digits after the point, no trailing zeros; very small and very large ones as 1.2e-5. */
export function formatNumber(x, digits = 3) {
  if (!isNumber(x)) return DASH;
  const size = Math.abs(x);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e7)) return x.toExponential(2).replace("-", "−").replace("e−", "e-");
  return trimmed(x.toFixed(digits)).replace("-", "−");
}

/** With a sign, for differences: +0.25, −0.5, 0. */
export function formatSigned(x, digits = 3) {
  return isNumber(x) && x > 0 ? `+${formatNumber(x, digits)}` : formatNumber(x, digits);
}

/** 1,234 */
export function formatCount(n) {
  return isNumber(n) ? COUNTS.format(n) : DASH;
}

/** 812 µs, 12 ms, 2.4 s, 3 min 20 s */
export function formatSeconds(s) {
  if (!isNumber(s)) return DASH;
  if (s === 0) return "0 s";
  if (s < 0) return `−${formatSeconds(-s)}`; // clocks are set back
  const [micro, milli, whole] = [Math.round(s * 1e6), Math.round(s * 1000), Math.round(s)]; // rounded first: 0.9997 is 1 s
  if (micro < 1000) return `${micro} µs`;
  if (milli < 1000) return `${milli} ms`;
  if (milli < 99_950) return `${trimmed(s.toFixed(1))} s`;
  return whole < 7200 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${trimmed((s / 3600).toFixed(1))} h`;
}

/** 12 kB, 2.1 GB */
export function formatBytes(n) {
  if (!isNumber(n)) return DASH;
  const power = n < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(n) / 3));
  return `${trimmed((n / 1000 ** power).toFixed(power ? 1 : 0))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

export function formatPercent(share) {
  return isNumber(share) ? `${Math.round(share * 100)} %` : DASH;
}

/** 1 rollout, 2 rollouts */
export function plural(n, noun) {
  return `${formatCount(n)} ${noun}${n === 1 ? "" : "s"}`;
}

export function isNumber(x) {
  return typeof x === "number" && Number.isFinite(x);
}

function trimmed(digits) {
  return digits.includes(".") ? digits.replace(/\.?0+$/, "").replace(/^-0$/, "0") : digits;
}
