// What the reader has put together: columns, fields of the request, and the body that they make.
import { count, t } from "../../lib/texts.js";

/**
 * @typedef {{name: string, type: "int" | "number" | "flag" | "texts" | "ids" | "object" | "choice",
 *   group?: string, min?: number, max?: number, above?: boolean, choices?: string[],
 *   slide?: [number, number, number]}} Field
 * group: none of those that are shown first; above: more than min; slide: least, most and step of
 * the slider, which has only the usual values.
 */

/** Limits beyond are those of a data type. */
const MAX_TOLD = 1e9;
export const GROUPS = ["length", "repetition", "words", "decay", "server"];

/** @type {Field[]} */
export const FIELDS = [
  { name: "max_tokens", type: "int", min: 1 },
  { name: "temperature", type: "number", min: 0, max: 100, slide: [0, 2, 0.05] },
  { name: "top_p", type: "number", min: 0, max: 1, above: true, slide: [0.05, 1, 0.05] },
  { name: "top_k", type: "int", min: -1 },
  { name: "min_p", type: "number", min: 0, max: 1, slide: [0, 1, 0.01] },
  { name: "repetition_penalty", type: "number", min: 0, max: 100, above: true, slide: [0.8, 2, 0.05] },
  { name: "seed", type: "int", min: -Number.MAX_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER },
  { name: "stop", type: "texts" },
  { name: "min_tokens", type: "int", min: 0, group: "length" },
  { name: "ignore_eos", type: "flag", group: "length" },
  { name: "include_stop_str_in_output", type: "flag", group: "length" },
  { name: "stop_token_ids", type: "ids", group: "length" },
  { name: "presence_penalty", type: "number", min: -2, max: 2, group: "repetition" },
  { name: "frequency_penalty", type: "number", min: -2, max: 2, group: "repetition" },
  { name: "no_repeat_ngram_size", type: "int", min: 0, group: "repetition" },
  { name: "bad_words", type: "texts", group: "words" },
  { name: "allowed_token_ids", type: "ids", group: "words" },
  { name: "logit_bias", type: "object", group: "words" },
  { name: "skip_special_tokens", type: "flag", group: "words" },
  { name: "add_special_tokens", type: "flag", group: "words" },
  { name: "top_p_decay", type: "number", min: 0, max: 1, above: true, group: "decay" },
  { name: "top_p_min", type: "number", min: 0, max: 1, above: true, group: "decay" },
  { name: "top_p_reset_ids", type: "int", min: -1, group: "decay" },
  { name: "num_draft_tokens", type: "int", min: 0, group: "server" },
  { name: "priority", type: "int", min: -2147483647, max: 2147483647, group: "server" },
  { name: "timeout_seconds", type: "number", min: 0, above: true, group: "server" },
  { name: "load_lora_weights", type: "choice", choices: ["auto", "always", "never"], group: "server" },
];

export const CHAT_FIELDS = [{ name: "chat_template_kwargs", type: "object", group: "server" }];

/** The value to send. Throws an Error that says what would be right. @param {Field} field */
export function valueOf(field, text) {
  switch (field.type) {
    case "int":
    case "number":
      return numberOf(field, text);
    case "flag":
      return text === "true";
    case "texts":
      return text.split("\n").filter(Boolean);
    case "ids":
      return text.split(/[\s,]+/).filter(Boolean).map((id) => numberOf({ type: "int", min: 0 }, id));
    case "object":
      return jsonOf(text, field.type);
    default:
      return text;
  }
}

function numberOf({ type, min = -Infinity, max = Infinity, above }, text) {
  const value = Number(text);
  if (Number.isNaN(value) || (type === "int" && !Number.isInteger(value)))
    throw new Error(t(type === "int" ? "playground.notWhole" : "playground.notNumber"));
  if (value > max || value < min || (above && value === min))
    throw new Error(limitsOf({ min, max, above }));
  return value;
}

function limitsOf({ min = -Infinity, max = Infinity, above = false }) {
  const low = min < -MAX_TOLD ? "" : `${above ? ">" : "≥"} ${min}`;
  const high = max > MAX_TOLD ? "" : `≤ ${max}`;
  if (low && high && !above) return t("playground.limits", { min: count(min), max: count(max) });
  return [low, high].filter(Boolean).join(", ");
}

/** @param {string} text @param {"object" | "list"} kind */
export function jsonOf(text, kind) {
  const value = JSON.parse(text);
  const isRight = kind === "list" ? Array.isArray(value) : value?.constructor === Object;
  if (!isRight) throw new Error(t(kind === "list" ? "playground.notList" : "playground.notObject"));
  return value;
}

/** What the server does where a field is empty, in words. @param {Field} field @param {Record<string, unknown>} defaults */
export function defaultText({ name, type }, defaults) {
  const value = defaults[name];
  if (value === undefined) return "";
  if (value === null) {
    if (name === "max_tokens") return t("playground.default_rest");
    return t(name === "seed" ? "playground.default_random" : "playground.default_none");
  }
  if (type === "flag") return t(value ? "playground.on" : "playground.off");
  return typeof value === "number" ? String(value) : Array.isArray(value) || typeof value === "object" ? JSON.stringify(value) : String(value);
}

/**
 * @typedef {{name: string, digest: string, scale: number, isVersion?: boolean}} Part isVersion:
 *   the digest is sent, and the name is its beginning
 * @typedef {{key: number, parts: Part[]}} Column parts: none for the base model
 * @typedef {{kind: "completion" | "chat", system: string, columns: Column[],
 *   options: Record<string, string>, structured: {kind: string, text: string},
 *   tools: {list: object[], choice: string, parallel: string}}} Setup
 * @typedef {{column: Column, prompt: string} | {column: Column, messages: object[]}} Entry what one
 *   column is sent
 */

export const STRUCTURES = ["none", "json_object", "json", "regex", "choice", "grammar"];
const NUM_LIKELIEST = 5;
export const MAX_COLUMNS = 32;
/** What the console begins with: the server's 16 tokens are few for a chat. */
export const START = { max_tokens: "512" };

/** @param {"completion" | "chat"} kind @returns {Setup} */
export function newSetup(kind) {
  return {
    kind,
    system: "",
    columns: [{ key: 1, parts: [] }],
    options: { ...START },
    structured: { kind: "none", text: "" },
    tools: { list: [], choice: "", parallel: "" },
  };
}

/** @param {Setup} setup */
export const nextKey = ({ columns }) => Math.max(...columns.map(({ key }) => key)) + 1;

/** Names of the fields whose value is not the one that the console begins with. @param {Setup} setup */
export const changedFields = ({ options }) =>
  [...FIELDS, ...CHAT_FIELDS].map(({ name }) => name).filter((name) => (options[name] ?? "") !== (START[name] ?? ""));

/**
 * The fields of a request that all columns share.
 * @param {Setup} setup
 * @returns {{fields: Record<string, unknown>, errors: Map<string, string>}} errors by field
 */
export function fieldsOf(setup) {
  const errors = new Map();
  const fields = {};
  const isChat = setup.kind === "chat";
  for (const field of isChat ? [...FIELDS, ...CHAT_FIELDS] : FIELDS) {
    const text = (setup.options[field.name] ?? "").trim();
    if (text) take(field.name, () => valueOf(field, text));
  }
  const { kind, text } = setup.structured;
  if (kind !== "none") take("structured_outputs", () => ({ [kind]: formOf(kind, text) }));
  const { list, choice, parallel } = setup.tools;
  if (isChat && list.length) {
    fields.tools = list;
    if (choice) fields.tool_choice = choiceOf(choice);
    if (parallel) fields.parallel_tool_calls = parallel === "true";
  }
  return { fields, errors };

  function take(name, read) {
    try {
      fields[name] = read();
    } catch (error) {
      errors.set(name, error.message);
    }
  }
}

const choiceOf = (choice) =>
  ["auto", "required", "none"].includes(choice) ? choice : { type: "function", function: { name: choice } };

/** Throws an Error that says what is wrong. @param {string} kind @param {string} text */
export function formOf(kind, text) {
  if (kind === "json_object") return true;
  if (kind === "json") return jsonOf(text, "object");
  return kind === "choice" ? text.split("\n").filter(Boolean) : text;
}

/**
 * @param {string} model @param {Record<string, unknown>} fields see fieldsOf
 * @param {Entry[]} entries one for each output; all have one prompt or chat, or each has its own
 */
export function bodyOf(model, fields, entries) {
  const inputs = entries.map(({ messages, prompt }) => (messages ? { messages } : { prompt }));
  const isShared = inputs.every((input) => JSON.stringify(input) === JSON.stringify(inputs[0]));
  const adapters = entries.map(({ column }) => entryOf(column.parts));
  return {
    ...(model && { model }),
    ...(isShared
      ? { ...inputs[0], adapters }
      : { entries: inputs.map((input, i) => ({ adapters: adapters[i], ...input })) }),
    logprobs: NUM_LIKELIEST,
    stream: true,
    ...fields,
  };
}

/** An entry of `adapters`: null for the base. @param {Part[]} parts */
export function entryOf(parts) {
  const entries = parts.map(({ name, digest, scale, isVersion }) => {
    if (isVersion) return scale === 1 ? { digest } : { digest, scale };
    return scale === 1 ? name : { name, scale };
  });
  return entries.length > 1 ? entries : (entries[0] ?? null);
}

/** The field of the form that an error of the server is about. @param {string | null} param */
export function fieldOf(param) {
  if (!param) return "";
  if (/^(grammar|guided_|json_schema|regex|ebnf|response_format|structured)/.test(param)) return "structured_outputs";
  return param.split(/[.[]/)[0];
}

/** A column's name as plain text, for those who hear it. @param {Part[]} parts */
export function labelOf(parts) {
  if (!parts.length) return t("playground.base");
  return parts.map(({ name, scale }) => (scale === 1 ? name : `${count(scale)} × ${name}`)).join(" + ");
}
