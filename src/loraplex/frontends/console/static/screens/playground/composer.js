// The field at the foot, the row over the replies, and the code of what is sent.
import { hasKey, post } from "../../lib/api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../../lib/html.js";
import { count, t } from "../../lib/texts.js";
import { Copy, Dialog, Icon, Popover } from "../../parts/basics.js";
import { Export, Import, presets, setPresets, titleOf } from "./chats.js";
import { changedFields, CHAT_FIELDS, defaultText, FIELDS, entryOf, formOf, GROUPS, jsonOf, labelOf, START, STRUCTURES } from "./setup.js";

/**
 * @param {{field: {current: HTMLTextAreaElement | null}, setup: import("./setup.js").Setup, text: string,
 *   name: string, hasChat: boolean, isRunning: boolean, isEditing: boolean, error: string | undefined,
 *   isBad: boolean, open: string, numChanged: number | null, onText: (text: string) => void,
 *   onKind: (kind: string) => void, onSend: () => void, onStop: () => void, onEdit: () => void,
 *   onOpen: (panel: string) => void}} props field: the text area; name: who is asked; isBad: a
 *   field of the request cannot be sent; open: the panel that is seen; numChanged: parameters, where
 *   the button for them is here
 */
export function Composer(props) {
  const { field, setup, text, name, hasChat, isRunning, isEditing, error, isBad, open, numChanged, onText, onKind, onSend, onStop, onEdit, onOpen } = props;
  const isChat = setup.kind === "chat";
  useLayoutEffect(() => {
    field.current.style.blockSize = "auto";
    field.current.style.blockSize = `${field.current.scrollHeight + 2}px`;
  }, [text]);
  const onKeyDown = (event) => {
    // An input method takes Enter for itself.
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      onSend();
    } else if (event.key === "ArrowUp" && !text) {
      event.preventDefault();
      onEdit();
    }
  };
  const { structured, tools } = setup;
  return html`<form class="composer" onSubmit=${(event) => { event.preventDefault(); if (isRunning) onStop(); else onSend(); }}>
    ${isEditing && html`<p class="second label">${t("playground.editing")}</p>`}
    ${error && html`<p class="bad label" role="alert">${error}</p>`}
    <div class="composer-field">
      <textarea ref=${field} rows="1" dir="auto" value=${text} aria-label=${t(isChat ? "playground.message" : "playground.prompt")}
        placeholder=${t(isChat ? "playground.messageTo" : "playground.promptTo", { name })} aria-invalid=${error ? "true" : null}
        onInput=${(event) => onText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
      <button class="primary only-icon" aria-label=${t(isRunning ? "playground.stop" : "playground.send")} title=${isRunning ? `${t("playground.stop")} (Esc)` : `${t("playground.send")} (Enter)`}
        disabled=${!isRunning && (!text.trim() || isBad)}><${Icon} name=${isRunning ? "stop" : "send"} /></button>
    </div>
    <div class="row composer-row">
      <select class="small" aria-label=${t("playground.kind")} value=${setup.kind} onChange=${(event) => onKind(event.target.value)}>
        <option value="chat" disabled=${!hasChat} title=${hasChat ? null : t("playground.noTemplate")}>${t("playground.chat")}</option>
        <option value="completion">${t("playground.completion")}</option>
      </select>
      ${numChanged !== null && html`<${Opener} name="parameters" icon=${html`<${Icon} name="sliders" />`} value=${numChanged || ""} open=${open} onOpen=${onOpen} />`}
      <${Opener} name="structure" icon="{ }" value=${structured.kind === "none" ? "" : t(`playground.structure_${structured.kind}`)} open=${open} onOpen=${onOpen} />
      ${isChat && html`<${Opener} name="tools" icon="ƒ" value=${tools.list.length || ""} open=${open} onOpen=${onOpen} />`}
      ${!hasChat && html`<span class="second label">${t("playground.noTemplate")}</span>`}
    </div>
  </form>`;
}

/** A button for a panel, with what is set in it. */
function Opener({ name, icon, value, open, onOpen }) {
  return html`<button type="button" class="small quiet" aria-expanded=${open === name ? "true" : "false"} aria-label=${`${t(`playground.${name}`)} ${value}`.trim()}
    title=${t(`playground.${name}`)} onClick=${() => onOpen(open === name ? "" : name)}><span aria-hidden="true">${icon} ${value}</span></button>`;
}

const VIEWS = ["rendered", "text", "diff"];
const MAX_SYSTEM = 40;

/**
 * @param {{setup: import("./setup.js").Setup, change: (news: object) => void, chat: {turns: object[]},
 *   view: string, reference: number | null, numChanged: number, panel: string, isPhone: boolean,
 *   onView: (view: string) => void, onReference: (key: number) => void, onPanel: (name: string) => void}} props
 */
export function Toolbar(props) {
  const { setup, chat, numChanged, panel, isPhone, onPanel } = props;
  const toggle = (name) => onPanel(panel === name ? "" : name);
  const chatsButton = (close) => html`<button class="quiet" onClick=${() => { close(); onPanel("chats"); }}>☰ ${t("playground.chats")}</button>`;
  const code = (close) => html`<button class="quiet" onClick=${() => { close(); onPanel("vectors"); }}>∠ ${t("playground.vectors")}</button>
    <button class="quiet" onClick=${() => { close(); onPanel("code"); }}>⟨/⟩ ${t("playground.code")}</button>`;
  if (isPhone)
    return html`<${Popover} kind="quiet only-icon" card="menu" label=${t("playground.menu")} face="☰">
      ${(close) => html`${chatsButton(close)}<${System} ...${props} /><${View} ...${props} />${code(close)}`}<//>`;
  const nothing = () => {};
  return html`<div class="toolbar">
    ${chatsButton(nothing)}
    <span class="chat-title">${titleOf(chat)}</span>
    ${setup.kind === "chat" && html`<${Popover} kind="quiet system" card="system-card"
      face=${html`${t("playground.system")}: <span class="second">${shortOf(setup.system) || t("playground.none")}</span> <${Icon} name="chevron" />`}>
      ${() => html`<${System} ...${props} />`}<//>`}
    <div class="toolbar-end">
      <${View} ...${props} />
      ${code(nothing)}
      <button aria-expanded=${panel === "parameters" ? "true" : "false"} title=${numChanged ? t("playground.changed", { n: numChanged }) : null} onClick=${() => toggle("parameters")}
        ><${Icon} name="sliders" /> ${t("playground.parameters")}${numChanged > 0 && ` · ${numChanged}`}</button>
    </div>
  </div>`;
}

const shortOf = (text) => (text.length > MAX_SYSTEM ? `${text.slice(0, MAX_SYSTEM)}…` : text);

function System({ setup, change }) {
  if (setup.kind !== "chat") return null;
  return html`<label>${t("playground.system")}
    <textarea rows="5" dir="auto" value=${setup.system} onInput=${(event) => change({ system: event.target.value })}></textarea></label>`;
}

function View({ setup, view, reference, onView, onReference }) {
  return html`<div class="view"><div class="segments" role="group" aria-label=${t("playground.view")}>
      ${VIEWS.map((name) => html`<button class="small" key=${name} aria-pressed=${name === view ? "true" : "false"} onClick=${() => onView(name)}>${t(`playground.view_${name}`)}</button>`)}
    </div>
    ${view === "diff" && html`<select class="small" aria-label=${t("playground.against")} value=${reference ?? ""} onChange=${(event) => onReference(Number(event.target.value))}>
      ${setup.columns.map(({ key, parts }) => html`<option key=${key} value=${key}>${labelOf(parts)}</option>`)}
    </select>`}</div>`;
}

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
const OWN = ["stream", "logprobs", "adapters", "entries"];
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
  const isChat = "messages" in body || body.entries?.[0].messages;
  const [loop, input] = body.entries
    ? [`adapters, ${isChat ? "messages" : "prompt"} in ${py(body.entries.map((entry) => [listOf(entry.adapters), entry.messages ?? entry.prompt]))}`,
       isChat ? "        messages=messages,\n" : "        prompt=prompt,\n"]
    : [`adapters in ${py(lists(body))}`, ""];
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${py(`${location.origin}/v1`)}, api_key=os.environ.get("LORAPLEX_API_KEY", "none"))
for ${loop}:
    response = client.${isChat ? "chat." : ""}completions.create(
${input}${own.map(([name, value]) => `        ${name}=${py(value)},\n`).join("")}        extra_body={"adapters": adapters${extras}},
    )
    print(${isChat ? "response.choices[0].message.content" : "response.choices[0].text"})
`;
}

/** For prompts only: KServe has no chats. @param {Record<string, any>} body */
function triton(body) {
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
const lists = (body) => body.adapters.map(listOf);
const listOf = (entry) => (entry === null ? [] : [entry].flat());

/** A value as Python writes it. Strings of JSON are strings of Python. @returns {string} */
function py(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(py).join(", ")}]`;
  if (typeof value === "object")
    return `{${Object.entries(value).map(([name, each]) => `${py(name)}: ${py(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/**
 * The program of each client, to look at and to copy.
 * @param {{body: Record<string, any>, model: string, hasTriton: boolean, onClose: () => void}} props
 *   hasTriton: a prompt for the only model of the server
 */
export function Code({ body, model, hasTriton, onClose }) {
  const [chosen, setChosen] = useState("curl");
  const programs = new Map([["curl", curl], ["openai", (of) => openai(of, model)], ...(hasTriton ? [["tritonclient", triton]] : [])]);
  const code = programs.get(chosen)(body);
  return html`<${Dialog} title=${t("playground.code")} kind="wide-dialog" hasClose onClose=${onClose}>
    <div class="stack">
      <div class="row"><div class="segments" role="group" aria-label=${t("playground.client")}>
          ${[...programs.keys()].map((name) => html`<button class="small" key=${name} aria-pressed=${name === chosen ? "true" : "false"} onClick=${() => setChosen(name)}>${name}</button>`)}
        </div><div class="row end"><${Copy} key=${chosen} label=${t("shell.copy")} text=${() => code} /></div></div>
      <pre class="code" tabindex="0">${code}</pre>
      <p class="second label">${t("playground.codeHelp")}</p>
    </div>
  <//>`;
}

const DIGITS = { minimumFractionDigits: 3, maximumFractionDigits: 3 };

/**
 * Cosines of one text's vectors between the columns, and its labels in each that has a head.
 * @param {{columns: import("./setup.js").Column[], model: string, text: string, onClose: () => void}} props
 */
export function Vectors({ columns, model, text: first, onClose }) {
  const [text, setText] = useState(first);
  const [rows, setRows] = useState([]);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  const ask = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      setRows(await Promise.all(columns.map(async ({ key, parts }) => {
        const body = { model, adapters: [entryOf(parts)].flat().filter(Boolean) };
        const [{ data: [{ embedding }] }, labels] = await Promise.all([
          post("/v1/embeddings", { ...body, input: text, normalize: true }),
          // Without a head there are no labels.
          post("/predict", { ...body, inputs: text }).catch((failure) => (failure.code === "unsupported_feature" ? null : Promise.reject(failure))),
        ]);
        return { key, name: labelOf(parts), embedding, labels };
      })));
      setError("");
    } catch (failure) {
      setError(failure.message);
    }
    setBusy(false);
  };
  return html`<${Dialog} title=${t("playground.vectors")} kind="wide-dialog" hasClose onClose=${onClose}>
    <form class="stack" onSubmit=${ask}>
      <textarea rows="3" dir="auto" aria-label=${t("playground.prompt")} value=${text} onInput=${(event) => setText(event.target.value)} />
      <div class="row end"><button class="primary" disabled=${isBusy || !text.trim()}>${t("playground.compute")}</button></div>
      ${error && html`<p class="bad" role="alert">${error}</p>`}
      ${rows.length > 0 && html`<table><caption>${t("playground.cosine")}</caption>
        <thead><tr><td></td>${rows.map(({ key, name }) => html`<th key=${key} scope="col">${name}</th>`)}</tr></thead>
        <tbody>${rows.map((row) => html`<tr key=${row.key}><th scope="row">${row.name}</th>
          ${rows.map((other) => html`<td key=${other.key} class="number">${count(row.embedding.reduce((sum, value, i) => sum + value * other.embedding[i], 0), DIGITS)}</td>`)}</tr>`)}</tbody></table>`}
      ${rows.map(({ key, name, labels }) => labels && html`<table key=${key}><caption>${name}</caption>
        <tbody>${labels.map(({ label, score }) => html`<tr key=${label}><th scope="row">${label}</th>
          <td><meter value=${score} aria-label=${label} /></td><td class="number">${count(score, DIGITS)}</td></tr>`)}</tbody></table>`)}
    </form>
  <//>`;
}

// What is beside the replies on a wide page, and a sheet from below on a narrow one: parameters,
// presets, structured output and tools.

/** @param {{title: string, isWide: boolean, onClose: () => void, children: unknown}} props */
export function Panel({ title, isWide, onClose, children }) {
  if (!isWide) return html`<${Dialog} title=${title} kind="sheet" onClose=${onClose} hasClose>${children}<//>`;
  return html`<section class="panel" aria-label=${title}>
    <div class="row"><h2>${title}</h2>
      <div class="row end"><button class="quiet only-icon small" aria-label=${t("shell.close")} title=${t("shell.close")} onClick=${onClose}><${Icon} name="close" /></button></div></div>
    ${children}
  </section>`;
}

/**
 * @param {{setup: import("./setup.js").Setup, change: (news: object) => void, errors: Map<string, string>,
 *   refused: string, defaults: Record<string, unknown>}} props refused: the field that gets the focus
 */
export function Parameters({ setup, change, errors, refused, defaults }) {
  const [search, setSearch] = useState("");
  const [opened, setOpened] = useState(() => new Set());
  const { options } = setup;
  const set = (name, text) => change({ options: { ...options, [name]: text } });
  const wanted = search.trim().toLowerCase();
  const fields = [...FIELDS, ...(setup.kind === "chat" ? CHAT_FIELDS : [])];
  const found = fields.filter(({ name }) => !wanted || `${name} ${t(`fields.${name}`)} ${t(`fields.${name}_help`)}`.toLowerCase().includes(wanted));
  const changed = new Set(changedFields(setup));
  const rows = (list) => list.map((field) => html`<${Row} key=${field.name} field=${field} value=${options[field.name] ?? ""} error=${errors.get(field.name)}
    isRefused=${refused === field.name} isChanged=${changed.has(field.name)} defaults=${defaults} onInput=${(text) => set(field.name, text)} />`);
  return html`<div class="parameters">
    <div class="row"><${Presets} setup=${setup} change=${change} />
      <button class="small" disabled=${!changed.size} onClick=${() => change({ options: { ...START } })}>${t("playground.reset")}</button></div>
    <input type="search" aria-label=${t("playground.findField")} placeholder=${t("playground.findField")} value=${search}
      onInput=${(event) => setSearch(event.target.value)} />
    ${rows(found.filter(({ group }) => !group))}
    ${GROUPS.map((group) => {
      const members = found.filter((field) => field.group === group);
      if (!members.length) return null;
      const numChanged = members.filter(({ name }) => changed.has(name)).length;
      const isOpen = Boolean(wanted) || opened.has(group) || members.some(({ name }) => errors.has(name));
      return html`<details key=${group} open=${isOpen} onToggle=${(event) => {
        if (event.target.open !== opened.has(group)) setOpened(event.target.open ? new Set([...opened, group]) : new Set([...opened].filter((each) => each !== group)));
      }}>
        <summary>${t(`playground.group_${group}`)} (${members.length})${numChanged > 0 && html` <span class="second label">${t("playground.changed", { n: numChanged })}</span>`}</summary>
        ${isOpen && rows(members)}
      </details>`;
    })}
  </div>`;
}

function Row({ field, value, error, isRefused, isChanged, defaults, onInput }) {
  const box = useRef(null);
  const { name } = field;
  const help = t(`fields.${name}_help`);
  useEffect(() => {
    if (!isRefused || !error) return;
    const control = box.current.querySelector("input:not([type=range]), select, textarea");
    control.focus();
    control.scrollIntoView({ block: "nearest" });
  }, [isRefused, error]);
  return html`<div class="field" ref=${box}>
    <div class="field-head"><label for=${`field-${name}`}>${t(`fields.${name}`)}</label> <code class="second">${name}</code>
      ${isChanged && html`<button class="quiet only-icon small undo" aria-label=${t("playground.undo", { name: t(`fields.${name}`) })}
        title=${t("playground.undo", { name: t(`fields.${name}`) })} onClick=${() => onInput(START[name] ?? "")}>↺</button>`}</div>
    <${Control} field=${field} value=${value} isBad=${Boolean(error)} hint=${defaultText(field, defaults)} onInput=${(event) => onInput(event.target.value)} />
    ${error ? html`<p class="bad label" role="alert" id=${`error-${name}`}>${error}</p>` : html`<p class="second label">${value && field.type !== "flag" ? t("playground.defaultIs", { value: defaultText(field, defaults) }) : ""} ${help}</p>`}
  </div>`;
}

function Control({ field, value, isBad, hint, onInput }) {
  const { name, type, slide } = field;
  const shared = { id: `field-${name}`, value, onInput, "aria-invalid": isBad ? "true" : null, "aria-describedby": isBad ? `error-${name}` : null };
  if (type === "flag" || type === "choice") {
    const choices = field.choices ?? ["true", "false"];
    const word = { "": t("playground.default", { value: hint }), true: t("playground.on"), false: t("playground.off") };
    return html`<select ...${shared}>
      ${["", ...choices].map((choice) => html`<option key=${choice} value=${choice}>${word[choice] ?? choice}</option>`)}
    </select>`;
  }
  if (type === "texts" || type === "object") {
    return html`<textarea rows="2" spellcheck="false" placeholder=${type === "object" ? "{}" : t("playground.eachLine")} ...${shared} />`;
  }
  const input = html`<input inputmode=${type === "ids" ? "text" : "decimal"} placeholder=${hint} autocomplete="off" ...${shared} />`;
  if (!slide) return input;
  const [min, max, step] = slide;
  return html`<div class="slide"><input type="range" min=${min} max=${max} step=${step} value=${value === "" ? (Number(hint) || 0) : value} aria-label=${t(`fields.${name}`)} onInput=${onInput} />${input}</div>`;
}

/** @param {{setup: import("./setup.js").Setup, change: (news: object) => void}} props */
function Presets({ setup, change }) {
  const [list, setList] = useState(presets);
  const [chosen, setChosen] = useState("");
  const [name, setName] = useState("");
  const [error, setError] = useState("");
  const store = (next) => {
    setPresets(next);
    setList(next);
  };
  const take = (title) => {
    const preset = list.find((each) => each.name === title);
    setChosen(title);
    if (preset) change(partsOf(preset));
  };
  const save = () => {
    const title = name.trim();
    if (!title) return;
    store([...list.filter((each) => each.name !== title), { name: title, ...partsOf(setup) }]);
    setChosen(title);
    setName("");
  };
  const load = async (event) => {
    try {
      const added = JSON.parse(await event.target.files[0].text());
      if (!added.every((each) => each.name && each.options && each.structured && each.tools)) throw new Error(t("playground.notPresets"));
      const names = new Set(added.map((each) => each.name));
      store([...list.filter((each) => !names.has(each.name)), ...added]);
      setError("");
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<label class="row preset">${t("playground.preset")}
      <select class="small" aria-label=${t("playground.preset")} value=${chosen} onChange=${(event) => take(event.target.value)}>
        <option value="">${t("playground.none")}</option>
        ${list.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
      </select></label>
    <${Popover} kind="small" card="stack preset-card" face=${t("playground.save")}>
      ${(close) => html`<form class="row" onSubmit=${(event) => { event.preventDefault(); save(); close(); }}>
          <input aria-label=${t("playground.presetName")} placeholder=${t("playground.presetName")} value=${name} onInput=${(event) => setName(event.target.value)} />
          <button disabled=${!name.trim()}>${t("playground.save")}</button></form>
        <p class="second label">${t("playground.presetKept")}</p>
        <div class="row"><${Export} label=${t("playground.exportChats")} name="loraplex-presets.json" of=${list} />
          <${Import} label=${t("playground.importChats")} onFile=${load} />
          <button class="small danger" disabled=${!chosen} onClick=${() => { store(list.filter((each) => each.name !== chosen)); setChosen(""); }}>${t("playground.removePreset")}</button></div>
        ${error && html`<p class="bad" role="alert">${error}</p>`}`}
    <//>`;
}

const partsOf = ({ options, system, structured, tools }) => ({ options, system, structured, tools });

const SCHEMA = { type: "object", properties: { city: { type: "string" }, population: { type: "integer" } }, required: ["city"], additionalProperties: false };
const EXAMPLES = new Map([
  ["json", JSON.stringify(SCHEMA, null, 2)],
  ["regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}"],
  ["choice", "yes\nno"],
  ["grammar", 'root ::= "yes" | "no"'],
]);
const TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
  },
};

/** @param {{structured: import("./setup.js").Setup["structured"], error: string | undefined, onChange: (structured: object) => void}} props */
export function Structure({ structured, error, onChange }) {
  const { kind, text } = structured;
  const hasText = kind !== "none" && kind !== "json_object";
  const wrong = error ?? wrongOf(kind, text);
  return html`<div class="stack">
    <label>${t("playground.form")}
      <select value=${kind} onChange=${(event) => onChange({ kind: event.target.value, text })}>
        ${STRUCTURES.map((name) => html`<option key=${name} value=${name}>${t(`playground.structure_${name}`)}</option>`)}
      </select></label>
    ${hasText && html`<label>${t(`playground.text_${kind}`)}
      <textarea rows="10" spellcheck="false" class="code" value=${text} aria-invalid=${wrong ? "true" : null}
        onInput=${(event) => onChange({ kind, text: event.target.value })} /></label>
      <div class="row">
        ${wrong ? html`<span class="bad" role="alert">✗ ${wrong}</span>` : html`<span class="good">✓ ${t("playground.valid")}</span>`}
        <button class="small" onClick=${() => onChange({ kind, text: EXAMPLES.get(kind) })}>${t("playground.example")}</button>
        ${kind === "json" && html`<button class="small" disabled=${Boolean(wrong)} onClick=${() => onChange({ kind, text: JSON.stringify(JSON.parse(text), null, 2) })}>${t("playground.format")}</button>`}
      </div>`}
    <p class="second label">${t("playground.structureHelp")}</p>
  </div>`;
}

/** What is known to be wrong before it is sent; empty: nothing. */
function wrongOf(kind, text) {
  if (kind === "none" || kind === "json_object") return "";
  if (!text.trim()) return t("playground.empty");
  try {
    formOf(kind, text);
    return "";
  } catch (error) {
    return error.message;
  }
}

/** @param {{tools: import("./setup.js").Setup["tools"], onChange: (tools: object) => void}} props */
export function Tools({ tools, onChange }) {
  const { list, choice, parallel } = tools;
  const [editing, setEditing] = useState(null);
  const set = (news) => onChange({ ...tools, ...news });
  const names = list.map((tool) => tool.function.name);
  return html`<div class="stack">
    <label>${t("playground.toolChoice")}
      <select value=${choice} onChange=${(event) => set({ choice: event.target.value })}>
        <option value="">${t("playground.default", { value: "auto" })}</option>
        ${["auto", "required", "none", ...names].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select></label>
    <ul class="picks">${list.map((tool, i) => html`<li class="row" key=${i}>
      <code>${tool.function.name}(${Object.keys(tool.function.parameters?.properties ?? {}).join(", ")})</code>
      <span class="row end">
        <button class="quiet small" aria-label=${t("playground.editTool", { name: names[i] })} onClick=${() => setEditing({ index: i, text: JSON.stringify(tool, null, 2) })}>✎</button>
        <button class="quiet small" aria-label=${t("playground.dropTool", { name: names[i] })} onClick=${() => set({ list: list.toSpliced(i, 1) })}>×</button>
      </span></li>`)}</ul>
    ${editing
      ? html`<${Editor} text=${editing.text} onCancel=${() => setEditing(null)} onSave=${(added) => {
          set({ list: list.toSpliced(editing.index, 1, ...added) });
          setEditing(null);
        }} />`
      : html`<div class="row">
          <button class="small" onClick=${() => setEditing({ index: list.length, text: JSON.stringify(TOOL, null, 2) })}>+ ${t("playground.fromExample")}</button>
          <button class="small" onClick=${() => setEditing({ index: list.length, text: "" })}>+ ${t("playground.pasteJson")}</button></div>`}
    <label>${t("playground.parallel")}
      <select value=${parallel} onChange=${(event) => set({ parallel: event.target.value })}>
        <option value="">${t("playground.default", { value: t("playground.on") })}</option>
        <option value="true">${t("playground.on")}</option><option value="false">${t("playground.off")}</option>
      </select></label>
    <p class="second label">${t("playground.toolsHelp")}</p>
  </div>`;
}

/** One tool, or a list of them, as JSON. */
function Editor({ text: before, onSave, onCancel }) {
  const [text, setText] = useState(before);
  const [error, setError] = useState("");
  const save = () => {
    try {
      const value = JSON.parse(text);
      const added = (Array.isArray(value) ? value : [value]).map((tool) => (tool.function ? tool : { type: "function", function: tool }));
      for (const tool of added) jsonOf(JSON.stringify(tool.function), "object");
      if (!added.every((tool) => tool.function.name)) throw new Error(t("playground.noToolName"));
      onSave(added);
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<div class="stack">
    <textarea rows="12" spellcheck="false" class="code" aria-label=${t("playground.toolText")} value=${text} onInput=${(event) => setText(event.target.value)} />
    ${error && html`<p class="bad" role="alert">${error}</p>`}
    <div class="row end"><button class="small" onClick=${onCancel}>${t("shell.cancel")}</button><button class="small primary" onClick=${save}>${t("playground.save")}</button></div>
  </div>`;
}
