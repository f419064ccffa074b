// Steps of an engine as columns of rows: the colour and texture of the adapter, dots on prefill,
// hatching on drafts, and a tick for a preemption.
import { html, useLayoutEffect, useRef } from "../lib/html.js";
import { paint, useRedraw } from "../lib/paint.js";
import { lookOf } from "./mark.js";

const HEIGHT = 168;
const HEAD = 8;
const PITCH = 8;
const WIDTH = 7;
const MAX_ROW = 20;
const TILE = 8;
export const KINDS = ["decode", "prefill", "draft"];

/**
 * What a column shows, from the bottom: rows by adapter and kind. The base's digest is empty, that
 * of adapters beyond those that a step names is null. A row with several adapters is in each.
 * @param {import("../lib/follow.js").Step} step
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
 * @param {{steps: import("../lib/follow.js").Step[], selected: number | null, label: string,
 *   textOf: (step: import("../lib/follow.js").Step) => string,
 *   onSelect: (startNs: number | null) => void}} props selected: the `start_ns` of a step
 */
export function Steps({ steps, selected, label, textOf, onSelect }) {
  const canvas = useRef(null);
  useRedraw(canvas);
  const width = canvas.current?.clientWidth ?? 0;
  const shown = steps.slice(-Math.max(1, Math.floor(width / PITCH)));
  useLayoutEffect(() => draw(canvas.current, shown, selected));

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
  return html`<canvas class="steps" ref=${canvas} tabindex="0" role="slider" aria-label=${label}
    aria-valuemin="0" aria-valuemax=${Math.max(0, shown.length - 1)} aria-valuenow=${Math.max(0, now)}
    aria-valuetext=${shown.length ? textOf(shown[now]) : ""} onKeyDown=${onKey} onClick=${onClick}></canvas>`;
}

/** @param {HTMLCanvasElement} canvas */
function draw(canvas, steps, selected) {
  const scale = devicePixelRatio;
  const width = canvas.clientWidth;
  canvas.width = width * scale;
  canvas.height = HEIGHT * scale;
  const to = canvas.getContext("2d");
  to.scale(scale, scale);
  const colour = paint(canvas);
  const fills = new Map();
  const most = Math.max(4, ...steps.map((step) => step.num_rows));
  const unit = Math.min(MAX_ROW, (HEIGHT - HEAD) / most);
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
  const height = uses ? (unit * step.num_rows) / uses : 0;
  let y = HEIGHT;
  for (const part of parts) {
    to.fillStyle = fill(part);
    const pieces = height >= 4 ? part.rows : 1;
    const each = (height * part.rows) / pieces;
    for (let i = 0; i < pieces; i += 1) {
      y -= each;
      to.fillRect(x, y, WIDTH, pieces > 1 || height >= 4 ? each - 1 : each);
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
