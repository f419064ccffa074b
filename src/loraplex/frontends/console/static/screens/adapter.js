// One adapter: what it is, where it is, how it is used, and what can be done with it.
import { get, post, remove } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { mayManage, useMe } from "../lib/me.js";
import { usePoll } from "../lib/poll.js";
import { go, linkTo } from "../lib/route.js";
import { bytes, count, moment, t } from "../lib/texts.js";
import { AdapterState } from "../parts/adapter-state.js";
import { Copy } from "../parts/copy.js";
import { Confirm, Dialog } from "../parts/dialog.js";
import { Mark } from "../parts/mark.js";
import { Name } from "../parts/name.js";
import { States } from "../parts/states.js";
import { Add } from "./add-adapter.js";

const SECONDS = 5;

/** @param {{name: string}} props */
export function Details({ name }) {
  const me = useMe();
  const path = `/v1/adapters/${encodeURIComponent(name)}`;
  const adapter = usePoll((signal) => get(path, signal), SECONDS);
  const tenant = me.operator ? "&tenant=*" : "";
  const use = usePoll(async (signal) => {
    const { name: own } = adapter.data ?? { name };
    return get(`/v1/usage?by=adapter&limit=1000${tenant}&adapter=${encodeURIComponent(own)}`, signal);
  }, SECONDS, [adapter.data?.name]);
  const isGone = adapter.error?.status === 404;
  return html`<div class="stack adapter">
    <p><a href=${linkTo("adapters")}>← ${t("adapters.title")}</a></p>
    <h1 class="row">
      ${adapter.data && html`<${Mark} digest=${adapter.data.digest} />`}<${Name} of=${name} />
    </h1>
    ${isGone
      ? html`<p class="state" role="alert">${t("adapters.unknown")}</p>`
      : html`<${States} of=${adapter}>
          ${(data) => html`<${Whole} data=${data} path=${path} use=${use} me=${me} again=${adapter.again} />`}
        <//>`}
  </div>`;
}

function Whole({ data, path, use, me, again }) {
  // Only owners see how many requests run.
  const mayChange = data.num_running !== null && mayManage(me, data.name);
  return html`
    ${mayChange && html`<${Actions} data=${data} path=${path} again=${again} />`}
    ${data.warnings.map((warning) => html`<p class="card warn" key=${warning}>${warning}</p>`)}
    <div class="columns">
      <${Facts} data=${data} />
      <${Use} use=${use} model=${data.model} isOperator=${me.operator} />
      <${Versions} data=${data} path=${path} mayChange=${mayChange} again=${again} />
      <${Modules} content=${data.content} />
    </div>`;
}

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

function Actions({ data, path, again }) {
  const [open, setOpen] = useState("");
  const { isBusy, error, run } = useAction(again);
  const close = () => setOpen("");
  const isPinned = data.versions[0].pinned;
  const toggle = (name) => setOpen(open === name ? "" : name);
  return html`<div class="stack">
    <div class="row">
      <button class="primary" aria-expanded=${open === "replace"} onClick=${() => toggle("replace")}>
        ${t("adapters.replace")}
      </button>
      <button disabled=${isBusy || data.versions.length < 2}
        onClick=${() => run(() => post(`${path}/rollback`, {}))}>${t("adapters.rollback")}</button>
      <button disabled=${isBusy} onClick=${() => run(() => post(`${path}/pin`, { pinned: !isPinned }))}>
        ${isPinned ? t("adapters.unpin") : t("adapters.pin")}
      </button>
      <button onClick=${() => setOpen("alias")}>${t("adapters.addAlias")}</button>
      <button class="danger" onClick=${() => setOpen("unload")}>${t("adapters.unload")}</button>
    </div>
    ${error && html`<p class="bad" role="alert">${error.message}</p>`}
    ${open === "replace" && html`<${Add} name=${data.name} onLoaded=${again} />`}
    ${open === "alias" && html`<${Alias} path=${path} onClose=${close} again=${again} />`}
    ${open === "unload" && html`<${Unload} data=${data} path=${path} onClose=${close} run=${run} />`}
  </div>`;
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

function Fact({ label, children }) {
  return html`<dt>${label}</dt><dd>${children}</dd>`;
}

function Facts({ data }) {
  const { content } = data;
  return html`<section class="card">
    <h2>${t("adapters.facts")}</h2>
    <dl class="adapter-facts">
      <${Fact} label=${t("adapters.state")}><${AdapterState} of=${data} /><//>
      <${Fact} label=${t("adapters.tier")}>${t(`adapters.${data.residency}`)}<//>
      ${data.num_running !== null &&
      html`<${Fact} label=${t("adapters.inFlight")}>${count(data.num_running)}<//>`}
      <${Fact} label=${t("adapters.digest")}>
        <code>${data.digest}</code> <${Copy} text=${() => data.digest} label=${t("adapters.copy")} /><//>
      <${Fact} label=${t("adapters.base")}><${Name} of=${data.model} /><//>
      ${data.task_id !== null && html`<${Fact} label=${t("adapters.taskId")}>${String(data.task_id)}<//>`}
      <${Fact} label=${t("adapters.size")}>${bytes(content.host_bytes)}<//>
      <${Fact} label=${t("adapters.onDevice")}>
        ${t("adapters.pages", { n: content.device_pages })} · ${bytes(content.device_bytes)}<//>
      <${Fact} label=${t("adapters.types")}>${content.dtypes.join(", ")} → ${content.device_dtype}<//>
      <${Fact} label=${t("adapters.tensors")}>${count(content.num_tensors)}<//>
      ${data.source && html`<${Fact} label=${t("adapters.source")}><${Name} of=${data.source} /><//>`}
    </dl>
  </section>`;
}

function Use({ use, model, isOperator }) {
  return html`<section class="card">
    <h2>${t("adapters.use")}</h2>
    <${States} of=${use} isEmpty=${({ data }) => !data.some((row) => row.model === model)}
      empty=${html`<p>${t("adapters.unused")}</p>`}>
      ${({ data, since }) => html`<table>
          <thead><tr>
            ${isOperator && html`<th>${t("adapters.tenant")}</th>`}
            <th class="number">${t("adapters.requests")}</th><th class="number">${t("adapters.errors")}</th>
            <th class="number">${t("adapters.tokens")}</th><th class="number">${t("adapters.lastUsed")}</th>
          </tr></thead>
          <tbody>${data.filter((row) => row.model === model).map((row) => html`<tr key=${`${row.tenant} ${row.owner}`}>
            ${isOperator && html`<td><${Name} of=${row.tenant} /></td>`}
            <td class="number">${count(row.requests)}</td>
            <td class="number"><span class=${row.errors ? "bad" : ""}>${count(row.errors)}</span></td>
            <td class="number">${count(row.prompt_tokens)} → ${count(row.output_tokens)}</td>
            <td class="number">${moment(row.last_used)}</td>
          </tr>`)}</tbody>
        </table>
        <p class="second">${t("adapters.since", { at: moment(since) })}</p>`}
    <//>
  </section>`;
}

function Versions({ data, path, mayChange, again }) {
  const { isBusy, error, run } = useAction(again);
  const [gone, setGone] = useState(null);
  const pin = (version, pinned) => run(() => post(`${path}/pin`, { version, pinned }));
  return html`<section class="card">
    <h2>${t("adapters.versions")}</h2>
    ${error && html`<p class="bad" role="alert">${error.message}</p>`}
    <table><tbody>
      ${data.versions.map(
        (one, index) => html`<tr key=${one.version}>
          <td>v${one.version} <${Mark} digest=${one.digest} />
            ${one.pinned && html` <span class="tag">${t("adapters.pinned")}</span>`}</td>
          <td>${moment(one.created)}${one.restored !== null && html` <span class="second">${t("adapters.restored", { n: one.restored })}</span>`}
            ${one.source && html`<br /><span class="second"><${Name} of=${one.source} /></span>`}</td>
          ${mayChange &&
          html`<td class="number">
            ${index > 0 &&
            html`<button class="small" disabled=${isBusy}
              onClick=${() => run(() => post(`${path}/rollback`, { version: one.version }))}>${t("adapters.restore")}</button>
            <button class="small" disabled=${isBusy} onClick=${() => pin(one.version, !one.pinned)}>
              ${one.pinned ? t("adapters.unpin") : t("adapters.pin")}</button>`}
            ${index === 0 && html`<span class="good">${t("adapters.present")}</span>`}</td>`}
        </tr>`,
      )}
    </tbody></table>
    ${data.aliases.length > 0 && html`<h3>${t("adapters.aliases")}</h3>`}
    ${data.aliases.map(
      (alias) => html`<p class="row" key=${alias}><${Name} of=${alias} />
        ${mayChange && html`<button class="small danger" onClick=${() => setGone(alias)}>${t("adapters.removeAlias")}</button>`}</p>`,
    )}
    ${gone !== null &&
    html`<${Confirm} title=${t("adapters.removeAlias")} action=${t("adapters.removeAlias")}
      text=${html`<${Name} of=${gone} /><br />${t("adapters.aliasEnds")}`} onClose=${() => setGone(null)}
      onConfirm=${() => run(() => remove(`/v1/adapters/${encodeURIComponent(gone)}`))} />`}
  </section>`;
}

function Modules({ content }) {
  const names = Object.keys(content.module_layers).sort();
  return html`<section class="card">
    <h2>${t("adapters.modules")}</h2>
    <table>
      <thead><tr><th>${t("adapters.module")}</th><th class="number">${t("adapters.rank")}</th><th>${t("adapters.layers")}</th></tr></thead>
      <tbody>${names.map(
        (name) => html`<tr key=${name}>
          <td><code>${name}</code></td>
          <td class="number">${ranks(content.ranks[name])}</td>
          <td>${ranges(content.module_layers[name])}</td>
        </tr>`,
      )}</tbody>
    </table>
  </section>`;
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
