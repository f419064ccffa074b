// Following an engine: its newest steps, each once, and what changes between two polls.
import { get } from "./api.js";

const FIRST_STEPS = 300;
const MAX_STEPS = 1000;
/** Five minutes at two polls a second. */
const MAX_POLLS = 600;
const WINDOW_POLLS = 120;

/**
 * @typedef {{step_id: number, start_ns: number, duration_ns: number, num_rows: number,
 *   num_prefill_rows: number, num_draft_tokens: number, num_new_tokens: number,
 *   num_tokens: number, num_running: number, num_waiting: number, num_preempted: number,
 *   num_adapters: number, num_base_rows: number, adapter_rows: Record<string, number>,
 *   prefill_rows: Record<string, number>, draft_rows: Record<string, number>,
 *   timing: Record<string, number | number[] | null>}} Step
 * @typedef {{at: number, engine: any, waiting: Record<string, number>, latencies: any,
 *   tokens: number | null, share: number | null}} Poll
 * `at` in Unix seconds; tokens per second since the poll before; LoRA's share of the steps' time.
 */

export class Follower {
  /** @type {Step[]} oldest first */
  steps = [];
  /** @type {Poll[]} oldest first */
  polls = [];
  /** Upper bounds of the buckets of latencies. */
  bounds = {};
  /** Unix milliseconds at which `start_ns` was 0; NaN: not known yet. */
  origin = NaN;
  #polledMs = NaN;
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
    const now = performance.now();
    const seconds = (now - this.#polledMs) / 1000;
    this.#polledMs = now;
    this.bounds = stats.latency_bounds;
    const { engine, waiting, latencies } = stats.models[this.model];
    const tokens = seconds > 0 ? sum(steps, (step) => step.num_new_tokens) / seconds : null;
    const poll = { at: Date.now() / 1000, engine, waiting, latencies, tokens, share: shareOf(steps) };
    append(this.polls, [poll], MAX_POLLS);
    append(this.steps, steps, MAX_STEPS);
  }

  /** Latencies of the last minute, as counts in buckets. @param {string} kind */
  counts(kind) {
    const newest = this.polls.at(-1).latencies[kind];
    const before = this.polls.at(-1 - WINDOW_POLLS) ?? this.polls[0];
    const difference = newest.map((value, i) => value - before.latencies[kind][i]);
    // A restarted server counts from 0.
    return difference.some((value) => value < 0) ? newest : difference;
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

/** LoRA's share of the time of steps; null: not measured. @param {Step[]} steps */
export function shareOf(steps) {
  const measured = steps.filter((step) => typeof step.timing.lora_ns === "number");
  const whole = sum(measured, (step) => step.duration_ns);
  return whole ? sum(measured, (step) => step.timing.lora_ns) / whole : null;
}

/**
 * The value that a share of all times does not exceed, in milliseconds, and whether it is longer
 * than that; null: there are none.
 * @param {number[]} counts @param {number[]} bounds in seconds @param {number} share
 */
export function percentile(counts, bounds, share) {
  const wanted = sum(counts, (value) => value) * share;
  if (!wanted) return null;
  let before = 0;
  const i = counts.findIndex((value) => (before += value) >= wanted);
  if (i >= bounds.length) return { ms: bounds.at(-1) * 1000, isMore: true };
  const least = i ? bounds[i - 1] : 0;
  const part = (wanted - before + counts[i]) / counts[i];
  return { ms: (least + (bounds[i] - least) * part) * 1000, isMore: false };
}

/** @template T @param {T[]} list @param {T[]} added @param {number} most */
function append(list, added, most) {
  list.push(...added);
  list.splice(0, Math.max(0, list.length - most));
}

/** @template T @param {T[]} list @param {(one: T) => number} value */
function sum(list, value) {
  return list.reduce((all, one) => all + value(one), 0);
}
