// Fields of the request that say how tokens are chosen, and their form. An empty one is not sent.
import { html } from "../../lib/html.js";
import { t } from "../../lib/texts.js";

/**
 * @typedef {{name: string, type: "int" | "number" | "flag" | "texts" | "ids" | "object" | "choice",
 *   min?: number, max?: number, above?: boolean, choices?: string[]}} Field
 * above: more than min.
 */

/** Limits beyond are those of a data type. */
const MAX_TOLD = 1e9;

/** @type {Field[]} */
export const FIELDS = [
  { name: "max_tokens", type: "int", min: 1 },
  { name: "temperature", type: "number", min: 0, max: 100 },
  { name: "top_p", type: "number", min: 0, max: 1, above: true },
  { name: "top_k", type: "int", min: -1 },
  { name: "min_p", type: "number", min: 0, max: 1 },
  { name: "seed", type: "int", min: -Number.MAX_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER },
  { name: "min_tokens", type: "int", min: 0 },
  { name: "repetition_penalty", type: "number", min: 0, max: 100, above: true },
  { name: "presence_penalty", type: "number", min: -2, max: 2 },
  { name: "frequency_penalty", type: "number", min: -2, max: 2 },
  { name: "no_repeat_ngram_size", type: "int", min: 0 },
  { name: "num_draft_tokens", type: "int", min: 0 },
  { name: "top_p_decay", type: "number", min: 0, max: 1, above: true },
  { name: "top_p_min", type: "number", min: 0, max: 1, above: true },
  { name: "top_p_reset_ids", type: "int", min: -1 },
  { name: "priority", type: "int", min: -2147483647, max: 2147483647 },
  { name: "timeout_seconds", type: "number", min: 0, above: true },
  { name: "load_lora_weights", type: "choice", choices: ["auto", "always", "never"] },
  { name: "ignore_eos", type: "flag" },
  { name: "skip_special_tokens", type: "flag" },
  { name: "add_special_tokens", type: "flag" },
  { name: "include_stop_str_in_output", type: "flag" },
  { name: "stop", type: "texts" },
  { name: "bad_words", type: "texts" },
  { name: "stop_token_ids", type: "ids" },
  { name: "allowed_token_ids", type: "ids" },
  { name: "logit_bias", type: "object" },
];

export const CHAT_FIELDS = [
  { name: "tools", type: "list" },
  { name: "tool_choice", type: "choice", choices: ["auto", "required", "none"] },
  { name: "parallel_tool_calls", type: "flag" },
  { name: "chat_template_kwargs", type: "object" },
];

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
    case "list":
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
  return [low, high].filter(Boolean).join(", ");
}

/** @param {string} text @param {"object" | "list"} kind */
export function jsonOf(text, kind) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(error.message);
  }
  const isRight = kind === "list" ? Array.isArray(value) : value?.constructor === Object;
  if (!isRight) throw new Error(t(kind === "list" ? "playground.notList" : "playground.notObject"));
  return value;
}

/**
 * @param {{fields: Field[], values: Record<string, string>, errors: Map<string, string>,
 *   onInput: (name: string, text: string) => void}} props
 */
export function Options({ fields, values, errors, onInput }) {
  return html`<div class="options">
    ${fields.map((field) => {
      const error = errors.get(field.name);
      return html`<label key=${field.name} class=${isLong(field) ? "long" : ""}>
        <code>${field.name}</code>
        <${Control}
          field=${field}
          value=${values[field.name] ?? ""}
          isBad=${Boolean(error)}
          onInput=${(event) => onInput(field.name, event.target.value)}
        />
        ${error && html`<span class="bad" role="alert">${error}</span>`}
      </label>`;
    })}
  </div>`;
}

const isLong = ({ type }) => ["texts", "object", "list"].includes(type);

function Control({ field, value, isBad, onInput }) {
  const shared = { value, onInput, "aria-invalid": isBad ? "true" : null };
  if (field.type === "flag" || field.type === "choice") {
    const choices = field.choices ?? ["true", "false"];
    return html`<select ...${shared}>
      ${["", ...choices].map((choice) => html`<option key=${choice} value=${choice}>${choice || "–"}</option>`)}
    </select>`;
  }
  if (isLong(field)) {
    const hint = { texts: t("playground.eachLine"), object: "{}", list: "[]" }[field.type];
    return html`<textarea rows="2" spellcheck="false" placeholder=${hint} ...${shared} />`;
  }
  const hint = field.type === "ids" ? "1, 2" : limitsOf(field);
  return html`<input inputmode=${field.type === "ids" ? "text" : "decimal"} placeholder=${hint} ...${shared} />`;
}
