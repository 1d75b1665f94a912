// Small SVG charts of one run: a histogram, a scatter, bars; a click on a part follows its link.
import { el, svgEl } from "./dom.js";
import { formatCount, formatNumber } from "./format.js";
import { safeLine } from "./safetext.js";
import { extent, ticks } from "./scale.js";

const WIDTH = 300;

/** edges [n+1], counts [n]; onPick(lo, hi, isLast) when a bar is chosen. */
export function histogram({ edges, counts }, onPick, height = 110) {
  const most = Math.max(1, ...counts);
  const isSparse = counts.filter((count) => count > 0).length <= 8;
  const [left, top, bottom] = [4, 14, height - 18];
  const step = (WIDTH - 2 * left) / counts.length;
  const bars = counts.map((count, i) => {
    const tall = count ? Math.max(2, ((bottom - top) * count) / most) : 0;
    const said = `reward ${formatNumber(edges[i])} to ${formatNumber(edges[i + 1])}: ${formatCount(count)}`;
    const pick = () => count && onPick(edges[i], edges[i + 1], i === counts.length - 1);
    const x = left + i * step;
    const share = counts.length > 1 ? i / (counts.length - 1) : 1;
    return svgEl(
      "g",
      { class: "pick", ...pickable(pick, said, count > 0) },
      svgEl("title", null, said),
      svgEl("rect", { class: "hit", x, y: top, width: step, height: bottom - top }),
      svgEl("rect", {
        class: "bar",
        x: x + 1,
        y: bottom - tall,
        width: Math.max(1, step - 2),
        height: tall,
        rx: 1,
        vars: { "--colour": rewardColour(share) },
      }),
      count > 0 &&
        isSparse &&
        svgEl("text", { class: "tick", x: x + step / 2, y: bottom - tall - 3, "text-anchor": "middle" }, short(count)),
    );
  });
  return svgEl(
    "svg",
    { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "group", "aria-label": "Rewards: how many rollouts got which" },
    bars,
    svgEl("line", { class: "axis", x1: left, x2: WIDTH - left, y1: bottom + 0.5, y2: bottom + 0.5 }),
    svgEl("text", { class: "tick", x: left, y: height - 5 }, formatNumber(edges[0])),
    svgEl("text", { class: "tick", x: WIDTH - left, y: height - 5, "text-anchor": "end" }, formatNumber(edges.at(-1))),
  );
}

/** points: [[tokens, reward, row]]; onPick(row). */
export function scatter(points, onPick, height = 130) {
  const [x0, x1] = extent([0, ...points.map(([x]) => x)], 0.02);
  const [y0, y1] = extent(
    points.map(([, y]) => y),
    0.08,
  );
  const box = { left: 34, right: 6, top: 6, bottom: 20 };
  const x = (value) => box.left + ((value - x0) / (x1 - x0)) * (WIDTH - box.left - box.right);
  const y = (value) => box.top + (1 - (value - y0) / (y1 - y0)) * (height - box.top - box.bottom);
  const dots = points.map(([tokens, reward, row]) =>
    svgEl(
      "circle",
      { class: "point", cx: x(tokens).toFixed(1), cy: y(reward).toFixed(1), r: 2.5, "data-row": row },
      svgEl("title", null, `rollout ${row}: ${formatCount(tokens)} tokens, reward ${formatNumber(reward)}`),
    ),
  );
  const pick = (event) => event.target.dataset?.row !== undefined && onPick(event.target.dataset.row);
  return svgEl(
    "svg",
    { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "Reward against output tokens", on: { click: pick } },
    ticks(y0, y1, 3).map((value) => [
      svgEl("line", { class: "grid", x1: box.left, x2: WIDTH - box.right, y1: y(value), y2: y(value) }),
      svgEl("text", { class: "tick", x: box.left - 5, y: y(value) + 3.5, "text-anchor": "end" }, formatNumber(value)),
    ]),
    ticks(Math.max(0, x0), x1, 3).map((value) =>
      svgEl("text", { class: "tick", x: x(value), y: height - 5, "text-anchor": "middle" }, short(value)),
    ),
    dots,
  );
}

/** points: [[x, mean reward, rollouts]] as a small curve; at: the x that is marked. */
export function sparkline(points, { width = 110, height = 22, at = null, title = "" } = {}) {
  const [x0, x1] = extent(points.map(([x]) => x));
  const [y0, y1] = extent([0, 1, ...points.map(([, y]) => y)]);
  const place = ([px, py]) => [3 + ((px - x0) / (x1 - x0)) * (width - 6), 3 + (1 - (py - y0) / (y1 - y0)) * (height - 6)].map((one) => one.toFixed(1));
  const dots = points.map((point) => {
    const [cx, cy] = place(point);
    return svgEl("circle", { cx, cy, r: point[0] === at ? 4 : 1.6, class: point[0] === at ? "is-here" : null });
  });
  return svgEl(
    "svg",
    { class: "sparkline", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title },
    svgEl("polyline", { points: points.map((point) => place(point).join()).join(" ") }),
    dots,
  );
}

/** entries: [{name, count, colour?, said?: the figure in words}]; onPick(entry) or null. A line each: name, bar, figure. */
export function bars(entries, onPick) {
  const most = Math.max(1e-9, ...entries.map((entry) => Math.abs(entry.count)));
  return el(
    "div",
    { class: "bars" },
    entries.map((entry) => {
      const fill = el("span", {
        class: "bar-fill",
        vars: { "--share": String(Math.abs(entry.count) / most), "--colour": entry.colour ?? "var(--accent)" },
      });
      const parts = [
        el("span", { class: "bar-name", title: safeLine(entry.name) }, safeLine(entry.name)),
        el("span", { class: "bar-track" }, fill),
        el("span", { class: "num" }, entry.said ?? formatCount(entry.count)),
      ];
      return onPick
        ? el("button", { type: "button", class: "bar-line", on: { click: () => onPick(entry) } }, parts)
        : el("div", { class: "bar-line" }, parts);
    }),
  );
}

export function rewardColour(share) {
  return share < 0.34 ? "var(--bad)" : share < 0.67 ? "var(--warn)" : "var(--good)";
}

function pickable(pick, said, can) {
  if (!can) return {};
  const byKey = (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), event.stopPropagation(), pick());
  return { tabindex: 0, role: "button", "aria-label": said, on: { click: pick, keydown: byKey } };
}

function short(n) {
  return n >= 1e6 ? `${formatNumber(n / 1e6, 1)}M` : n >= 1e4 ? `${formatNumber(n / 1e3, 0)}k` : formatCount(Math.round(n));
}
