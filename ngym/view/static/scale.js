// Axis scales: the position of a value, and the marked values.

/** [lowest, highest], never of zero width; `margin` is added at both ends, as a share. */
export function extent(values, margin = 0) {
  let lo = Infinity;
  let hi = -Infinity;
  for (const value of values) {
    if (value < lo) lo = value;
    if (value > hi) hi = value;
  }
  if (lo > hi) return [0, 1];
  if (lo === hi) return [lo - (Math.abs(lo) || 1) * 0.1, hi + (Math.abs(hi) || 1) * 0.1];
  return [lo - (hi - lo) * margin, hi + (hi - lo) * margin];
}

/** About `count` round numbers between lo and hi. */
export function ticks(lo, hi, count) {
  const rough = (hi - lo) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) ?? rough;
  const first = Math.ceil(lo / step);
  return Array.from({ length: Math.floor(hi / step + 1e-9) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
