// Pictures of numbers: curves over time, bars of minutes, and parts of a capacity.
import { html } from "../lib/html.js";
import { count, moment } from "../lib/texts.js";

const HEIGHT = 100;

/** The least round number from `least` on that is not below a value: an axis ends there. */
export function roundUp(value, least = 10) {
  const wanted = Math.max(value, least);
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 5, 10].map((digit) => digit * power).find((end) => end >= wanted) ?? wanted;
}

/**
 * Curves over a window of time. The pointer or ← and → choose a moment, Escape none.
 * @typedef {{name: string, colour: string, values: (number | null)[], isFilled?: boolean}} Curve
 * colour: the name of one of the theme's; later curves are drawn over earlier ones
 * @param {{label: string, text: string, times: number[], from: number, to: number, curves: Curve[], most: number,
 *   shown: (value: number) => string, full?: string, gaps?: {from: number, to: number, title: string}[],
 *   at: number | null, onAt: (index: number | null) => void}} props text: what a screen reader says of the
 *   moment; times, from, to: Unix seconds; most: the end of the axis, which begins at 0;
 *   full: what is written at that end; at: index of a time
 */
export function Chart({ label, text, times, from, to, curves, most, shown, full, gaps = [], at, onAt }) {
  const place = (time) => (100 * (time - from)) / (to - from);
  const inside = (share) => `${Math.max(0, Math.min(100, share))}%`;
  const last = times.length - 1;
  const select = (index) => onAt(Math.max(0, Math.min(last, index)));
  const moves = new Map([
    ["ArrowLeft", () => select((at ?? last + 1) - 1)],
    ["ArrowRight", () => select((at ?? last) + 1)],
    ["Home", () => select(0)],
    ["End", () => select(last)],
    ["Escape", () => onAt(null)],
  ]);
  const onKey = (event) => {
    if (!moves.has(event.key) || last < 0) return;
    event.preventDefault();
    moves.get(event.key)();
  };
  const onMove = (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    const time = from + ((event.clientX - left) / width) * (to - from);
    if (last >= 0) onAt(nearest(times, time));
  };
  return html`<div class="chart">
    <div class="chart-axis" aria-hidden="true"><span>${shown(most)}</span><span>0</span></div>
    <div class="chart-plot" role="slider" tabindex="0" aria-label=${label} aria-valuemin="0" aria-valuemax=${Math.max(0, last)}
      aria-valuenow=${Math.max(0, at ?? last)} aria-valuetext=${text} onKeyDown=${onKey} onPointerMove=${onMove}
      onPointerLeave=${() => onAt(null)}>
      <svg viewBox="0 0 100 ${HEIGHT}" preserveAspectRatio="none" aria-hidden="true">
        ${curves.map((curve) => html`<path key=${curve.name} class="curve ${curve.isFilled ? "filled " : ""}of-${curve.colour}"
          d=${outline(curve, times.map(place), most)} />`)}
      </svg>
      ${full && html`<span class="chart-full" aria-hidden="true">${full}</span>`}
      ${gaps.map((gap) => html`<span class="chart-gap" key=${gap.from} title=${gap.title}
        style=${{ left: inside(place(gap.from)), right: inside(100 - place(gap.to)) }}></span>`)}
      ${at !== null && times[at] !== undefined && html`<span class="chart-at" style=${{ left: inside(place(times[at])) }}></span>`}
    </div>
    <div class="chart-times" aria-hidden="true"><span>${moment(from)}</span><span>${moment(to)}</span></div>
  </div>`;
}

/** The index of the time that is nearest to another. @param {number[]} times in order */
export function nearest(times, wanted) {
  const after = times.findIndex((time) => time >= wanted);
  if (after <= 0) return after === 0 ? 0 : times.length - 1;
  return wanted - times[after - 1] < times[after] - wanted ? after - 1 : after;
}

/** A curve's path. A value that is null interrupts it. @param {Curve} curve @param {number[]} places in % */
function outline({ values, isFilled }, places, most) {
  let path = "";
  let begin = -1;
  const end = (index) => {
    if (begin >= 0 && isFilled) path += `L${places[index]} ${HEIGHT}L${places[begin]} ${HEIGHT}Z`;
    begin = -1;
  };
  values.forEach((value, i) => {
    if (value === null) return end(i - 1);
    const point = `${places[i].toFixed(2)} ${(HEIGHT * (1 - Math.min(1, value / most))).toFixed(2)}`;
    path += begin < 0 ? `M${point}` : `L${point}`;
    if (begin < 0) begin = i;
  });
  end(values.length - 1);
  return path;
}

/**
 * Bars, each with a part on top that went wrong.
 * @param {{label: string, bars: {key: number, all: number, bad: number, title: string}[], most: number,
 *   begin: string, end: string}} props begin, end: texts under the first and the last one
 */
export function Bars({ label, bars, most, begin, end }) {
  const width = 100 / Math.max(1, bars.length);
  const part = (kind, i, low, high) => high > low && html`<rect class=${kind} x=${i * width + width * 0.1} width=${width * 0.8}
    y=${HEIGHT * (1 - high / most)} height=${(HEIGHT * (high - low)) / most} />`;
  return html`<div class="chart">
    <div class="chart-axis" aria-hidden="true"><span>${count(most)}</span><span>0</span></div>
    <div class="chart-plot" role="img" aria-label=${label}>
      <svg viewBox="0 0 100 ${HEIGHT}" preserveAspectRatio="none" aria-hidden="true">
        ${bars.map(({ key, all, bad, title }, i) => html`<g key=${key}><title>${title}</title>
          <rect class="of-none" x=${i * width} width=${width} y="0" height=${HEIGHT} />
          ${part("of-accent", i, 0, all - bad)}${part("of-bad", i, all - bad, all)}</g>`)}
      </svg>
    </div>
    <div class="chart-times" aria-hidden="true"><span>${begin}</span><span>${end}</span></div>
  </div>`;
}

/**
 * A bar as wide as a capacity, with its used parts from the left.
 * @param {{label: string, parts: {key: string, amount: number, look: string, title: string}[], total: number}} props
 *   look: classes of a swatch
 */
export function Capacity({ label, parts, total }) {
  const used = parts.reduce((sum, { amount }) => sum + amount, 0);
  return html`<div class="capacity" role="img" aria-label=${label}>
    ${used > 0 && html`<span class="capacity-used" style=${{ width: `${Math.min(100, (100 * used) / Math.max(1, total))}%` }}>
      ${parts.filter(({ amount }) => amount > 0).map(({ key, amount, look, title }) => html`<span key=${key} class="swatch ${look}"
        title=${title} style=${{ flexGrow: amount }}></span>`)}
    </span>`}
  </div>`;
}
