// What the reader has put together, and the body of POST /v1/compare that it makes.
import { CHAT_FIELDS, FIELDS, jsonOf, valueOf } from "./options.js";

/**
 * @typedef {{name: string, digest: string, scale: number}} Part
 * @typedef {{kind: "completion" | "chat", model: string, prompt: string,
 *   messages: {role: string, content: string}[], columns: Part[][],
 *   options: Record<string, string>, structured: {kind: string, text: string}}} Setup
 */

export const ROLES = ["system", "user", "assistant"];
export const STRUCTURES = ["none", "json", "regex", "choice", "grammar", "json_object"];
export const NUM_LIKELIEST = 5;
export const MAX_COLUMNS = 32;

/** @returns {Setup} */
export function newSetup() {
  return {
    kind: "completion",
    model: "",
    prompt: "",
    messages: [{ role: "user", content: "" }],
    columns: [[]],
    options: { max_tokens: "64" },
    structured: { kind: "none", text: "" },
  };
}

/**
 * @param {Setup} setup
 * @returns {{body: Record<string, unknown>, errors: Map<string, string>}} errors by field
 */
export function bodyOf(setup) {
  const errors = new Map();
  const isChat = setup.kind === "chat";
  const body = {
    ...(setup.model && { model: setup.model }),
    ...(isChat ? { messages: setup.messages.filter(({ content }) => content) } : { prompt: setup.prompt }),
    adapters: setup.columns.map(entryOf),
    logprobs: NUM_LIKELIEST,
    stream: true,
  };
  for (const field of isChat ? [...FIELDS, ...CHAT_FIELDS] : FIELDS) {
    const text = (setup.options[field.name] ?? "").trim();
    if (text) take(field.name, () => valueOf(field, text));
  }
  const { kind, text } = setup.structured;
  if (kind !== "none") take("structured_outputs", () => ({ [kind]: formOf(kind, text) }));
  return { body, errors };

  function take(name, read) {
    try {
      body[name] = read();
    } catch (error) {
      errors.set(name, error.message);
    }
  }
}

function formOf(kind, text) {
  if (kind === "json_object") return true;
  if (kind === "json") return jsonOf(text, "object");
  return kind === "choice" ? text.split("\n").filter(Boolean) : text;
}

/** An entry of `adapters`: null for the base. @param {Part[]} parts */
function entryOf(parts) {
  const entries = parts.map(({ name, scale }) => (scale === 1 ? name : { name, scale }));
  return entries.length > 1 ? entries : (entries[0] ?? null);
}

/** The field of the form that an error of the server is about. @param {string | null} param */
export function fieldOf(param) {
  if (!param) return "";
  if (/^(grammar|guided_|json_schema|regex|ebnf|response_format|structured)/.test(param)) return "structured_outputs";
  return param.split(/[.[]/)[0];
}
