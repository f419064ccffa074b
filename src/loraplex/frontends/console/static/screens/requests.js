// The newest requests, and those that run: where the time of each went.
import { get } from "../lib/api.js";
import { html, useMemo, useRef, useState } from "../lib/html.js";
import { useKeys } from "../lib/keys.js";
import { useMe } from "../lib/me.js";
import { usePoll } from "../lib/poll.js";
import { go, linkTo } from "../lib/route.js";
import { count, duration, moment, t } from "../lib/texts.js";
import { Mark } from "../parts/mark.js";
import { Name } from "../parts/name.js";
import { States } from "../parts/states.js";
import { Phases, PhaseKey, openPhases, phasesOf } from "./requests/phases.js";

const POLL_SECONDS = 1;
const MAX_ROWS = 100;
const STATUSES = ["", "open", "ok", "error"];
const FILTERS = ["adapter", "status", "tenant"];

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
  return html`<h1>${t("requests.title")}</h1>
    <form class="row request-filters" onSubmit=${(event) => event.preventDefault()}>
      <${Field} name="adapter" value=${filters.adapter} onChoice=${choose} />
      ${hasTenants && html`<${Field} name="tenant" value=${filters.tenant} onChoice=${choose} />`}
      <label>${t("requests.status")}
        <select value=${filters.status ?? ""} onChange=${(event) => choose("status", event.target.value)}>
          ${STATUSES.map((name) => html`<option key=${name} value=${name}>${t(`requests.status_${name || "any"}`)}</option>`)}
        </select>
      </label>
      <button type="button" aria-pressed=${isPaused} onClick=${() => setPaused(!isPaused)}>
        ${t(isPaused ? "requests.goOn" : "requests.pause")}
      </button>
    </form>
    <${PhaseKey} />
    <${States} of=${polled} isEmpty=${(data) => !data.rows.length && !data.open.length}
      empty=${html`<${Empty} isFiltered=${asked !== ""} />`}>
      ${(data) => html`<${Rows} data=${data} hasTenants=${hasTenants} />`}
    <//>`;
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

function Field({ name, value = "", onChoice }) {
  return html`<label>${t(`requests.${name}`)}
    <input type="search" maxlength="256" value=${value} spellcheck=${false}
      onChange=${(event) => onChoice(name, event.target.value)} />
  </label>`;
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
      const buttons = [...list.current.querySelectorAll("button.request")];
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
    <p class="second">${t("requests.numbers", { open: data.num_open, ended: data.rows.length })}</p>
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
  return html`<li class="card">
    <button class="request quiet" aria-expanded=${isOpen} onClick=${onOpen}>
      <span class="second">${moment(started / 1000)}</span>
      <${Status} of=${request} />
      <span><${Adapters} of=${request} />${hasTenants && html` <span class="second"><${Name} of=${request.tenant} /></span>`}</span>
      <span class="number second">${t("requests.tokens", { prompt: request.prompt_tokens, output: request.completion_tokens })}</span>
      <span class="number">${duration(total)}</span>
      <${Phases} of=${longest(request, total)} />
    </button>
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
  return html`<span class=${of.error ? "bad" : "good"}>${of.status}${of.error && ` ${of.error}`}</span>`;
}

function Adapters({ of }) {
  const found = new Map();
  for (const generation of of.generations)
    for (const adapter of generation.adapters) found.set(adapter.digest, adapter);
  const hasBase = of.generations.some((generation) => !generation.adapters.length);
  return html`${hasBase && html`<span class="request-adapter"><${Mark} digest="" /> ${t("requests.base")} </span>`}
    ${[...found.values()].map((adapter) => html`<${Adapter} key=${adapter.digest} of=${adapter} />`)}`;
}

function Adapter({ of }) {
  return html`<span class="request-adapter"><${Mark} digest=${of.digest} /> <${Name} of=${of.name} />
    ${of.scale !== 1 && html` ×${count(of.scale)}`} </span>`;
}

function Details({ request, total }) {
  const facts = [
    ["id", request.request_id],
    ["trace", request.trace_id],
    ["protocol", [request.protocol, request.method, request.route ?? request.path].filter(Boolean).join(" ")],
    ["client", request.client],
    ["agent", request.user_agent],
    ["tenant", request.tenant],
  ];
  const hidden = request.num_generations - request.generations.length;
  return html`<div class="stack request-details">
    <dl>${facts.filter(([, value]) => value).map(([name, value]) => html`<div key=${name}>
      <dt>${t(`requests.${name}`)}</dt><dd><${Name} of=${value} /></dd></div>`)}</dl>
    ${request.generations.map((one, i) => html`<${Generation} key=${i} of=${one} bar=${segments(one, request, total)} />`)}
    ${hidden > 0 && html`<p class="second">${t("requests.hidden", { n: hidden })}</p>`}
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
      ${bar.parts.map(({ name, ms }) => html`<div key=${name}><dt>${t(`requests.${name}`)}</dt><dd>${duration(ms)}</dd></div>`)}
      <div><dt>${t("requests.end")}</dt><dd class=${of.error ? "bad" : ""}>${of.error ?? (of.finish_reasons.join(", ") || "–")}</dd></div>
      ${numbers.filter(([, value]) => value).map(([name, value]) => html`<div key=${name}><dt>${t(`requests.${name}`)}</dt><dd>${count(value)}</dd></div>`)}
    </dl>
  </section>`;
}
