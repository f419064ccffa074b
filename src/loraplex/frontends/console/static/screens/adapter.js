// One adapter: what it is and where, how it is used, its versions and its traffic.
import { get, hasKey, mayManage, post, remove, useMe, useModels } from "../lib/api.js";
import { html, useDrop, useEffect, usePoll, useState } from "../lib/html.js";
import { columnsLink, go, linkTo } from "../lib/route.js";
import { bytes, count, moment, t } from "../lib/texts.js";
import { AdapterState, Confirm, Copy, Dialog, Icon, lookAlikes, Mark, Name, Popover, States, Tabs, When } from "../parts/basics.js";
import { Bars, roundUp } from "../parts/chart.js";
import { changes, LoadDialog, otherBase, otherWarnings } from "./adapters/load.js";

const SECONDS = 5;
const ENDS = 8;
const TABS = ["", "use", "versions", "traffic"];

/** @param {{name: string, query: URLSearchParams}} props */
export function Details({ name, query }) {
  const path = `/v1/adapters/${encodeURIComponent(name)}`;
  const adapter = usePoll((signal) => get(path, signal), SECONDS);
  const isGone = adapter.error?.status === 404;
  return html`<div class="adapter">
    <p class="back"><a href=${linkTo("adapters")}>← ${t("adapters.title")}</a></p>
    ${isGone || !adapter.data
      ? html`<h1><${Name} of=${name} /></h1>`
      : null}
    ${isGone
      ? html`<p class="state" role="alert">${t("adapters.unknown")}</p>`
      : html`<${States} of=${adapter}>
          ${(data) => html`<${Whole} data=${data} name=${name} path=${path} query=${query} again=${adapter.again} />`}
        <//>`}
  </div>`;
}

function Whole({ data, name, path, query, again }) {
  const me = useMe();
  const [given, setGiven] = useState(null);
  // Only owners see how many requests run.
  const mayChange = data.num_running !== null && mayManage(me, data.name);
  const tab = TABS.includes(query.get("tab")) ? query.get("tab") : "";
  const set = (changes) => go(linkTo("adapters", name, { tab, ...changes }), { replace: true });
  const isReplacing = mayChange && query.has("replace");
  useDrop(mayChange, () => set({ replace: "1" }), setGiven);
  const close = () => {
    setGiven(null);
    set({});
    again();
  };
  return html`
    <div class="row adapter-head">
      <h1 class="row"><${Mark} digest=${data.digest} /><${Name} of=${name} /> <span class="second">v${data.version}</span></h1>
      <${AdapterState} of=${data} />
      <${Actions} data=${data} path=${path} mayChange=${mayChange} again=${again} onReplace=${() => set({ replace: "1" })} />
    </div>
    <nav class="page-tabs" aria-label=${t("adapters.parts")}>
      ${TABS.map((one) => html`<a key=${one} href=${linkTo("adapters", name, { tab: one })} aria-current=${one === tab ? "page" : null}>
        ${t(`adapters.tab_${one || "overview"}`)}${one === "versions" && ` ${data.versions.length}`}</a>`)}
    </nav>
    <${Warnings} data=${data} />
    ${tab === "" && html`<${Overview} data=${data} mayChange=${mayChange} again=${again} /><${Snippets} data=${data} name=${name} />`}
    ${tab === "use" && html`<${Snippets} data=${data} name=${name} isWhole />`}
    ${tab === "versions" && html`<${Versions} data=${data} path=${path} mayChange=${mayChange} again=${again} />`}
    ${tab === "traffic" && html`<${Traffic} data=${data} isOperator=${me.operator} />`}
    ${isReplacing && html`<${LoadDialog} name=${data.name} given=${given} onClose=${close} onLoaded=${again} />`}`;
}

function Warnings({ data }) {
  const base = otherBase(data);
  return html`${base && html`<p class="warning">⚠ ${t("adapters.otherBase", { trained: base, base: data.model })}
      <span class="second">${t("adapters.otherBaseDo")}</span></p>`}
    ${otherWarnings(data).map((warning) => html`<p class="warning" key=${warning}>⚠ <${Name} of=${warning} /></p>`)}`;
}

/** @param {{data: any, mayChange: boolean, again: () => void}} props */
function Overview({ data, mayChange, again }) {
  const { content } = data;
  const declared = otherBase(data);
  return html`<section class="card">
    <h2 class="hidden-text">${t("adapters.facts")}</h2>
    <dl class="adapter-facts">
      <${Fact} label=${t("adapters.base")}><${Name} of=${data.model} />${declared && html` <span class="warn">(${t("adapters.declared")} <${Name} of=${declared} />)</span>`}<//>
      <${Fact} label=${t("adapters.rank")}>${count(data.rank)} · ${t("adapters.modulesLayers", { modules: Object.keys(content.module_layers).length, layers: content.layers.length })}<//>
      <${Fact} label=${t("adapters.where")}>${t(`adapters.${data.residency}`)}, ${t("adapters.pages", { n: content.device_pages })} (${bytes(content.device_bytes)})<//>
      <${Fact} label=${t("adapters.size")}>${bytes(content.host_bytes)} · ${t("adapters.computedIn", { types: content.dtypes.join(", "), own: content.device_dtype })}
        ${(data.notes ?? []).length > 0 && html` <span class="second" title=${data.notes.join("\n")}>ⓘ<span class="hidden-text">${data.notes.join(" ")}</span></span>`}<//>
      ${data.source && html`<${Fact} label=${t("adapters.source")}><${Name} of=${data.source} /><//>`}
      <${Fact} label=${t("adapters.digest")}><code title=${data.digest}>${short(data.digest)}</code> <${Copy} text=${() => data.digest} label=${t("adapters.copy")} /><//>
      ${data.task_id !== null && html`<${Fact} label=${t("adapters.taskId")}>${String(data.task_id)}<//>`}
      ${data.num_running !== null && html`<${Fact} label=${t("adapters.inFlight")}>${count(data.num_running)}<//>`}
      ${data.aliases.length > 0 && html`<${Fact} label=${t("adapters.aliases")}><${Aliases} aliases=${data.aliases} mayChange=${mayChange} again=${again} /><//>`}
    </dl>
    <details><summary>${t("adapters.allApplied", { n: content.num_tensors })}</summary><${Modules} content=${content} /></details>
  </section>`;
}

const short = (digest) => (digest.length > 2 * ENDS ? `${digest.slice(0, ENDS)}…${digest.slice(-ENDS)}` : digest || "–");

function Fact({ label, children }) {
  return html`<div><dt>${label}</dt><dd>${children}</dd></div>`;
}

function Aliases({ aliases, mayChange, again }) {
  const [gone, setGone] = useState(null);
  const { error, run } = useAction(again);
  return html`${aliases.map((alias) => html`<span class="alias" key=${alias}><${Name} of=${alias} />
      ${mayChange && html`<button class="small quiet" aria-label=${`${t("adapters.removeAlias")}: ${alias}`} title=${t("adapters.removeAlias")}
        onClick=${() => setGone(alias)}>✕</button>`}</span> `)}
    ${error && html`<p class="bad" role="alert">${error.message}</p>`}
    ${gone !== null && html`<${Confirm} title=${t("adapters.removeAlias")} action=${t("adapters.removeAlias")}
      text=${html`<${Name} of=${gone} /><br />${t("adapters.aliasEnds")}`} onClose=${() => setGone(null)}
      onConfirm=${() => run(() => remove(`/v1/adapters/${encodeURIComponent(gone)}`))} />`}`;
}

function Modules({ content }) {
  const names = Object.keys(content.module_layers).sort();
  return html`<table>
    <thead><tr><th>${t("adapters.module")}</th><th class="number">${t("adapters.rank")}</th><th>${t("adapters.layers")}</th></tr></thead>
    <tbody>${names.map((name) => html`<tr key=${name}>
      <td><code>${name}</code></td><td class="number">${ranks(content.ranks[name])}</td><td>${ranges(content.module_layers[name])}</td>
    </tr>`)}</tbody>
  </table>`;
}

function ranks(pair) {
  if (!pair) return "–";
  return pair[0] === pair[1] ? count(pair[0]) : `${count(pair[0])}–${count(pair[1])}`;
}

/** Numbers in order as ranges: 0–3, 7. Those outside the layers have the number -1. */
export function ranges(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found.at(-1);
    if (last && number >= 0 && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found
    .map(([from, to]) => (from < 0 ? t("adapters.outside") : from === to ? `${from}` : `${from}–${to}`))
    .join(", ");
}

// What can be done with an adapter, and what it ends.

/** Runs one change at a time, and shows why it was refused. */
function useAction(again) {
  const [state, setState] = useState({ isBusy: false, error: null });
  const run = async (work, then = again) => {
    setState({ isBusy: true, error: null });
    try {
      await work();
      setState({ isBusy: false, error: null });
      then();
    } catch (error) {
      setState({ isBusy: false, error });
    }
  };
  return { ...state, run };
}

/** @param {{data: any, path: string, mayChange: boolean, again: () => void, onReplace: () => void}} props */
export function Actions({ data, path, mayChange, again, onReplace }) {
  const [open, setOpen] = useState("");
  const { isBusy, error, run } = useAction(again);
  const close = () => setOpen("");
  const isPinned = data.versions[0].pinned;
  const previous = data.versions[1]?.version;
  const items = (shut) => {
    const choose = (name) => () => {
      shut();
      setOpen(name);
    };
    return html`<button type="button" onClick=${choose("alias")}>${t("adapters.addAlias")}</button>
      ${previous !== undefined && html`<button type="button" onClick=${choose("rollback")}>${t("adapters.rollback")}</button>`}
      <button type="button" class="danger" onClick=${choose("unload")}>${t("adapters.unload")}</button>`;
  };
  return html`<div class="row end">
      <button onClick=${() => go(columnsLink([null, data.name]))}>${t("adapters.compareBase")}</button>
      ${mayChange && html`<button onClick=${onReplace}>${t("adapters.replace")}</button>
        <button disabled=${isBusy} onClick=${() => run(() => post(`${path}/pin`, { pinned: !isPinned }))}>
          ${isPinned ? t("adapters.unpin") : t("adapters.pin")}</button>
        <${Popover} kind="only-icon" card="menu" label=${t("adapters.actions")} face=${html`<${Icon} name="more" />`}>${items}<//>`}
    </div>
    ${error && html`<p class="bad" role="alert">${error.message}</p>`}
    ${open === "alias" && html`<${Alias} path=${path} onClose=${close} again=${again} />`}
    ${open === "rollback" && html`<${RollBack} data=${data} path=${path} version=${previous} onClose=${close} run=${run} />`}
    ${open === "unload" && html`<${Unload} data=${data} path=${path} onClose=${close} run=${run} />`}`;
}

/** @param {{data: any, path: string, version: number, onClose: () => void, run: (work: () => Promise<unknown>) => void}} props */
function RollBack({ data, path, version, onClose, run }) {
  const next = data.versions[0].version + 1;
  const text = html`${t("adapters.becomes", { version, next })} ${t("adapters.endsWith", { n: data.num_running, version: data.version })}`;
  return html`<${Confirm} title=${t("adapters.makeCurrent", { version })} action=${t("adapters.makeCurrent", { version })} text=${text}
    onClose=${onClose} onConfirm=${() => run(() => post(`${path}/rollback`, { version }))} />`;
}

function Alias({ path, onClose, again }) {
  const [alias, setAlias] = useState("");
  const { isBusy, error, run } = useAction(again);
  const submit = (event) => {
    event.preventDefault();
    run(() => post(`${path}/alias`, { alias }), () => {
      onClose();
      again();
    });
  };
  return html`<${Dialog} title=${t("adapters.addAlias")} onClose=${onClose}>
    <form class="stack" onSubmit=${submit}>
      <label>${t("adapters.alias")}<br />
        <input required maxlength="256" value=${alias} onInput=${(event) => setAlias(event.target.value)} /></label>
      ${error && html`<p class="bad" role="alert">${error.message}</p>`}
      <div class="row end">
        <button type="button" onClick=${onClose}>${t("shell.cancel")}</button>
        <button class="primary" disabled=${isBusy}>${t("adapters.addAlias")}</button>
      </div>
    </form>
  <//>`;
}

/** Says what ends before anything does. */
function Unload({ data, path, onClose, run }) {
  const [mode, setMode] = useState("drain");
  const unload = () => {
    onClose();
    run(() => remove(`${path}?mode=${mode}`), () => go(linkTo("adapters")));
  };
  const option = (value) => html`<label class="check"><input type="radio" name="mode" checked=${mode === value}
    onChange=${() => setMode(value)} />${t(`adapters.${value}`)}</label>`;
  return html`<${Dialog} title=${t("adapters.unload")} onClose=${onClose}>
    <p><${Name} of=${data.name} /></p>
    <p>${t("adapters.unloadEnds", { versions: data.versions.length, aliases: data.aliases.length })}</p>
    <p>${t("adapters.running", { n: data.num_running })}</p>
    ${option("drain")}${option("immediate")}
    <div class="row end">
      <button onClick=${onClose}>${t("shell.cancel")}</button>
      <button class="danger" onClick=${unload}>${t("adapters.unload")}</button>
    </div>
  <//>`;
}

// How to send a request to an adapter, or serve it elsewhere, as commands and programs. The key is
// never in them.

const UPLOADED = "upload://";
const PROMPT = "The capital of France is";

/** @typedef {{name: string, base: string, isChat: boolean, source: string}} Use source: PATH if it is not known */

/** Programs by their names. @type {Map<string, (use: Use) => string>} */
const SNIPPETS = new Map([
  ["curl", curl],
  ["openai", openai],
  ["tritonclient", triton],
  ["vLLM", ({ name, base, source }) => `vllm serve ${sh(base)} --enable-lora --lora-modules ${sh(`${name}=${source}`)}\n`],
  ["loraplex", ({ name, base, source }) =>
    `loraplex serve ${sh(base)} --adapter ${sh(`${name}=${source}`)}\nloraplex adapters load ${sh(name)} ${sh(source)}\n`],
]);

/** @param {{data: any, name: string, isWhole?: boolean}} props isWhole: all of them, one below another */
function Snippets({ data, name, isWhole = false }) {
  const [kind, setKind] = useState("curl");
  const base = useModels().find(({ id }) => id === data.model);
  const source = data.source && !data.source.startsWith(UPLOADED) ? data.source : "PATH";
  const use = { name, base: base?.root ?? data.model, isChat: base?.capabilities?.chat ?? false, source };
  const names = [...SNIPPETS.keys()];
  return html`<section class="card stack" aria-label=${t("adapters.useIt")}>
    ${isWhole
      ? names.map((one) => html`<${Snippet} key=${one} title=${one} text=${SNIPPETS.get(one)(use)} />`)
      : html`<div class="row"><h2>${t("adapters.useIt")}</h2>
          <${Tabs} label=${t("adapters.useIt")} value=${kind} options=${names.map((one) => [one, one])} onChoice=${setKind} /></div>
        <${Snippet} text=${SNIPPETS.get(kind)(use)} />`}
    ${source === "PATH" && html`<p class="second">${t("adapters.noSource")}</p>`}
  </section>`;
}

function Snippet({ title, text }) {
  return html`<div class="snippet">
    <div class="row">${title && html`<h2>${title}</h2>`}<div class="row end"><${Copy} text=${() => text} label=${t("adapters.copy")} /></div></div>
    <pre>${text}</pre>
  </div>`;
}

const messages = [{ role: "user", content: PROMPT }];
const input = (isChat) => (isChat ? { messages } : { prompt: PROMPT });

/** @param {Use} use */
function curl({ name, isChat }) {
  const body = { model: name, ...input(isChat), max_tokens: 64 };
  const key = hasKey() ? ` \\\n  -H "Authorization: Bearer $LORAPLEX_API_KEY"` : "";
  return `curl ${location.origin}/v1/${isChat ? "chat/" : ""}completions${key} \\
  -H 'Content-Type: application/json' \\
  -d ${sh(JSON.stringify(body))}
`;
}

/** @param {Use} use */
function openai({ name, isChat }) {
  const call = isChat ? "chat.completions" : "completions";
  const given = isChat ? `messages=${JSON.stringify(messages)}` : `prompt=${JSON.stringify(PROMPT)}`;
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=os.environ.get("LORAPLEX_API_KEY", "none"))
response = client.${call}.create(model=${JSON.stringify(name)}, ${given}, max_tokens=64)
print(response.choices[0].${isChat ? "message.content" : "text"})
`;
}

/** @param {Use} use */
function triton({ name }) {
  const headers = hasKey() ? `, headers={"Authorization": "Bearer " + os.environ["LORAPLEX_API_KEY"]}` : "";
  return `import json
${hasKey() ? "import os\n" : ""}
import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient(${JSON.stringify(location.host)}${location.protocol === "https:" ? ", ssl=True" : ""})
text = triton.InferInput("text_input", [1, 1], "BYTES")
text.set_data_from_numpy(np.array([[${JSON.stringify(PROMPT)}.encode()]], dtype=np.object_))
most = triton.InferInput("max_tokens", [1, 1], "INT32")
most.set_data_from_numpy(np.array([[64]], dtype=np.int32))
parameters = {"adapters": json.dumps([${JSON.stringify(name)}])}
result = client.infer("ensemble", [text, most], parameters=parameters${headers})
print(result.as_numpy("text_output").flatten()[0].decode())
`;
}

/** A text as one word of a shell. @param {string} text */
function sh(text) {
  return /^[\w./:=@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

// The requests of an adapter: the last hour by minute, and all since the start.

const TRAFFIC_SECONDS = 5;

/** @param {{data: any, isOperator: boolean}} props */
export function Traffic({ data: { name, model }, isOperator }) {
  const query = `limit=1000&adapter=${encodeURIComponent(name)}${isOperator ? "&tenant=*" : ""}`;
  const use = usePoll(async (signal) => {
    const [{ series }, total] = await Promise.all([
      get(`/v1/usage?series=minute&${query}`, signal),
      get(`/v1/usage?by=adapter&${query}`, signal),
    ]);
    return { series, since: total.since, rows: total.data.filter((row) => row.model === model) };
  }, TRAFFIC_SECONDS, [name]);
  return html`<section class="card stack" aria-label=${t("adapters.tab_traffic")}>
    <${States} of=${use}>
      ${({ series, rows, since }) => html`<${Hour} series=${series} />
        ${rows.length ? html`<${Totals} rows=${rows} isOperator=${isOperator} />` : html`<p>${t("adapters.unused")}</p>`}
        <p class="row"><span class="second">${t("adapters.since", { at: moment(since) })}</span>
          <a href=${linkTo("requests", "", { adapter: name })}>${t("adapters.itsRequests")}</a></p>`}
    <//>
  </section>`;
}

function Hour({ series }) {
  const all = series.reduce((sum, { requests }) => sum + requests, 0);
  const bad = series.reduce((sum, { errors }) => sum + errors, 0);
  const label = t("adapters.lastHour", { requests: all, errors: bad });
  const bars = series.map(({ t: at, requests, errors }) => ({
    key: at,
    all: requests,
    bad: errors,
    title: `${moment(at)}: ${t("adapters.inMinute", { requests, errors })}`,
  }));
  const most = roundUp(Math.max(0, ...bars.map((bar) => bar.all)));
  return html`<h2>${t("adapters.howMuch")}</h2><p class="second">${label}</p>
    <${Bars} label=${label} bars=${bars} most=${most} begin=${series.length ? moment(series[0].t) : ""} end=${t("adapters.now")} />`;
}

function Totals({ rows, isOperator }) {
  return html`<table>
    <thead><tr>
      ${isOperator && html`<th>${t("adapters.tenant")}</th>`}
      <th class="number">${t("adapters.requests")}</th><th class="number">${t("adapters.errors")}</th>
      <th class="number">${t("adapters.tokens")}</th><th class="number">${t("adapters.lastUsed")}</th>
    </tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${`${row.tenant} ${row.owner}`}>
      ${isOperator && html`<td><${Name} of=${row.tenant} /></td>`}
      <td class="number">${count(row.requests)}</td>
      <td class="number"><span class=${row.errors ? "bad" : ""}>${count(row.errors)}</span></td>
      <td class="number">${count(row.prompt_tokens)} → ${count(row.output_tokens)}</td>
      <td class="number"><${When} at=${row.last_used} /></td>
    </tr>`)}</tbody>
  </table>`;
}

// The versions that a name had: which one is in use, and what differs between two of them.

/** @param {{data: any, path: string, mayChange: boolean, again: () => void}} props */
export function Versions({ data, path, mayChange, again }) {
  const { isBusy, error, run } = useAction(again);
  const [picked, setPicked] = useState([]);
  const [restored, setRestored] = useState(null);
  const alike = lookAlikes(data.versions.map(({ digest }) => digest));
  const toggle = (version) =>
    setPicked((old) => (old.includes(version) ? old.filter((one) => one !== version) : [...old, version].slice(-2)));
  const pin = (version, pinned) => run(() => post(`${path}/pin`, { version, pinned }));
  return html`<section class="card stack" aria-label=${t("adapters.tab_versions")}>
    <p class="second">${t("adapters.chooseTwo")}</p>
    ${error && html`<p class="bad" role="alert">${error.message}</p>`}
    <table class="versions"><tbody>
      ${data.versions.map((one, index) => html`<tr key=${one.version}>
        <td><label class="check"><input type="checkbox" checked=${picked.includes(one.version)} onChange=${() => toggle(one.version)} />
          v${one.version} <${Mark} digest=${one.digest} />${alike.has(one.digest) && html`<span class="digest">${one.digest.slice(0, 4)}</span>`}</label></td>
        <td>${index === 0 && html`<span class="good">${t("adapters.present")}</span> `}${moment(one.created)}
          ${one.restored !== null && html` <span class="second">${t("adapters.restored", { n: one.restored })}</span>`}
          ${one.pinned && html` <span class="tag">${t("adapters.pinned")}</span>`}
          ${one.source && html`<br /><span class="second"><${Name} of=${one.source} /></span>`}</td>
        <td class="number">${mayChange && index > 0 && html`<button class="small" disabled=${isBusy}
            onClick=${() => setRestored(one.version)}>${t("adapters.makeCurrent", { version: one.version })}</button>
          <button class="small" disabled=${isBusy} onClick=${() => pin(one.version, !one.pinned)}>
            ${one.pinned ? t("adapters.unpin") : t("adapters.pin")}</button>`}</td>
      </tr>`)}
    </tbody></table>
    ${picked.length === 2 && html`<${Comparison} key=${picked.join()} data=${data} path=${path} versions=${[...picked].sort((a, b) => a - b)} />`}
    ${restored !== null && html`<${RollBack} data=${data} path=${path} version=${restored} run=${run} onClose=${() => setRestored(null)} />`}
  </section>`;
}

function Comparison({ data, path, versions }) {
  const [found, setFound] = useState({ pair: null, error: null });
  useEffect(() => {
    let isCurrent = true;
    const set = (state) => isCurrent && setFound({ pair: null, error: null, ...state });
    Promise.all(versions.map((version) => get(`${path}?version=${version}`))).then((pair) => set({ pair }), (error) => set({ error }));
    return () => {
      isCurrent = false;
    };
  }, []);
  const digests = versions.map((version) => data.versions.find((one) => one.version === version).digest);
  const rows = found.pair ? changes(...found.pair) : [];
  const [before, after] = versions;
  return html`<section class="stack" aria-live="polite">
    <div class="row"><h2>${t("adapters.compareVersions", { before, after })}</h2>
      <button class="small" onClick=${() => go(columnsLink(digests.map((digest) => ({ digest }))))}>${t("adapters.tryBoth")}</button></div>
    ${found.error && html`<p class="bad" role="alert">${found.error.message}</p>`}
    ${found.pair && (rows.length
      ? html`<table class="version-changes">
          <thead><tr><th scope="col">${t("adapters.fact")}</th><th scope="col">v${before}</th><th scope="col">v${after}</th></tr></thead>
          <tbody>${rows.map((row) => html`<tr key=${row.fact}><th scope="row">${t(`adapters.fact_${row.fact}`)}</th>
            <td><${Name} of=${row.before} /></td><td><${Name} of=${row.after} /></td></tr>`)}</tbody>
        </table>`
      : html`<p>${t(digests[0] === digests[1] ? "adapters.sameContent" : "adapters.sameFacts")}</p>`)}
  </section>`;
}
