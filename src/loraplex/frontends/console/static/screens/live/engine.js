// An engine as it is followed: its newest steps, each once, what it does now, and its last minutes.
import { get } from "../../lib/api.js";

const FIRST_STEPS = 300;
const MAX_STEPS = 1000;

/**
 * @typedef {{step_id: number, start_ns: number, duration_ns: number, num_rows: number,
 *   num_prefill_rows: number, num_draft_tokens: number, num_new_tokens: number,
 *   num_tokens: number, num_running: number, num_waiting: number, num_preempted: number,
 *   num_adapters: number, num_base_rows: number, adapter_rows: Record<string, number>,
 *   prefill_rows: Record<string, number>, draft_rows: Record<string, number>,
 *   timing: Record<string, number | number[] | null>}} Step
 */

export class Follower {
  /** @type {Step[]} oldest first */
  steps = [];
  /** @type {{engine: any, waiting: Record<string, number>} | null} */
  now = null;
  /** Unix milliseconds at which `start_ns` was 0; NaN: not known yet. */
  origin = NaN;
  #isFirst = true;

  /** @param {string} model */
  constructor(model) {
    this.model = model;
  }

  /** @param {AbortSignal} signal */
  async poll(signal) {
    const model = `model=${encodeURIComponent(this.model)}`;
    const [steps, stats] = await Promise.all([
      this.#laterSteps(model, signal),
      get(`/v1/internal/stats?${model}`, signal),
    ]);
    this.now = stats.models[this.model];
    this.steps.push(...steps);
    this.steps.splice(0, Math.max(0, this.steps.length - MAX_STEPS));
  }

  /** @param {string} model @param {AbortSignal} signal */
  async #laterSteps(model, signal) {
    if (this.#isFirst) {
      const steps = await get(`/v1/iterations?${model}&limit=${FIRST_STEPS}`, signal);
      this.#isFirst = false;
      return steps;
    }
    const last = this.steps.at(-1)?.start_ns ?? 0;
    const query = `${model}&after_ns=${last}&limit=${MAX_STEPS}`;
    const { now_ns, unix_ns, data } = await get(`/v1/iterations?${query}`, signal);
    this.origin = (unix_ns - now_ns) / 1e6;
    // The machine started anew, and so did its clock.
    if (now_ns < last) {
      this.steps = [];
      this.#isFirst = true;
      return [];
    }
    // Beyond 2^53 ns of uptime `last` is not exact.
    return data.filter((step) => step.start_ns > last);
  }
}

// The last minutes of an engine, as the server kept them.

/** Points that are further from each other than so many steps have a gap between them. */
const GAP_STEPS = 2.5;

/**
 * What the engine did since the point before.
 * @typedef {{t: number, running: number, waiting: number, prompt_tokens: number, output_tokens: number,
 *   kv_held: number, kv_cached: number, pages_used: number, lora_share: number | null, restarts: number,
 *   ttft: number[], itl: number[], e2e: number[]}} Point t: Unix seconds of its end; ttft, itl, e2e:
 *   counts in buckets, empty if there is none
 * @typedef {{step_seconds: number, last_request: number | null, points: Point[],
 *   capacity: {kv_blocks: number, adapter_pages: number, max_num_seqs: number} | null,
 *   latency_bounds: Record<string, number[]>}} History capacity: null until the engine has started once
 */

/**
 * The history of a window. Of one that was loaded before, only what is newer is loaded.
 * @param {string} model @param {number} seconds @param {AbortSignal} signal
 * @param {History | null} before @returns {Promise<History>}
 */
export async function historyOf(model, seconds, signal, before) {
  const last = before?.points.at(-1)?.t;
  const missing = last === undefined ? seconds : Math.ceil(Date.now() / 1000 - last) + 2 * before.step_seconds;
  const wanted = Math.max(1, Math.min(seconds, missing));
  const history = await get(`/v1/history?model=${encodeURIComponent(model)}&seconds=${wanted}`, signal);
  const first = history.points[0]?.t ?? Infinity;
  const kept = before ? before.points.filter(({ t }) => t < first) : [];
  const points = [...kept, ...history.points];
  const end = points.at(-1)?.t ?? 0;
  return { ...history, points: points.filter(({ t }) => t > end - seconds) };
}

/**
 * The stretches without points, and whether the engine was restarted in each.
 * @param {History} history @returns {{from: number, to: number, isRestart: boolean}[]}
 */
export function gapsOf({ points, step_seconds: step }) {
  const gaps = [];
  points.forEach((point, i) => {
    const before = points[i - 1];
    if (!before) return;
    const isRestart = point.restarts > 0;
    if (isRestart || point.t - before.t > GAP_STEPS * step) gaps.push({ from: before.t, to: point.t, isRestart });
  });
  return gaps;
}

/** Counts in buckets, of all points together. @param {Point[]} points @param {"ttft" | "itl" | "e2e"} kind */
export function countsOf(points, kind) {
  const counts = [];
  for (const point of points) point[kind].forEach((value, i) => (counts[i] = (counts[i] ?? 0) + value));
  return counts;
}

/**
 * The value that a share of all times does not exceed, in milliseconds, and whether it is longer
 * than that; null: there are none.
 * @param {number[]} counts @param {number[]} bounds in seconds @param {number} share
 */
export function percentile(counts, bounds, share) {
  const wanted = counts.reduce((all, value) => all + value, 0) * share;
  if (!wanted) return null;
  let before = 0;
  const i = counts.findIndex((value) => (before += value) >= wanted);
  if (i >= bounds.length) return { ms: bounds.at(-1) * 1000, isMore: true };
  const least = i ? bounds[i - 1] : 0;
  const part = (wanted - before + counts[i]) / counts[i];
  return { ms: (least + (bounds[i] - least) * part) * 1000, isMore: false };
}

/** LoRA's share of the steps' time; null: not measured. @param {Point[]} points */
export function shareOf(points) {
  const measured = points.map((point) => point.lora_share).filter((share) => share !== null);
  return measured.length ? measured.reduce((all, share) => all + share, 0) / measured.length : null;
}
