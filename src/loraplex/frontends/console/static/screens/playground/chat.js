// A conversation: messages, the replies of each column to them, and the requests that bring them.
import { events, post } from "../../lib/api.js";

/**
 * @typedef {Output[]} Version one reply: an output, and those that follow the results of its tools
 * @typedef {{versions: Version[], shown: number}} Reply
 * @typedef {{text: string, replies: Map<number, Reply>, run: Run | null}} Turn
 *   replies by the key of a column; run: the newest of all columns
 */

/** @param {Turn} turn @param {number} key @returns {Version | null} */
export function versionOf(turn, key) {
  const reply = turn.replies.get(key);
  return reply ? reply.versions[reply.shown] : null;
}

/**
 * The messages that a column is sent so that it replies to a turn. Earlier turns that it has no
 * reply to are left out: a template wants user and assistant in turns.
 * @param {string} system @param {Turn[]} turns up to the one to reply to @param {number} key
 */
export function messagesOf(system, turns, key) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, index) => {
    const isLast = index === turns.length - 1;
    const version = isLast ? null : versionOf(turn, key);
    if (!isLast && !version?.some(({ shown, calls }) => shown || calls.length)) return;
    messages.push({ role: "user", content: turn.text });
    if (version) messages.push(...repliesOf(version));
  });
  return messages;
}

/** The messages of a reply, with the results of its tools. @param {Version} version */
export function repliesOf(version) {
  return version.flatMap(({ shown, calls }) => [
    {
      role: "assistant",
      content: shown.trim(),
      ...(calls.length && {
        tool_calls: calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } })),
      }),
    },
    ...calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" })),
  ]);
}

/** Add an output as a new version of a column's reply, and return it. @param {Turn} turn @param {number} key */
export function begin(turn, key) {
  const output = new Output();
  const versions = [...(turn.replies.get(key)?.versions ?? []), [output]];
  turn.replies.set(key, { versions, shown: versions.length - 1 });
  return output;
}

/** An output that goes on from what came of one that was cut. @param {Output} cut */
export function goingOn({ text, content, reasoning, tokens, isBare }) {
  return Object.assign(new Output(), { text, content, reasoning, tokens: [...tokens], isBare });
}

/** Every column goes on with the replies of one. @param {Turn[]} turns @param {number} from @param {number[]} keys */
export function shareReplies(turns, from, keys) {
  for (const turn of turns) {
    const reply = turn.replies.get(from);
    if (reply) for (const key of keys) if (key !== from) turn.replies.set(key, copyOf(reply));
  }
}

/** @param {Reply} reply */
export const copyOf = ({ versions, shown }) => ({ versions: versions.map((version) => [...version]), shown });

/** What is kept of a conversation: texts, and no tokens. @param {Turn[]} turns */
export function saved(turns) {
  return turns.map(({ text, replies }) => ({
    text,
    replies: [...replies].map(([key, { versions, shown }]) => [
      key,
      { shown, versions: versions.map((version) => version.map(textOf)) },
    ]),
  }));
}

const textOf = ({ text, content, reasoning, calls, finish, error }) => ({ text, content, reasoning, calls, finish, error });

/** @param {ReturnType<typeof saved>} list @returns {Turn[]} */
export function restored(list) {
  return list.map(({ text, replies }) => ({
    text,
    run: null,
    replies: new Map(
      replies.map(([key, { shown, versions }]) => [
        key,
        { shown, versions: versions.map((version) => version.map(outputOf)) },
      ]),
    ),
  }));
}

const outputOf = (fields) => Object.assign(new Output(), fields, { isBare: true, state: fields.error ? "failed" : fields.finish ? "done" : "cut" });

/**
 * @typedef {{id: number, bytes: number[], logprob: number, top: {token: string, bytes: number[],
 *   logprob: number}[]}} Token
 * @typedef {"waiting" | "streaming" | "done" | "failed" | "cut"} OutputState cut: by Stop, or the
 *   server is lost
 * @typedef {{id: string, name: string, arguments: string, result: string | null}} Call result: what
 *   the reader wrote for the tool
 */

let numOutputs = 0;

export class Output {
  key = ++numOutputs;
  /** @type {OutputState} */
  state = "waiting";
  text = "";
  /** The text without what a chat format marks as reasoning or calls; null: a completion. */
  content = null;
  reasoning = "";
  /** @type {Call[]} */
  calls = [];
  /** @type {Token[]} */
  tokens = [];
  /** Whether the tokens of its beginning are not known any longer. */
  isBare = false;
  finish = "";
  /** The last event: timing, difference from the base, adapters. */
  end = null;
  error = "";
  retryAt = 0;
  /** Whether it must have a form: then it has that, or was cut. */
  isFormed = false;
  pending = "";
  /** Called once a frame with new text. @type {Set<(text: string) => void>} */
  sinks = new Set();

  /** What a reader sees of it. */
  get shown() {
    return this.content ?? this.text;
  }

  get isOpen() {
    return this.state === "waiting" || this.state === "streaming";
  }

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
    const news = delta ? (delta.content ?? "") : text;
    this.text += text;
    this.pending += news;
    if (delta) this.content = (this.content ?? "") + news;
    token_ids.forEach((id, i) => {
      const { bytes, logprob, top_logprobs } = logprobs[i];
      this.tokens.push({ id, bytes, logprob, top: top_logprobs });
    });
    if (finish_reason) this.finish = finish_reason;
    if (delta?.reasoning) this.reasoning += delta.reasoning;
    for (const call of delta?.tool_calls ?? []) {
      this.calls[call.index] ??= { id: call.id ?? `call_${call.index}`, name: call.function?.name ?? "", arguments: "", result: null };
      this.calls[call.index].arguments += call.function?.arguments ?? "";
    }
  }

  flush() {
    if (this.pending || this.state === "streaming") for (const sink of this.sinks) sink(this.pending);
    this.pending = "";
  }
}

export class Run {
  /** @type {"running" | "done" | "stopped" | "failed" | "gone"} */
  state = "running";
  error = null;
  /** The event behind all outputs: usage, seed, tokens of the prompt. */
  summary = null;
  /** By which outputs are cancelled; empty: the server cannot. */
  id = "";
  stopping = new AbortController();
  frame = 0;

  /**
   * @param {Record<string, unknown>} body @param {Output[]} outputs one for each entry
   * @param {() => void} onChange something other than text has changed
   * @param {() => void} onText text was added
   */
  constructor(body, outputs, onChange, onText) {
    this.body = body;
    this.outputs = outputs;
    this.onChange = onChange;
    this.onText = onText;
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
    for (const output of this.outputs) if (output.isOpen) this.end(output);
    this.show();
  }

  /** An output that did not end by itself. @param {Output} output */
  end(output) {
    output.state = this.state === "failed" && output.state === "waiting" ? "failed" : "cut";
    if (output.state !== "failed") return;
    output.error = this.error.message;
    if (this.error.retrySeconds) output.retryAt = Date.now() + this.error.retrySeconds * 1000;
  }

  stop() {
    this.stopping.abort();
  }

  /** Stop one output, and let the others go on. @param {Output} output */
  async cancel(output) {
    await post(`/v1/compare/${encodeURIComponent(this.id)}/cancel`, { index: this.outputs.indexOf(output) });
  }

  take(event) {
    if (event.index === undefined) {
      if (event.usage) this.summary = event;
      // The server refused the rest of a response that had begun.
      else if (event.error) throw Object.assign(new Error(event.error.message), { param: event.error.param });
      else if (event.id) {
        this.id = event.id;
        this.isChanged = true;
      }
    } else {
      const output = this.outputs[event.index];
      const before = output.state;
      output.take(event);
      if (output.state !== before) this.isChanged = true;
    }
    this.frame ||= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    for (const output of this.outputs) output.flush();
    if (this.isChanged || this.state !== "running") this.onChange();
    this.isChanged = false;
    this.onText();
  }

  /** Times of the outputs that are whole. */
  get timings() {
    return this.outputs.flatMap(({ end }) => (end?.timing ? [end.timing] : []));
  }
}
