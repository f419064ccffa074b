// The health of the server, what takes its memory, its processes, and the settings in force.
import { get } from "../lib/api.js";
import { html, usePoll } from "../lib/html.js";
import { go, linkTo } from "../lib/route.js";
import { bytes, count, duration, t } from "../lib/texts.js";
import { Copy, Name, States } from "../parts/basics.js";
import { Capacity } from "../parts/chart.js";

const POLL_SECONDS = 2;
const MEMORY_SECONDS = 10;

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  const processes = usePoll(health, POLL_SECONDS);
  const memory = usePoll((signal) => get("/v1/memory", signal), MEMORY_SECONDS);
  const settings = usePoll((signal) => get("/v1/settings", signal), 0);
  return html`<h1>${t("settings.title")}</h1>
    <div class="stack settings-page">
      <div class="settings-top">
        <section class="card"><h2>${t("settings.health")}</h2>
          <${States} of=${processes}>${(data) => html`<${Health} data=${data} />`}<//></section>
        <section class="card"><h2>${t("settings.whatTakes")}</h2>
          <${States} of=${memory}>${(models) => Object.entries(models).map(([model, one]) => html`<${Memory} key=${model} of=${one}
            name=${Object.keys(models).length > 1 ? model : ""} />`)}<//></section>
      </div>
      <section class="card">
        <${States} of=${processes}>${(data) => html`<details><summary><h2>${t("settings.processes")} ${count(data.processes.length)}</h2></summary>
          <${Processes} data=${data} /></details>`}<//></section>
      <section class="card"><h2>${t("settings.inForce")}</h2>
        <${States} of=${settings} rows=${8}>${(data) => html`<${Settings} data=${data} query=${route.query} />`}<//></section>
    </div>`;
}

function Health({ data }) {
  const uptime = data.processes.find(({ kind }) => kind === "server")?.uptime_seconds ?? null;
  return html`<ul class="engines">${Object.entries(data.engines).map(([name, one]) => {
      const restarts = Object.values(one.restarts).reduce((sum, number) => sum + number, 0);
      const last = one.last_step_seconds;
      const facts = { name, state: t(one.ready ? "settings.ready" : "settings.notReady"), up: span(uptime), restarts };
      return html`<li key=${name}><span class=${one.ready ? "good" : "warn"} aria-hidden="true">${one.ready ? "●" : "◐"}</span>
        ${last === null ? t("settings.upForNoStep", facts) : t("settings.upFor", { ...facts, last: span(last) })}
        ${restarts > 0 && html`<br /><span class="second">${t("settings.restartsWhy", { reasons: reasons(one.restarts) })}</span>`}</li>`;
    })}</ul>
    ${Object.keys(data.frontend_restarts).length > 0 &&
    html`<p class="warn">${t("settings.frontendRestarts")} ${reasons(data.frontend_restarts)}</p>`}`;
}

/** A device without memory of its own has no capacity: then the parts are the whole. */
function Memory({ of, name }) {
  const { accelerator } = of;
  const parts = [
    ["weights", of.weights_bytes],
    ["kv", of.kv.num_bytes],
    ["adapters", of.device.num_bytes],
    ["steps", of.workspace_bytes + of.graph_bytes],
    ["other", accelerator?.other ?? 0],
  ].filter(([, size]) => size > 0);
  const used = parts.reduce((sum, [, size]) => sum + size, 0);
  const all = accelerator?.total ?? used;
  const text = accelerator
    ? t("settings.memoryOf", { used: bytes(used), all: bytes(all) })
    : t("settings.memoryUsed", { used: bytes(used) });
  return html`<div class="memory-of">
    <div class="row">${name && html`<h3><${Name} of=${name} /></h3>`}<span class="row end">${text}</span></div>
    <${Capacity} label=${`${t("settings.whatTakes")} ${text}`} total=${all}
      parts=${parts.map(([part, size]) => ({ key: part, amount: size, look: part, title: `${t(`settings.${part}`)}: ${bytes(size)}` }))} />
    <p class="memory-key">${parts.map(([part, size]) => html`<span key=${part}><span class="swatch ${part}"></span> ${t(`settings.${part}`)} ${bytes(size)}</span> `)}
      ${accelerator && html`<span>${t("settings.free")} ${bytes(accelerator.free)}</span>`}</p>
  </div>`;
}

/** The processes, with the part of a core that each used since the last look. */
async function health(signal, before) {
  const data = await get("/v1/processes", signal);
  const at = performance.now();
  const used = new Map(data.processes.map(({ pid, cpu_seconds: seconds }) => [pid, seconds]));
  const cpu = new Map();
  for (const [pid, seconds] of used) {
    const earlier = before?.used.get(pid);
    if (earlier !== undefined) cpu.set(pid, Math.max(0, (seconds - earlier) / ((at - before.at) / 1000)));
  }
  return { ...data, at, used, cpu };
}

function Processes({ data }) {
  return html`<${Wide} label=${t("settings.processes")}>
    <table>
      <thead><tr>
        ${["kind", "state"].map((name) => html`<th key=${name} scope="col">${t(`settings.${name}`)}</th>`)}
        ${["pid", "memory", "cpu", "threads", "uptime"].map((name) => html`<th key=${name} scope="col" class="number">${t(`settings.${name}`)}</th>`)}
      </tr></thead>
      <tbody>${data.processes.map((one) => html`<tr key=${one.pid}>
        <th scope="row">${one.kind}</th>
        <td class=${one.state === "stopped" ? "bad" : ""}>${one.state}</td>
        <td class="number">${one.pid}</td>
        <td class="number">${one.memory_bytes === null ? "–" : bytes(one.memory_bytes)}</td>
        <td class="number">${data.cpu.has(one.pid) ? count(data.cpu.get(one.pid), { style: "percent" }) : "–"}</td>
        <td class="number">${one.threads ?? "–"}</td>
        <td class="number">${span(one.uptime_seconds)}</td>
      </tr>`)}</tbody>
    </table><//>`;
}

/** A table that scrolls where the page is narrow. */
const Wide = ({ label, children }) =>
  html`<div class="wide" tabindex="0" role="region" aria-label=${label}>${children}</div>`;

function reasons(numbers) {
  const found = Object.entries(numbers).filter(([, number]) => number);
  return found.map(([reason, number]) => `${reason}: ${count(number)}`).join(", ");
}

/** Seconds in the two largest units. */
function span(seconds) {
  if (seconds === null) return "–";
  if (seconds < 60) return duration(seconds * 1000);
  const units = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
  const first = units.findIndex(([size]) => seconds >= size);
  let rest = Math.floor(seconds);
  const parts = [];
  for (const [size, unit] of units.slice(first, first + 2)) {
    parts.push(count(Math.floor(rest / size), { style: "unit", unit, unitDisplay: "narrow" }));
    rest %= size;
  }
  return parts.join(" ");
}

function Settings({ data, query }) {
  const search = query.get("search") ?? "";
  const isAll = query.has("all") || search !== "";
  const set = (changes) => {
    const kept = { search, all: query.get("all") ?? "" };
    go(linkTo("settings", "", { ...kept, ...changes }), { replace: true });
  };
  const every = [[t("settings.server"), data.server], ...Object.entries(data.models)];
  const all = every.reduce((sum, [, entries]) => sum + entries.length, 0);
  const changed = every.reduce((sum, [, entries]) => sum + entries.filter(isChanged).length, 0);
  const sections = every.map(([name, entries]) => [name, entries.filter((entry) => (isAll || isChanged(entry)) && matches(entry, search))]);
  const total = sections.reduce((sum, [, entries]) => sum + entries.length, 0);
  return html`<form class="row setting-filters" onSubmit=${(event) => event.preventDefault()}>
      <label class="check"><input type="checkbox" checked=${!isAll} onChange=${(event) => set(event.target.checked ? { all: "", search: "" } : { all: "1" })} />
        ${t("settings.onlyChanged", { n: changed, all })}</label>
      <input type="search" aria-label=${t("settings.search")} placeholder=${t("settings.searchKey")} value=${search} spellcheck=${false}
        onInput=${(event) => set({ search: event.target.value })} />
      <${Copy} label=${t("settings.copy")} text=${() => asText(sections)} />
      <span class="second" aria-live="polite">${t("settings.found", { n: total })}</span>
    </form>
    ${total === 0 && html`<p>${t("settings.noneFound")}</p>`}
    ${sections.filter(([, entries]) => entries.length).map(([name, entries], i) => html`<section key=${i}>
      <h3 class="setting-section"><${Name} of=${name} /></h3>
      ${byGroup(entries).map(([group, members]) => html`<h4 class="settings-group" key=${group}>${group}</h4>
        <ul class="settings">${members.map((entry) => html`<${Entry} key=${entry.name} of=${entry} />`)}</ul>`)}
    </section>`)}`;
}

const isChanged = ({ source }) => source !== "default" && source !== "derived";

function byGroup(entries) {
  const found = new Map();
  for (const entry of entries) found.set(entry.group, [...(found.get(entry.group) ?? []), entry]);
  return [...found];
}

function matches(entry, search) {
  const text = `${entry.name} ${entry.group} ${entry.meaning} ${entry.source}`.toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function Entry({ of }) {
  const isDefault = of.source === "default";
  return html`<li>
    <code class=${isDefault ? "" : "set"}>${of.name}</code>
    <span><${Name} of=${valueText(of)} />
      ${of.num_items > 100 && html` <span class="second">${t("settings.items", { n: of.num_items })}</span>`}</span>
    <span class="second"><${Name} of=${of.source} />${!isDefault && of.source !== "derived" && html` · ${t("settings.default")} <${Name} of=${of.default} />`}</span>
    <span class="second">${of.meaning}</span>
  </li>`;
}

function valueText({ name, value }) {
  if (value === null || value === "" || value.length === 0) return "–";
  if (typeof value === "string") return value;
  if (typeof value === "number") return name.endsWith("_bytes") ? bytes(value) : String(value);
  if (typeof value === "boolean") return t(value ? "settings.on" : "settings.off");
  return JSON.stringify(value);
}

function asText(sections) {
  const line = ({ name, value, source }) => `${name} = ${JSON.stringify(value)}  # ${source}`;
  return sections
    .filter(([, entries]) => entries.length)
    .map(([name, entries]) => [`[${name}]`, ...entries.map(line)].join("\n"))
    .join("\n\n");
}
