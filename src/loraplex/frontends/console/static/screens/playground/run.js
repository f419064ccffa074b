// One comparison: what was sent, and what has come back. Text is handed on once a frame.
import { events } from "../../lib/api.js";

/**
 * @typedef {{id: number, bytes: number[], logprob: number, top: {token: string, logprob: number}[]}} Token
 * @typedef {"waiting" | "streaming" | "done" | "failed" | "cut"} OutputState cut: by Stop, or the
 *   server is lost
 */

let numOutputs = 0;

export class Output {
  key = ++numOutputs;
  /** @type {OutputState} */
  state = "waiting";
  text = "";
  reasoning = "";
  /** @type {{name: string, arguments: string}[]} */
  calls = [];
  /** @type {Token[]} */
  tokens = [];
  finish = "";
  /** The last event: timing, difference from the base, adapters. */
  end = null;
  error = "";
  /** Called once a frame with new text. @type {(text: string) => void} */
  sink = () => {};
  pending = "";

  take(event) {
    if (event.error) {
      this.state = "failed";
      this.error = event.error.message;
    } else if (event.done) {
      this.state = "done";
      this.end = event;
      this.finish = event.finish_reason;
    } else {
      this.add(event);
    }
  }

  add({ text, token_ids, logprobs, delta, finish_reason }) {
    this.state = "streaming";
    this.text += text;
    this.pending += text;
    token_ids.forEach((id, i) => {
      const { bytes, logprob, top_logprobs } = logprobs[i];
      this.tokens.push({ id, bytes, logprob, top: top_logprobs });
    });
    if (finish_reason) this.finish = finish_reason;
    if (delta?.reasoning) this.reasoning += delta.reasoning;
    for (const call of delta?.tool_calls ?? []) {
      this.calls[call.index] ??= { name: call.function?.name ?? "", arguments: "" };
      this.calls[call.index].arguments += call.function?.arguments ?? "";
    }
  }

  flush() {
    if (this.pending) this.sink(this.pending);
    this.pending = "";
  }
}

export class Run {
  /** @type {"running" | "done" | "stopped" | "failed" | "gone"} */
  state = "running";
  error = null;
  usage = null;

  /**
   * @param {import("./setup.js").Setup} setup @param {Record<string, unknown>} body
   * @param {() => void} onChange something other than text has changed
   */
  constructor(setup, body, onChange) {
    this.setup = setup;
    this.body = body;
    this.outputs = setup.columns.map(() => new Output());
    this.onChange = onChange;
    this.stopping = new AbortController();
    this.frame = 0;
  }

  async start() {
    try {
      for await (const event of events("/v1/compare", this.body, this.stopping.signal)) this.take(event);
      this.state = "done";
    } catch (error) {
      const isStopped = this.stopping.signal.aborted;
      this.state = isStopped ? "stopped" : error.isGone ? "gone" : "failed";
      this.error = isStopped ? null : error;
    }
    for (const output of this.outputs)
      if (output.state === "waiting" || output.state === "streaming") output.state = "cut";
    this.show();
  }

  stop() {
    this.stopping.abort();
  }

  take(event) {
    if (event.index === undefined) {
      if (event.usage) this.usage = event.usage;
      // The server refused the rest of a response that had begun.
      else if (event.error) throw Object.assign(new Error(event.error.message), { param: event.error.param });
      return;
    }
    const output = this.outputs[event.index];
    const before = output.state;
    output.take(event);
    if (output.state !== before) this.isChanged = true;
    this.frame ||= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    for (const output of this.outputs) output.flush();
    if (this.isChanged || this.state !== "running") this.onChange();
    this.isChanged = false;
  }

  /** Times of the outputs that are whole. */
  get timings() {
    return this.outputs.flatMap(({ end }) => (end?.timing ? [end.timing] : []));
  }
}
