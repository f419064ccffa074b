// What was sent, as a command or program that sends the same. The key is never in it.
import { hasKey } from "../../lib/api.js";

/** Fields that are arguments of openai's own methods; the others go into extra_body. */
const OPENAI = [
  ...["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stop"],
  ...["presence_penalty", "frequency_penalty", "logit_bias", "tools", "tool_choice", "parallel_tool_calls"],
];
/** Tensor of the model `ensemble`, its type and its NumPy type, by field. */
const TENSORS = new Map([
  ["max_tokens", ["max_tokens", "INT32", "int32"]],
  ["temperature", ["temperature", "FP32", "float32"]],
  ["top_p", ["top_p", "FP32", "float32"]],
  ["top_k", ["top_k", "INT32", "int32"]],
  ["min_tokens", ["min_tokens", "INT32", "int32"]],
  ["repetition_penalty", ["repetition_penalty", "FP32", "float32"]],
  ["presence_penalty", ["presence_penalty", "FP32", "float32"]],
  ["frequency_penalty", ["frequency_penalty", "FP32", "float32"]],
  ["seed", ["seed", "UINT64", "uint64"]],
  ["no_repeat_ngram_size", ["no_repeat_ngram_size", "INT32", "int32"]],
  ["num_draft_tokens", ["num_draft_tokens", "INT32", "int32"]],
  ["top_p_decay", ["top_p_decay", "FP32", "float32"]],
  ["top_p_min", ["top_p_min", "FP32", "float32"]],
  ["stop", ["stop_words", "BYTES", "object_"]],
  ["bad_words", ["bad_words", "BYTES", "object_"]],
]);
/** What compare adds, and a program that prints texts has no use for. */
const OWN = ["stream", "logprobs", "adapters"];
const DEFAULT_MAX_TOKENS = 16;

/** @param {Record<string, any>} body */
export function curl(body) {
  const quoted = JSON.stringify(body).replaceAll("'", `'\\''`);
  const key = hasKey() ? ` \\\n  -H "Authorization: Bearer $LORAPLEX_API_KEY"` : "";
  return `curl -sN ${location.origin}/v1/compare${key} \\
  -H 'Content-Type: application/json' \\
  -d '${quoted}'
`;
}

/** @param {Record<string, any>} body @param {string} model the base, if the body names none */
export function openai(body, model) {
  const sent = rest({ model, temperature: 0, ...maxTokens(body), ...body });
  const own = sent.filter(([name]) => OPENAI.includes(name));
  const extra = sent.filter(([name]) => !OPENAI.includes(name));
  const extras = extra.map(([name, value]) => `, ${py(name)}: ${py(value)}`).join("");
  const isChat = "messages" in body;
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${py(`${location.origin}/v1`)}, api_key=os.environ.get("LORAPLEX_API_KEY", "none"))
for adapters in ${py(lists(body))}:
    response = client.${isChat ? "chat." : ""}completions.create(
${own.map(([name, value]) => `        ${name}=${py(value)},\n`).join("")}        extra_body={"adapters": adapters${extras}},
    )
    print(${isChat ? "response.choices[0].message.content" : "response.choices[0].text"})
`;
}

/** For prompts only: KServe has no chats. @param {Record<string, any>} body */
export function triton(body) {
  const { prompt, model, ...options } = { ...maxTokens(body), ...body };
  const isGreedy = !options.temperature;
  const sent = rest(isGreedy ? { ...options, temperature: undefined, top_k: 1 } : options);
  const known = sent.filter(([name]) => TENSORS.has(name));
  const missing = sent.filter(([name]) => !TENSORS.has(name)).map(([name]) => name);
  const inputs = known.map(([name, value]) => {
    const [tensor, type, dtype] = TENSORS.get(name);
    return `        tensor(${py(tensor)}, ${py([value].flat())}, ${py(type)}, np.${dtype}),\n`;
  });
  const note = missing.length ? `# Not available over KServe: ${missing.join(", ")}.\n` : "";
  const headers = hasKey()
    ? `, headers={"Authorization": "Bearer " + os.environ["LORAPLEX_API_KEY"]}`
    : "";
  return `${note}import json
${hasKey() ? "import os\n" : ""}
import numpy as np
import tritonclient.http as triton


def tensor(name, values, data_type, dtype):
    if data_type == "BYTES":
        values = [value.encode() for value in values]
    data = np.array([values], dtype=dtype)
    found = triton.InferInput(name, list(data.shape), data_type)
    found.set_data_from_numpy(data)
    return found


client = triton.InferenceServerClient(${py(location.host)}${location.protocol === "https:" ? ", ssl=True" : ""})
for adapters in ${py(lists(body))}:
    inputs = [
        tensor("text_input", ${py([prompt])}, "BYTES", np.object_),
        tensor("exclude_input_in_output", [True], "BOOL", np.bool_),
${inputs.join("")}    ]
    parameters = {"adapters": json.dumps(adapters)} if adapters else {}
    result = client.infer("ensemble", inputs, parameters=parameters${headers})
    print(result.as_numpy("text_output").flatten()[0].decode())
`;
}

const maxTokens = (body) => ("max_tokens" in body ? {} : { max_tokens: DEFAULT_MAX_TOKENS });

const rest = (fields) =>
  Object.entries(fields).filter(([name, value]) => value !== undefined && !OWN.includes(name));

/** A list of adapters for each output; empty: the base. */
const lists = (body) => body.adapters.map((entry) => (entry === null ? [] : [entry].flat()));

/** A value as Python writes it. Strings of JSON are strings of Python. @returns {string} */
function py(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(py).join(", ")}]`;
  if (typeof value === "object")
    return `{${Object.entries(value).map(([name, each]) => `${py(name)}: ${py(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}
