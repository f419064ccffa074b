// What an engine does now, and what it did in the last minutes.
import { get } from "../lib/api.js";
import { html, useEffect, useId, useLayoutEffect, useMemo, usePoll, useReducer, useRef, useState } from "../lib/html.js";
import { go, linkTo } from "../lib/route.js";
import { count, duration, moment, percent, t } from "../lib/texts.js";
import { lookOf, Mark, Name, States, Tabs } from "../parts/basics.js";
import { Chart, nearest, roundUp } from "../parts/chart.js";
import { countsOf, Follower, gapsOf, historyOf, percentile, shareOf } from "./live/engine.js";

const POLL_SECONDS = 0.5;
const HISTORY_SECONDS = 2;
const LOOKUPS = 3;
const WINDOWS = ["1", "5", "15"];

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  const polled = usePoll((signal) => get("/v1/internal/stats", signal), 0);
  return html`<div class="live stack">
    ${!polled.data && html`<h1>${t("live.title")}</h1>`}
    <${States} of=${polled} needs="operator = true">
      ${({ models }) => {
        const names = Object.keys(models);
        const asked = route.query.get("model");
        const model = names.includes(asked) ? asked : names[0];
        return html`<${Engine} key=${model} model=${model} models=${names} query=${route.query} />`;
      }}
    <//>
  </div>`;
}

function Engine({ model, models, query }) {
  const minutes = WINDOWS.includes(query.get("minutes")) ? query.get("minutes") : "5";
  const follower = useMemo(() => new Follower(model), [model]);
  const [isPaused, setPaused] = useState(false);
  const [selected, select] = useState(null);
  const [time, setTime] = useState(null);
  const isQuiet = useRef(false);
  isQuiet.current = isPaused;
  const polled = usePoll(
    async (signal, before) => {
      if (!isQuiet.current || !before) await follower.poll(signal);
      return { follower };
    },
    POLL_SECONDS,
    [follower],
  );
  const history = usePoll(
    (signal, before) => (isQuiet.current && before ? before : historyOf(model, Number(minutes) * 60, signal, before)),
    HISTORY_SECONDS,
    [model, minutes],
  );
  const set = (changes) => go(linkTo("live", "", { ...Object.fromEntries(query), ...changes }), { replace: true });
  const onSelect = (startNs) => {
    select(startNs);
    if (startNs !== null) setPaused(true);
  };
  const onPause = () => {
    setPaused(!isPaused);
    if (isPaused) select(null);
  };
  const view = history.data?.capacity && viewOf(history.data, Number(minutes), time, setTime);
  return html`<div class="row live-head">
      <h1>${t("live.title")}</h1>
      <span class="second live-numbers">${view && html`<${Numbers} view=${view} />`}</span>
      <div class="row end">
        ${models.length > 1 &&
        html`<select aria-label=${t("live.model")} value=${model} onChange=${(event) => go(linkTo("live", "", { model: event.target.value }))}>
          ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>`}
        <${Tabs} label=${t("live.window")} value=${minutes} options=${WINDOWS.map((n) => [n, t("live.minutes", { n: Number(n) })])}
          onChoice=${(n) => set({ minutes: n })} />
        <button class="pause" onClick=${onPause} aria-pressed=${isPaused}>${t(isPaused ? "live.resume" : "live.pause")}</button>
      </div>
    </div>
    <${States} of=${polled}>
      ${() => html`<${Batch} of=${follower} most=${history.data?.capacity?.max_num_seqs} selected=${selected} onSelect=${onSelect} />`}
    <//>
    <${States} of=${history} isEmpty=${(data) => data.capacity === null} empty=${t("live.starting")}>
      ${() => polled.data && html`<${Tiles} view=${view} of=${follower} />`}
    <//>
    ${follower.steps.length > 0 && html`<${StepTable} steps=${follower.steps} />`}`;
}

/**
 * @typedef {{history: import("./live/engine.js").History, minutes: number, from: number, to: number,
 *   points: import("./live/engine.js").Point[], times: number[], at: number | null,
 *   point: import("./live/engine.js").Point | undefined,
 *   gaps: {from: number, to: number, isRestart: boolean}[], onAt: (index: number | null) => void}} View
 * `point`: the one that the reader chose, or the newest
 */

/** @returns {View} */
function viewOf(history, minutes, time, setTime) {
  const { points } = history;
  const times = points.map((point) => point.t);
  const to = times.at(-1) ?? Date.now() / 1000;
  const at = time === null || !times.length ? null : nearest(times, time);
  const onAt = (index) => setTime(index === null ? null : times[index]);
  const point = points[at ?? points.length - 1];
  return { history, minutes, points, times, from: to - minutes * 60, to, at, point, gaps: gapsOf(history), onAt };
}

function Batch({ of, most, selected, onSelect }) {
  const step = of.steps.find((one) => one.start_ns === selected);
  const digests = new Set(of.steps.slice(-200).flatMap((one) => Object.keys(one.adapter_rows)));
  const names = useNames([...digests]);
  const hasGap = of.steps.some((one, i) => joint(of.steps[i - 1], one));
  return html`<section class="card stack" aria-label=${t("live.who")}>
      <h2>${t("live.who")}</h2>
      ${of.steps.length
        ? html`<${Steps} steps=${of.steps} most=${most ?? 0} selected=${selected} onSelect=${onSelect} label=${t("live.pick")} textOf=${textOf} />
          <${Legend} digests=${[...digests]} names=${names} hasGap=${hasGap} />`
        : html`<p>${t("live.none")}</p><${Command} model=${of.model} />`}
    </section>
    ${step && html`<${Inspector} step=${step} origin=${of.origin} names=${names} onClose=${() => onSelect(null)} />`}`;
}

function Tiles({ view, of }) {
  const waiting = new Map(Object.entries(of.now.waiting));
  const names = useNames([...waiting.keys()]);
  return html`<div class="tiles">
    <${Kv} view=${view} /><${Fit} view=${view} /><${Speed} view=${view} />
    <${Latencies} view=${view} command=${html`<${Command} model=${of.model} />`} />
    <${Queue} waiting=${waiting} all=${of.now.engine.num_waiting} names=${names} />
    <${LoraCost} view=${view} />
  </div>`;
}

function Command({ model }) {
  const body = JSON.stringify({ model, prompt: "The capital of France is", max_tokens: 20 });
  const quoted = body.replaceAll("'", "'\\''");
  return html`<pre>curl ${location.origin}/v1/completions -H 'content-type: application/json' -d '${quoted}'</pre>`;
}

/** Names of adapters by digest, looked up a few at a time. @param {string[]} digests */
function useNames(digests) {
  const names = useRef(new Map());
  const [, redraw] = useReducer((n) => n + 1, 0);
  const unknown = digests.filter((digest) => !names.current.has(digest)).slice(0, LOOKUPS);
  useEffect(() => {
    for (const digest of unknown) {
      names.current.set(digest, null);
      get(`/v1/adapters?search=${digest}&limit=5`).then(
        ({ data }) => {
          const found = data.find((one) => one.digest === digest);
          names.current.set(digest, found?.name ?? null);
          redraw();
        },
        () => names.current.delete(digest),
      );
    }
  });
  return names.current;
}

// Questions about the last minutes, each answered by a number and a picture with the capacity as its axis.

const LATENCIES = ["ttft", "itl", "e2e"];
/** Name of each latency's bounds. */
const BOUNDS = new Map([["ttft", "time_to_first_token"], ["itl", "inter_token_latency"], ["e2e", "e2e_latency"]]);
const SHARES = [0.5, 0.95, 0.99];

const speedOf = (view, point) => (point ? Math.round(point.output_tokens / view.history.step_seconds) : 0);
const shareText = (value, all) => percent(value / Math.max(1, all));

/** The line of numbers in the head. @param {{view: View}} props */
function Numbers({ view }) {
  const { point, points, history } = view;
  const first = percentile(countsOf(points, "ttft"), history.latency_bounds.time_to_first_token, 0.95);
  return html`${view.at !== null && `${moment(point.t)}: `}
    ${t("live.running", { running: point?.running ?? 0, of: history.capacity.max_num_seqs, waiting: point?.waiting ?? 0 })}
    ${` · ${t("live.speed", { tokens: speedOf(view, point) })}`}
    ${first && ` · ${t("live.firstToken", { time: time(first) })}`}`;
}

const time = ({ ms, isMore }) => `${isMore ? "> " : ""}${duration(ms)}`;

function Tile({ title, now, children }) {
  return html`<section class="card">
    <div class="row"><h2>${title}</h2><span class="second row end">${now}</span></div>
    ${children}
  </section>`;
}

/** A chart of the view. Where there is a gap, a curve is interrupted. */
function Curves({ view, label, now, curves, most, shown = count, full }) {
  const { points, from, to, at, onAt, gaps } = view;
  const times = [];
  const breaks = new Set(gaps.map((gap) => gap.from));
  const values = curves.map(() => []);
  points.forEach((point) => {
    times.push(point.t);
    curves.forEach(({ of }, i) => values[i].push(of(point)));
    if (!breaks.has(point.t)) return;
    times.push(point.t);
    values.forEach((list) => list.push(null));
  });
  const named = gaps.map((gap) => ({ ...gap, title: t(gap.isRestart ? "live.restarted" : "live.missing") }));
  const index = at === null ? null : times.indexOf(view.times[at]);
  return html`<${Chart} label=${label} text=${`${view.point ? moment(view.point.t) : ""}: ${now}`} times=${times} from=${from} to=${to}
    curves=${curves.map(({ of: _, ...curve }, i) => ({ ...curve, values: values[i] }))} most=${most} shown=${shown} full=${full} gaps=${named}
    at=${index} onAt=${(i) => onAt(i === null ? null : view.times.indexOf(times[i]))} />`;
}

/** @param {{view: View}} props */
function Kv({ view }) {
  const { kv_blocks: all } = view.history.capacity;
  const { kv_held: held = 0, kv_cached: cached = 0 } = view.point ?? {};
  const now = t("live.blocks", { share: shareText(held, all), held, cached, all });
  const curves = [
    { name: "cached", colour: "edge", isFilled: true, of: (point) => point.kv_held + point.kv_cached },
    { name: "held", colour: "accent", isFilled: true, of: (point) => point.kv_held },
  ];
  return html`<${Tile} title=${t("live.kv")} now=${now}>
    <${Curves} view=${view} label=${t("live.kv")} now=${now} curves=${curves} most=${all} full=${percent(1)} />
    <p class="key"><span class="colour of-accent"></span> ${t("live.held")} <span class="colour of-edge"></span> ${t("live.cached")}</p><//>`;
}

/** @param {{view: View}} props */
function Fit({ view }) {
  const { adapter_pages: all } = view.history.capacity;
  const used = view.point?.pages_used ?? 0;
  const now = t("live.pagesUsed", { share: shareText(used, all), used, all });
  const curves = [{ name: "pages", colour: "accent", isFilled: true, of: (point) => point.pages_used }];
  return html`<${Tile} title=${t("live.fit")} now=${now}>
    <${Curves} view=${view} label=${t("live.fit")} now=${now} curves=${curves} most=${all} full=${percent(1)} /><//>`;
}

/** @param {{view: View}} props */
function Speed({ view }) {
  const step = view.history.step_seconds;
  const curves = [
    { name: "prompt", colour: "edge", of: (point) => point.prompt_tokens / step },
    { name: "output", colour: "accent", of: (point) => point.output_tokens / step },
  ];
  const most = roundUp(Math.max(0, ...view.points.map(({ prompt_tokens: prompt, output_tokens: output }) => Math.max(prompt, output) / step)));
  const now = t("live.speeds", { output: speedOf(view, view.point), prompt: Math.round((view.point?.prompt_tokens ?? 0) / step) });
  return html`<${Tile} title=${t("live.fast")} now=${now}>
    <${Curves} view=${view} label=${t("live.fast")} now=${now} curves=${curves} most=${most} />
    <p class="key"><span class="colour of-accent"></span> ${t("live.output")} <span class="colour of-edge"></span> ${t("live.prompt")}</p><//>`;
}

/** @param {{view: View, command: unknown}} props command: one that sends a request */
function Latencies({ view, command }) {
  const { points, history, minutes } = view;
  const rows = LATENCIES.map((kind) => {
    const counts = countsOf(points, kind);
    return [kind, SHARES.map((share) => percentile(counts, history.latency_bounds[BOUNDS.get(kind)], share))];
  });
  if (rows.every(([, values]) => values[0] === null)) {
    const last = history.last_request;
    return html`<${Tile} title=${t("live.wait")}>
      <p>${last === null ? t("live.noneYet") : t("live.noneNow", { n: minutes, at: moment(last) })}</p>${command}<//>`;
  }
  return html`<${Tile} title=${t("live.wait")} now=${t("live.lastMinutes", { n: minutes })}>
    <table>
      <thead><tr><th scope="col">${t("live.latency")}</th>
        ${SHARES.map((share) => html`<th key=${share} scope="col" class="number">p${share * 100}</th>`)}</tr></thead>
      <tbody>${rows.map(([kind, values]) => html`<tr key=${kind}><th scope="row">${t(`live.${kind}`)}</th>
        ${values[0] === null
          ? html`<td colspan=${SHARES.length} class="number second">${t("live.oneToken")}</td>`
          : values.map((value, i) => html`<td key=${i} class="number">${time(value)}</td>`)}</tr>`)}</tbody>
    </table><//>`;
}

/** @param {{view: View}} props */
function LoraCost({ view }) {
  const share = shareOf(view.points);
  return html`<${Tile} title=${t("live.cost")} now=${share === null ? t("live.unmeasured") : t("live.ofStep", { share: percent(share) })}>
    <p class="second">${share === null ? t("live.whyUnmeasured") : t("live.costMeans")}</p><//>`;
}

/** @param {{waiting: Map<string, number>, all: number, names: Map<string, string | null>}} props */
function Queue({ waiting, all, names }) {
  const rest = all - [...waiting.values()].reduce((sum, number) => sum + number, 0);
  const rows = [...waiting, ...(rest > 0 ? [["", rest]] : [])].sort((one, other) => other[1] - one[1]);
  return html`<${Tile} title=${t("live.whoWaits")} now=${t("live.waiting", { waiting: all })}>
    ${rows.length
      ? html`<ul class="queue">${rows.map(
          ([digest, number]) => html`<li key=${digest}><span>${digest ? html`<${Adapter} digest=${digest} names=${names} />` : t("live.rest")}</span>
            <span class="bar-of" style=${{ inlineSize: `${(number / rows[0][1]) * 40}%` }}></span> ${count(number)}</li>`,
        )}</ul>`
      : html`<p class="second">${t("live.nothingWaits")}</p>`}
  <//>`;
}

// Steps of an engine in words: the legend of their picture, one of them in full, and a table.

const TABLE_STEPS = 20;
const BY_DIGEST = new Set(["adapter_rows", "prefill_rows", "draft_rows"]);
const COLUMNS = [
  ...["step_id", "num_rows", "num_prefill_rows", "num_draft_tokens", "num_base_rows", "num_adapters"],
  ...["num_new_tokens", "num_preempted"],
];

/** One step in words. @param {import("./live/engine.js").Step} step */
function textOf(step) {
  return t("live.step", {
    id: step.step_id,
    rows: step.num_rows,
    prefill: step.num_prefill_rows,
    adapters: step.num_adapters,
    preempted: step.num_preempted,
    time: duration(step.duration_ns / 1e6),
  });
}

/** @param {{digest: string, names?: Map<string, string | null>}} props */
export function Adapter({ digest, names }) {
  if (!digest) return html`<${Mark} digest="" /> ${t("live.base")}`;
  const name = names.get(digest);
  return html`<${Mark} digest=${digest} /> ${name ? html`<${Name} of=${name} />` : html`<code>${digest.slice(0, 4)}</code>`}`;
}

/** @param {{digests: string[], names: Map<string, string | null>, hasGap: boolean}} props */
function Legend({ digests, names, hasGap }) {
  return html`<ul class="legend">
    <li><${Adapter} digest="" /></li>
    ${digests.map((digest) => html`<li key=${digest}><${Adapter} digest=${digest} names=${names} /></li>`)}
    ${KINDS.map((kind) => html`<li key=${kind} class="second"><span class="kind ${kind}"></span> ${t(`live.${kind}`)}</li>`)}
    <li class="second"><span class="kind preempted"></span> ${t("live.preempted")}</li>
    ${hasGap && html`<li class="second"><span class="kind gap"></span> ${t("live.gap")}</li>`}
  </ul>`;
}

/** @param {{step: import("./live/engine.js").Step, origin: number, names: Map<string, string | null>, onClose: () => void}} props */
function Inspector({ step, origin, names, onClose }) {
  const heading = useId();
  const at = origin + step.start_ns / 1e6;
  return html`<section class="card" aria-labelledby=${heading}>
    <div class="row">
      <h2 id=${heading}>${t("live.inspected", { id: step.step_id })}</h2>
      ${at && html`<span class="second">${moment(at / 1000)}</span>`}
      <div class="row end"><button class="small" onClick=${onClose}>${t("shell.close")}</button></div>
    </div>
    <dl class="fields">
      ${Object.entries(step).map(
        ([field, value]) => html`<div key=${field}>
          <dt><code>${field}</code></dt><dd>${shown(field, value, names)}</dd></div>`,
      )}
    </dl>
  </section>`;
}

/** The value of a field of a step. */
function shown(field, value, names) {
  if (value === null) return t("live.unmeasured");
  if (BY_DIGEST.has(field)) {
    const entries = Object.entries(value);
    if (!entries.length) return "–";
    return html`<ul>${entries.map(
      ([digest, rows]) => html`<li key=${digest}><${Adapter} digest=${digest} names=${names} /> ${count(rows)}</li>`,
    )}</ul>`;
  }
  if (Array.isArray(value)) return value.length ? value.join(", ") : "–";
  if (typeof value === "object") {
    return html`<ul>${Object.entries(value).map(
      ([part, of]) => html`<li key=${part}><code>${part}</code> ${shown(part, of, names)}</li>`,
    )}</ul>`;
  }
  return field.endsWith("_ns") && field !== "start_ns" ? shortTime(value) : count(value);
}

/** @param {number} ns */
const shortTime = (ns) => (ns < 1e6 ? `${count(ns / 1e3, { maximumFractionDigits: 0 })} µs` : duration(ns / 1e6));

/** @param {{steps: import("./live/engine.js").Step[]}} props */
function StepTable({ steps }) {
  return html`<details>
    <summary>${t("live.table")}</summary>
    <div class="scroll" tabindex="0" role="region" aria-label=${t("live.table")}><table class="steps-table">
      <thead><tr>${COLUMNS.map((name) => html`<th key=${name} scope="col" class="number">${t(`live.${name}`)}</th>`)}
        <th scope="col" class="number">${t("live.time")}</th></tr></thead>
      <tbody>${steps.slice(-TABLE_STEPS).reverse().map(
        (step) => html`<tr key=${step.start_ns}>
          ${COLUMNS.map((name) => html`<td key=${name} class="number">${count(step[name])}</td>`)}
          <td class="number">${duration(step.duration_ns / 1e6)}</td></tr>`,
      )}</tbody>
    </table></div>
  </details>`;
}

// Steps of an engine as columns of rows: the colour and texture of the adapter, dots on prefill,
// hatching on drafts, and a tick for a preemption.

const HEIGHT = 168;
const HEAD = 8;
const PITCH = 8;
const WIDTH = 7;
const MIN_COLUMN = 2;
const TILE = 8;
const KINDS = ["decode", "prefill", "draft"];

/**
 * What a column shows, from the bottom: rows by adapter and kind. The base's digest is empty, that
 * of adapters beyond those that a step names is null. A row with several adapters is in each.
 * @param {import("./live/engine.js").Step} step
 */
export function segments(step) {
  const found = [];
  const add = (digest, whole) => {
    const prefill = step.prefill_rows[digest] ?? 0;
    const draft = step.draft_rows[digest] ?? 0;
    for (const [kind, rows] of [["prefill", prefill], ["draft", draft], ["decode", whole - prefill - draft]]) {
      if (rows > 0) found.push({ digest, kind, rows });
    }
  };
  add("", step.num_base_rows);
  for (const [digest, rows] of Object.entries(step.adapter_rows)) add(digest, rows);
  const rest = step.num_rows - found.reduce((all, one) => all + one.rows, 0);
  if (rest > 0) found.push({ digest: null, kind: "decode", rows: rest });
  return found;
}

/** How a step follows the one before: "", "gap" or "restart". */
export function joint(before, step) {
  if (!before || step.step_id === before.step_id + 1) return "";
  return step.step_id > before.step_id ? "gap" : "restart";
}

/**
 * @param {{steps: import("./live/engine.js").Step[], most: number, selected: number | null, label: string,
 *   textOf: (step: import("./live/engine.js").Step) => string,
 *   onSelect: (startNs: number | null) => void}} props most: rows that a step can have,
 *   the end of the axis; selected: the `start_ns` of a step
 */
function Steps({ steps, most, selected, label, textOf, onSelect }) {
  const canvas = useRef(null);
  useRedraw(canvas);
  const width = canvas.current?.clientWidth ?? 0;
  const shown = steps.slice(-Math.max(1, Math.floor(width / PITCH)));
  useLayoutEffect(() => draw(canvas.current, shown, most, selected));

  const at = shown.findIndex((step) => step.start_ns === selected);
  const now = at < 0 ? shown.length - 1 : at;
  const select = (i) => shown.length && onSelect(shown[Math.max(0, Math.min(i, shown.length - 1))].start_ns);
  const moves = new Map([
    ["ArrowLeft", () => select(now - 1)],
    ["ArrowDown", () => select(now - 1)],
    ["ArrowRight", () => select(now + 1)],
    ["ArrowUp", () => select(now + 1)],
    ["PageDown", () => select(now - 10)],
    ["PageUp", () => select(now + 10)],
    ["Home", () => select(0)],
    ["End", () => select(shown.length - 1)],
    ["Escape", () => onSelect(null)],
  ]);
  const onKey = (event) => {
    const move = moves.get(event.key);
    if (!move) return;
    event.preventDefault();
    move();
  };
  const onClick = (event) => {
    const fromRight = canvas.current.clientWidth - event.offsetX;
    select(shown.length - 1 - Math.floor(fromRight / PITCH));
  };
  return html`<div class="steps-plot"><div class="chart-axis" aria-hidden="true"><span>${most ? count(most) : ""}</span><span>0</span></div>
    <canvas class="steps" ref=${canvas} tabindex="0" role="slider" aria-label=${label}
    aria-valuemin="0" aria-valuemax=${Math.max(0, shown.length - 1)} aria-valuenow=${Math.max(0, now)}
    aria-valuetext=${shown.length ? textOf(shown[now]) : ""} onKeyDown=${onKey} onClick=${onClick}></canvas></div>`;
}

/** @param {HTMLCanvasElement} canvas */
function draw(canvas, steps, capacity, selected) {
  const scale = devicePixelRatio;
  const width = canvas.clientWidth;
  canvas.width = width * scale;
  canvas.height = HEIGHT * scale;
  const to = canvas.getContext("2d");
  to.scale(scale, scale);
  const colour = paint(canvas);
  const fills = new Map();
  const most = Math.max(1, capacity, ...steps.map((step) => step.num_rows));
  const unit = (HEIGHT - HEAD) / most;
  steps.forEach((step, i) => {
    const x = width - (steps.length - i) * PITCH;
    if (step.start_ns === selected) {
      to.fillStyle = colour("accent");
      to.fillRect(x - 2, 0, WIDTH + 4, HEIGHT);
      to.fillStyle = colour("selected");
      to.fillRect(x - 1, 1, WIDTH + 2, HEIGHT - 2);
    }
    drawJoint(to, colour, joint(steps[i - 1], step), x);
    drawRows(to, step, unit, x, (segment) => fillOf(to, colour, fills, segment));
    if (step.num_preempted) {
      to.fillStyle = colour("bad");
      to.fillRect(x, 0, WIDTH, HEAD - 3);
    }
  });
}

function drawRows(to, step, unit, x, fill) {
  const parts = segments(step);
  const uses = parts.reduce((all, one) => all + one.rows, 0);
  // A row with two adapters takes half of its height for each.
  const height = uses ? Math.max(MIN_COLUMN, unit * step.num_rows) / uses : 0;
  let y = HEIGHT;
  for (const part of parts) {
    to.fillStyle = fill(part);
    const pieces = height >= 4 ? part.rows : 1;
    const each = (height * part.rows) / pieces;
    for (let i = 0; i < pieces; i += 1) {
      // Whole pixels, so that rows are apart from each other.
      const [bottom, top] = height >= 4 ? [Math.round(y) - 1, Math.round(y - each)] : [y, y - each];
      to.fillRect(x, top, WIDTH, bottom - top);
      y -= each;
    }
  }
}

function drawJoint(to, colour, kind, x) {
  if (!kind) return;
  to.strokeStyle = colour(kind === "gap" ? "second" : "warn");
  to.setLineDash(kind === "gap" ? [3, 3] : []);
  to.lineWidth = kind === "gap" ? 1 : 2;
  to.beginPath();
  to.moveTo(x - 0.5, 0);
  to.lineTo(x - 0.5, HEIGHT);
  to.stroke();
}

/** The pattern of an adapter's rows of one kind. */
function fillOf(to, colour, fills, { digest, kind }) {
  const look = lookOf(digest ?? "");
  const key = `${look.colour} ${look.texture} ${kind} ${digest === null}`;
  if (!fills.has(key)) {
    const tile = new OffscreenCanvas(TILE, TILE);
    const on = tile.getContext("2d");
    on.fillStyle = colour(look.colour >= 0 ? `c${look.colour}` : digest === null ? "line" : "edge");
    on.fillRect(0, 0, TILE, TILE);
    on.fillStyle = on.strokeStyle = colour("card");
    if (look.texture === "dots") dots(on, 1);
    if (look.texture === "stripes") stripes(on, 1, 1.5);
    on.fillStyle = on.strokeStyle = colour("text");
    if (kind === "prefill") dots(on, 3);
    if (kind === "draft") stripes(on, -1, 1.2);
    fills.set(key, to.createPattern(tile, "repeat"));
  }
  return fills.get(key);
}

function dots(on, first) {
  for (const [x, y] of [[first, first], [first + 4, first], [first, first + 4], [first + 4, first + 4]]) {
    on.fillRect(x, y, 1.5, 1.5);
  }
}

function stripes(on, slope, width) {
  on.lineWidth = width;
  for (let x = -TILE; x <= 2 * TILE; x += 4) {
    on.beginPath();
    on.moveTo(x, slope > 0 ? TILE : 0);
    on.lineTo(x + TILE, slope > 0 ? 0 : TILE);
    on.stroke();
  }
}

// The theme's colours for canvases, and when to draw them again.

/** Render again when an element's size or the system's theme changes. @param {{current: Element}} of */
function useRedraw(of) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    const observer = new ResizeObserver(redraw);
    observer.observe(of.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", redraw);
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", redraw);
    };
  }, []);
}

/**
 * A function from a colour's name, such as "accent", to what a canvas takes.
 * @param {Element} element one in the theme
 */
export function paint(element) {
  const probe = element.parentElement.appendChild(document.createElement("span"));
  probe.hidden = true;
  probe.style.forcedColorAdjust = "none";
  const known = new Map();
  queueMicrotask(() => probe.remove());
  return (name) => {
    if (!known.has(name)) {
      probe.style.color = `var(--${name})`;
      known.set(name, getComputedStyle(probe).color);
    }
    return known.get(name);
  };
}
