// Curves over time.
import { html, useEffect, useLayoutEffect, useRef } from "../lib/html.js";
import { paint, useRedraw } from "../lib/paint.js";
import { moment } from "../lib/texts.js";
import uPlot from "../vendor/uplot.mjs";

const HEIGHT = 110;

/**
 * @typedef {{name: string, colour: string, values: (number | null)[], isFilled?: boolean}} Curve
 * colour: the name of one of the theme's
 * @param {{label: string, times: number[], curves: Curve[], shown: (value: number) => string,
 *   most?: number}} props label: what a screen reader says; times: Unix seconds; most: the upper end of the scale
 */
export function Chart({ label, times, curves, shown, most }) {
  const box = useRef(null);
  const plot = useRef(null);
  useRedraw(box);
  useEffect(() => () => plot.current.chart.destroy(), []);
  useLayoutEffect(() => {
    const colour = paint(box.current);
    const look = [...curves.map((curve) => colour(curve.colour)), colour("second")].join();
    if (plot.current?.look !== look) {
      plot.current?.chart.destroy();
      const chart = new uPlot(options(box.current, colour, curves, shown, most), [], box.current);
      plot.current = { chart, look };
    }
    const { chart } = plot.current;
    const width = box.current.clientWidth;
    if (chart.width !== width) chart.setSize({ width, height: HEIGHT });
    chart.setData([times, ...curves.map((curve) => curve.values)]);
  });
  return html`<div class="chart" role="img" aria-label=${label} ref=${box}></div>`;
}

function options(box, colour, curves, shown, most) {
  const font = `11px ${getComputedStyle(box).fontFamily}`;
  const axis = { stroke: colour("second"), font, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  return {
    width: box.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    padding: [6, 4, 0, 0],
    scales: { y: { range: (_, least, greatest) => [0, most ?? Math.max(1e-9, greatest * 1.1)] } },
    axes: [
      { ...axis, size: 20, space: 90, values: (_, ticks) => ticks.map(moment) },
      { ...axis, size: 56, space: 30, values: (_, ticks) => ticks.map(shown) },
    ],
    series: [
      {},
      ...curves.map(({ name, colour: of, isFilled }) => ({
        label: name,
        stroke: colour(of),
        fill: isFilled ? colour(of) : undefined,
        width: 1.5,
        points: { show: false },
      })),
    ],
  };
}
