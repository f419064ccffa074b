// The processes of the server, and the settings in force with the place that set each.
import { get } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import { go, linkTo } from "../lib/route.js";
import { bytes, count, duration, t } from "../lib/texts.js";
import { Copy } from "../parts/copy.js";
import { Name } from "../parts/name.js";
import { States } from "../parts/states.js";

const POLL_SECONDS = 2;
const SOURCES = ["", "set", "derived", "default"];

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  const processes = usePoll(health, POLL_SECONDS);
  const settings = usePoll((signal) => get("/v1/settings", signal), 0);
  return html`<h1>${t("settings.title")}</h1>
    <div class="stack settings-page">
      <section class="card"><h2>${t("settings.processes")}</h2>
        <${States} of=${processes}>${(data) => html`<${Processes} data=${data} />`}<//></section>
      <section class="card"><h2>${t("settings.inForce")}</h2>
        <${States} of=${settings}>${(data) => html`<${Settings} data=${data} query=${route.query} />`}<//></section>
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
    </table><//>
    <${Wide} label=${t("settings.engines")}>
    <table>
      <thead><tr>${["model", "state", "lastStep", "restarts"].map((name) => html`<th key=${name} scope="col">${t(`settings.${name}`)}</th>`)}</tr></thead>
      <tbody>${Object.entries(data.engines).map(([model, one]) => html`<tr key=${model}>
        <th scope="row"><${Name} of=${model} /></th>
        <td class=${one.ready ? "good" : "warn"}>${t(one.ready ? "settings.ready" : "settings.notReady")}</td>
        <td>${span(one.last_step_seconds)}</td>
        <td>${restarts(one.restarts)}</td>
      </tr>`)}</tbody>
    </table><//>
    ${Object.keys(data.frontend_restarts).length > 0 &&
    html`<p class="warn">${t("settings.frontendRestarts")} ${restarts(data.frontend_restarts)}</p>`}`;
}

/** A table that scrolls where the page is narrow. */
const Wide = ({ label, children }) =>
  html`<div class="wide" tabindex="0" role="region" aria-label=${label}>${children}</div>`;

function restarts(numbers) {
  const found = Object.entries(numbers).filter(([, number]) => number);
  return found.map(([reason, number]) => `${reason}: ${count(number)}`).join(", ") || count(0);
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
  const source = query.get("source") ?? "";
  const choose = (name, value) =>
    go(linkTo("settings", "", { search, source, [name]: value }), { replace: true });
  const sections = [[t("settings.server"), data.server], ...Object.entries(data.models)].map(
    ([name, entries]) => [name, entries.filter((entry) => matches(entry, search, source))],
  );
  const total = sections.reduce((sum, [, entries]) => sum + entries.length, 0);
  return html`<form class="row setting-filters" onSubmit=${(event) => event.preventDefault()}>
      <label>${t("settings.search")}
        <input type="search" value=${search} spellcheck=${false} onInput=${(event) => choose("search", event.target.value)} /></label>
      <label>${t("settings.source")}
        <select value=${source} onChange=${(event) => choose("source", event.target.value)}>
          ${SOURCES.map((name) => html`<option key=${name} value=${name}>${t(`settings.source_${name || "any"}`)}</option>`)}
        </select></label>
      <${Copy} label=${t("settings.copy")} text=${() => asText(sections)} />
      <span class="second" aria-live="polite">${t("settings.found", { n: total })}</span>
    </form>
    ${sections.filter(([, entries]) => entries.length).map(([name, entries], i) => html`<section key=${i}>
      <h3 class="setting-section"><${Name} of=${name} /></h3>
      ${byGroup(entries).map(([group, members]) => html`<h4 class="settings-group" key=${group}>${group}</h4>
        <ul class="settings">${members.map((entry) => html`<${Entry} key=${entry.name} of=${entry} />`)}</ul>`)}
    </section>`)}`;
}

function byGroup(entries) {
  const found = new Map();
  for (const entry of entries) found.set(entry.group, [...(found.get(entry.group) ?? []), entry]);
  return [...found];
}

function matches(entry, search, source) {
  const isUnset = entry.source === "default" || entry.source === "derived";
  if (source && (source === "set" ? isUnset : entry.source !== source)) return false;
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
