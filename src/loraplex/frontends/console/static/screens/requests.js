// The newest requests, and those that run: where the time of each went, and why one failed.
import { get, useMe } from "../lib/api.js";
import { html, useEffect, useKeys, useMemo, usePoll, useRef, useState } from "../lib/html.js";
import { go, linkTo } from "../lib/route.js";
import { count, duration, moment, t } from "../lib/texts.js";
import { Copy, Icon, Mark, Name, Popover, States } from "../parts/basics.js";

const POLL_SECONDS = 1;
const MAX_ROWS = 100;

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  const me = useMe();
  const hasTenants = me.operator && me.has_keys;
  const [isPaused, setPaused] = useState(false);
  const filters = Object.fromEntries(
    FILTERS.map((name) => [name, route.query.get(name) ?? ""]).filter(([, value]) => value),
  );
  const asked = new URLSearchParams(filters).toString();
  const frozen = useRef(isPaused);
  frozen.current = isPaused;
  const load = (signal, before) => (frozen.current && before ? before : newest(asked, signal, before));
  const polled = usePoll(load, POLL_SECONDS, [asked]);
  const choose = (name, value) =>
    go(linkTo("requests", "", { ...filters, [name]: value }), { replace: true });
  return html`<div class="stack requests-page">
    <div class="row">
      <h1>${t("requests.title")}</h1>
      <span class="second requests-numbers" role="status">${polled.data && t("requests.numbers", { open: polled.data.num_open, ended: polled.data.rows.length })}</span>
      <div class="row end">
        <span class="second" title=${t("requests.notKept")}>ⓘ ${t("requests.notKept")}</span>
        <button type="button" class="pause" aria-pressed=${isPaused} onClick=${() => setPaused(!isPaused)}>
          ${t(isPaused ? "requests.goOn" : "requests.pause")}</button>
      </div>
    </div>
    <${Filters} filters=${filters} hasTenants=${hasTenants} onChoice=${choose} />
    <${PhaseKey} />
    <${States} of=${polled} rows=${6} isEmpty=${(data) => !data.rows.length && !data.open.length}
      empty=${html`<${Empty} isFiltered=${asked !== ""} />`}>
      ${(data) => html`<${Rows} data=${data} hasTenants=${hasTenants} />`}
    <//>
  </div>`;
}

/** The newest requests, with those that were there before. */
async function newest(asked, signal, before) {
  const cursor = before ? `&after=${before.next}` : "";
  const page = await get(`/v1/requests?limit=${MAX_ROWS}${cursor}&${asked}`, signal);
  // More came than are shown: only the newest matter.
  if (before && page.requests.length === MAX_ROWS) return newest(asked, signal, null);
  const rows = [...page.requests].reverse();
  return { ...page, rows: [...rows, ...(before?.rows ?? [])].slice(0, MAX_ROWS) };
}

function Empty({ isFiltered }) {
  const command = `curl ${location.origin}/v1/completions -H 'Content-Type: application/json' \\
  -H "Authorization: Bearer $LORAPLEX_API_KEY" -d '{"prompt": "Hello", "max_tokens": 8}'`;
  return isFiltered
    ? t("requests.noneFound")
    : html`<p>${t("requests.none")}</p><pre class="card">${command}</pre>`;
}

function Rows({ data, hasTenants }) {
  const list = useRef(null);
  const [opened, setOpened] = useState("");
  const actions = useMemo(() => {
    const move = (step) => () => {
      const buttons = [...list.current.querySelectorAll("button.request-toggle")];
      const at = buttons.indexOf(document.activeElement);
      buttons[Math.max(0, Math.min(buttons.length - 1, at + step))]?.focus();
    };
    return new Map([["j", move(1)], ["k", move(-1)]]);
  }, []);
  useKeys(actions);
  const nowMs = data.next / 1000;
  const shown = [...[...data.open].reverse(), ...data.rows];
  return html`
    ${!data.is_complete && html`<p class="warn" role="status">${t("requests.incomplete")}</p>`}
    <ul class="requests" ref=${list}>
      ${shown.map((request) => {
        const key = request.id ? String(request.id) : `open ${request.trace_id}`;
        return html`<${Row} key=${key} request=${request} nowMs=${nowMs} hasTenants=${hasTenants}
          isOpen=${opened === key} onOpen=${() => setOpened(opened === key ? "" : key)} />`;
      })}
    </ul>`;
}

function Row({ request, nowMs, hasTenants, isOpen, onOpen }) {
  const started = Date.parse(request.time);
  const total = request.seconds === null ? Math.max(0, nowMs - started) : request.seconds * 1000;
  // A press anywhere but on a link opens the row; by keyboard, its button does.
  const press = (event) => !event.target.closest("a, button") && onOpen();
  return html`<li class="card">
    <div class=${`request${isOpen ? " opened" : ""}`} onClick=${press}>
      <button type="button" class="request-toggle quiet small" aria-expanded=${isOpen} onClick=${onOpen}>${moment(started / 1000)}</button>
      <${Status} of=${request} />
      <span class="request-model second"><${Name} of=${request.model ?? "–"} /></span>
      <span class="request-adapters"><${Adapters} of=${request} />${hasTenants && html` <span class="second"><${Name} of=${request.tenant} /></span>`}</span>
      <span class="number second request-tokens">${request.generations.length > 0 && t("requests.tokens", { prompt: request.prompt_tokens, output: request.completion_tokens })}</span>
      <span class="number request-time">${duration(total)}</span>
      <${Phases} of=${longest(request, total)} />
      ${request.message && html`<p class="request-message bad"><${Name} of=${request.message} /></p>`}
    </div>
    ${isOpen && html`<${Details} request=${request} total=${total} />`}
  </li>`;
}

/** The phases of the generation that ended last. */
function longest(request, total) {
  const bars = request.generations.map((one) => segments(one, request, total));
  const end = (bar) => bar.offset + bar.parts.reduce((sum, part) => sum + part.ms, 0);
  return bars.reduce((a, b) => (end(b) > end(a) ? b : a), bars[0] ?? { offset: 0, total, parts: [] });
}

const segments = (generation, request, total) => ({
  offset: generation.start_ms,
  total,
  parts: request.id ? phasesOf(generation) : openPhases(generation, total),
});

function Status({ of }) {
  if (!of.id) return html`<span class="accent">${t(`requests.phase_${of.phase}`)}</span>`;
  return html`<span class=${of.error ? "bad" : "good"} title=${of.error}>${of.status}</span>`;
}

function Adapters({ of }) {
  const found = adaptersOf(of);
  const hasBase = of.generations.some((generation) => !generation.adapters.length);
  return html`${hasBase && html`<span class="request-adapter"><${Mark} digest="" /> ${t("requests.base")} </span>`}
    ${found.map((adapter) => html`<${Adapter} key=${adapter.name} of=${adapter} />`)}`;
}

/** The adapters of its prompts, or the one that it loads or changes. */
function adaptersOf({ generations, subject }) {
  const found = new Map();
  for (const generation of generations) for (const adapter of generation.adapters) found.set(adapter.name, adapter);
  if (subject && !found.has(subject)) found.set(subject, { name: subject, digest: "", scale: 1 });
  return [...found.values()];
}

function Adapter({ of }) {
  return html`<span class="request-adapter"><${Mark} digest=${of.digest} /> <a href=${linkTo("adapters", of.name)}><${Name} of=${of.name} /></a>
    ${of.scale !== 1 && html` ×${count(of.scale)}`} </span>`;
}

function Details({ request, total }) {
  const facts = [
    ["path", [request.protocol, request.method, request.route ?? request.path].filter(Boolean).join(" ")],
    ["client", request.client],
    ["agent", request.user_agent],
    ["tenant", request.tenant],
  ];
  const ids = [["id", request.request_id], ["trace", request.trace_id]];
  const hidden = request.num_generations - request.generations.length;
  const adapters = adaptersOf(request);
  return html`<div class="stack request-details">
    <dl>
      ${request.error && html`<div><dt>${t("requests.status")}</dt><dd class="bad">${request.status} ${request.error}</dd></div>`}
      ${facts.filter(([, value]) => value).map(([name, value]) => html`<div key=${name}>
        <dt>${t(`requests.${name}`)}</dt><dd><${Name} of=${value} /></dd></div>`)}
      ${ids.map(([name, value]) => html`<div key=${name}><dt>${t(`requests.${name}`)}</dt>
        <dd><code>${value}</code> <${Copy} text=${() => value} label=${t("adapters.copy")} /></dd></div>`)}
    </dl>
    ${request.generations.map((one, i) => html`<${Generation} key=${i} of=${one} bar=${segments(one, request, total)} />`)}
    ${hidden > 0 && html`<p class="second">${t("requests.hidden", { n: hidden })}</p>`}
    ${adapters.length > 0 && html`<p class="row">${adapters.map(({ name }) => html`<a key=${name} href=${linkTo("adapters", name)}
      >${t("requests.openAdapter")}: <${Name} of=${name} /></a>`)}</p>`}
  </div>`;
}

function Generation({ of, bar }) {
  const numbers = [
    ["cached", of.cached_tokens],
    ["restarts", of.restarts],
    ["preemptions", of.preemptions],
  ];
  return html`<section>
    <h3><${Name} of=${of.model} /> ${of.adapters.map((adapter) => html`<${Adapter} key=${adapter.digest} of=${adapter} />`)}</h3>
    <${Phases} of=${bar} />
    <dl>
      ${bar.offset > 0 && html`<div><dt>${t("requests.begin")}</dt><dd>${duration(bar.offset)}</dd></div>`}
      ${bar.parts.map(({ name, ms }) => html`<div key=${name}><dt>${t(`requests.${name}`)}</dt><dd>${duration(ms)}</dd></div>`)}
      <div><dt>${t("requests.end")}</dt><dd class=${of.error ? "bad" : ""}>${of.error ?? (of.finish_reasons.join(", ") || "–")}</dd></div>
      ${numbers.filter(([, value]) => value).map(([name, value]) => html`<div key=${name}><dt>${t(`requests.${name}`)}</dt><dd>${count(value)}</dd></div>`)}
    </dl>
  </section>`;
}

// Which requests are listed: lists with a search, and what is chosen as chips. All is in the address.

const STATUSES = ["open", "ok", "error"];
const KINDS = ["generation", "adapter"];
const MAX_FOUND = 20;
const FILTERS = ["adapter", "model", "status", "kind", "tenant"];

/** Values of each filter that a search finds, with their texts. @type {Map<string, (search: string) => Promise<string[][]>>} */
const VALUES = new Map([
  ["adapter", (search) => adapters(search)],
  ["model", (search) => models(search)],
  ["status", async () => STATUSES.map((name) => [name, t(`requests.status_${name}`)])],
  ["kind", async () => KINDS.map((name) => [name, t(`requests.kind_${name}`)])],
  ["tenant", async (search) => (search ? [[search, search]] : [])],
]);

async function adapters(search) {
  const { data } = await get(`/v1/adapters?limit=${MAX_FOUND}&sort=-last_used&search=${encodeURIComponent(search)}`);
  return data.map(({ name }) => [name, name]);
}

async function models(search) {
  const { data } = await get("/v1/models");
  const names = data.filter(({ parent }) => !parent).map(({ id }) => id);
  return names.filter((name) => name.includes(search)).map((name) => [name, name]);
}

/**
 * @param {{filters: Record<string, string>, hasTenants: boolean,
 *   onChoice: (name: string, value: string) => void}} props
 */
function Filters({ filters, hasTenants, onChoice }) {
  const [isShown, setShown] = useState(false);
  const names = FILTERS.filter((name) => name !== "tenant" || hasTenants);
  const chosen = names.filter((name) => filters[name]);
  return html`<div class="row request-filters">
    <button type="button" class="narrow-filters" aria-expanded=${isShown} onClick=${() => setShown(!isShown)}>
      ${t("requests.filters")}${chosen.length > 0 && ` ${chosen.length}`}</button>
    <div class=${`row filter-lists${isShown ? " shown" : ""}`}>
      ${names.map((name) => html`<${Popover} key=${name} kind="filter-${name}" card="filter-card"
        face=${html`${t(`requests.${name}`)} <${Icon} name="chevron" />`}>
        ${(close) => html`<${List} name=${name} onChoice=${(value) => { close(); onChoice(name, value); }} />`}
      <//>`)}
    </div>
    ${chosen.map((name) => html`<span key=${name} class="chosen">${t(`requests.${name}`)}: <${Name} of=${shown(name, filters[name])} />
      <button type="button" class="small quiet only-icon" aria-label=${t("requests.remove", { name: t(`requests.${name}`) })}
        onClick=${() => onChoice(name, "")}><${Icon} name="close" /></button></span>`)}
  </div>`;
}

function shown(name, value) {
  if (name === "status" && STATUSES.includes(value)) return t(`requests.status_${value}`);
  return name === "kind" && KINDS.includes(value) ? t(`requests.kind_${value}`) : value;
}

function List({ name, onChoice }) {
  const [search, setSearch] = useState("");
  const [found, setFound] = useState([]);
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  const isSearched = ["adapter", "model", "tenant"].includes(name);
  useEffect(() => {
    let isCurrent = true;
    VALUES.get(name)(search).then((values) => isCurrent && setFound(values), () => isCurrent && setFound([]));
    return () => {
      isCurrent = false;
    };
  }, [search]);
  const onKey = (event) => {
    if (event.key !== "Enter" || !(search || found.length)) return;
    event.preventDefault();
    onChoice(search || found[0][0]);
  };
  return html`<div class="stack">
    ${isSearched && html`<input ref=${field} aria-label=${t(`requests.${name}`)} maxlength="256" value=${search} spellcheck=${false}
      onInput=${(event) => setSearch(event.target.value)} onKeyDown=${onKey} />`}
    <div class="filter-values">${found.map(([value, text]) => html`<button type="button" key=${value} class="quiet"
      onClick=${() => onChoice(value)}><${Name} of=${text} /></button>`)}</div>
  </div>`;
}

// The time of one generation as a bar of phases, which is read as a text, too.

/** Phases in their order. */
const PHASES = ["admit", "adapter_load", "queue", "prefill", "decode", "write"];

/** @typedef {{name: string, ms: number}} Part */

/** The known phases of a generation that has ended. @returns {Part[]} */
function phasesOf(generation) {
  return PHASES.map((name) => ({ name, ms: generation.phases[`${name}_ms`] })).filter(({ ms }) => ms);
}

/** What is known of one that runs: when it was admitted, and its first token. @returns {Part[]} */
function openPhases(generation, total) {
  const elapsed = Math.max(0, total - generation.start_ms);
  const admit = generation.phases.admit_ms ?? elapsed;
  const first = generation.first_token_seconds === null ? elapsed : generation.first_token_seconds * 1000;
  const parts = [
    { name: "admit", ms: admit },
    { name: "queue", ms: first - admit },
    { name: "decode", ms: elapsed - first },
  ];
  return parts.filter(({ ms }) => ms > 0);
}

/** @param {{of: {offset: number, total: number, parts: Part[]}}} props */
function Phases({ of }) {
  const share = (ms) => `${of.total ? (100 * ms) / of.total : 0}%`;
  const text = of.parts.map(({ name, ms }) => `${t(`requests.${name}`)} ${duration(ms)}`).join(", ");
  return html`<span class="phases" role="img" aria-label=${text || t("requests.noPhases")}>
    ${of.offset > 0 && html`<span class="phase begin" style=${{ width: share(of.offset) }} title=${`${t("requests.begin")} ${duration(of.offset)}`}></span>`}
    ${of.parts.map(({ name, ms }) => html`<span key=${name} class="phase ${name}" style=${{ width: share(ms) }}
      title=${`${t(`requests.${name}`)} ${duration(ms)}`}></span>`)}
  </span>`;
}

/** What the colours mean. */
function PhaseKey() {
  return html`<p class="row second phase-key">
    ${["begin", ...PHASES].map((name) => html`<span key=${name} class="row"><span class="phase ${name}" aria-hidden="true"></span>${t(`requests.${name}`)}</span>`)}
  </p>`;
}
