// What an engine does now: its steps, memory, speed, latencies and queue.
import { get } from "../lib/api.js";
import { Follower, percentile, shareOf } from "../lib/follow.js";
import { html, useEffect, useId, useMemo, useReducer, useRef, useState } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import { go, linkTo } from "../lib/route.js";
import { count, duration, moment, t } from "../lib/texts.js";
import { Chart } from "../parts/chart.js";
import { Mark } from "../parts/mark.js";
import { Name } from "../parts/name.js";
import { States } from "../parts/states.js";
import { KINDS, Steps, joint } from "../parts/steps.js";

const POLL_SECONDS = 0.5;
const TABLE_STEPS = 20;
const LOOKUPS = 3;
const LATENCIES = ["time_to_first_token", "inter_token_latency", "e2e_latency"];
const SHARES = [0.5, 0.95, 0.99];
const BY_DIGEST = new Set(["adapter_rows", "prefill_rows", "draft_rows"]);

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  const polled = usePoll((signal) => get("/v1/internal/stats", signal), 0);
  return html`<h1>${t("live.title")}</h1>
    <${States} of=${polled}>
      ${({ models }) => {
        const names = Object.keys(models);
        const asked = route.query.get("model");
        const model = names.includes(asked) ? asked : names[0];
        return html`<${Engine} key=${model} model=${model} models=${names} />`;
      }}
    <//>`;
}

function Engine({ model, models }) {
  const follower = useMemo(() => new Follower(model), [model]);
  const [isPaused, setPaused] = useState(false);
  const [selected, select] = useState(null);
  const isQuiet = useRef(false);
  isQuiet.current = isPaused;
  const polled = usePoll(
    async (signal, before) => {
      if (!isQuiet.current || !before) await follower.poll(signal);
      return { follower };
    },
    POLL_SECONDS,
    [follower],
  );
  const onSelect = (startNs) => {
    select(startNs);
    if (startNs !== null) setPaused(true);
  };
  const onPause = () => {
    setPaused(!isPaused);
    if (isPaused) select(null);
  };
  return html`<div class="live stack">
    <div class="row">
      <button onClick=${onPause} aria-pressed=${isPaused}>${t(isPaused ? "live.resume" : "live.pause")}</button>
      ${models.length > 1 &&
      html`<select aria-label=${t("live.model")} value=${model}
        onChange=${(event) => go(linkTo("live", "", { model: event.target.value }))}>
        ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>`}
      ${polled.data && html`<${Numbers} of=${follower} />`}
    </div>
    <${States} of=${polled}>
      ${() => html`<${Board} of=${follower} selected=${selected} onSelect=${onSelect} />`}
    <//>
  </div>`;
}

function Numbers({ of }) {
  const { engine, tokens } = of.polls.at(-1);
  return html`<span class="second">
    ${t("live.running", { running: engine.num_running, waiting: engine.num_waiting })}
    ${tokens !== null && ` · ${t("live.speed", { tokens: Math.round(tokens) })}`}
  </span>`;
}

function Board({ of, selected, onSelect }) {
  const step = of.steps.find((one) => one.start_ns === selected);
  const digests = new Set(of.steps.slice(-200).flatMap((one) => Object.keys(one.adapter_rows)));
  const waiting = new Map(Object.entries(of.polls.at(-1).waiting));
  for (const digest of waiting.keys()) digests.add(digest);
  const names = useNames([...digests]);
  if (!of.steps.length) return html`<${NoSteps} model=${of.model} />`;
  return html`<section class="card stack" aria-label=${t("live.steps")}>
      <${Steps} steps=${of.steps} selected=${selected} onSelect=${onSelect} label=${t("live.pick")} textOf=${textOf} />
      <${Legend} digests=${[...digests]} names=${names} hasGap=${of.steps.some((one, i) => joint(of.steps[i - 1], one))} />
    </section>
    ${step && html`<${Inspector} step=${step} origin=${of.origin} names=${names} onClose=${() => onSelect(null)} />`}
    <div class="tiles">
      <${Memory} polls=${of.polls} />
      <${Pages} polls=${of.polls} />
      <${Speed} polls=${of.polls} />
      <${Share} of=${of} />
      <${Latencies} of=${of} />
      <${Queue} waiting=${waiting} all=${of.polls.at(-1).engine.num_waiting} names=${names} />
    </div>
    <${Table} steps=${of.steps} />`;
}

/** One step in words. @param {import("../lib/follow.js").Step} step */
function textOf(step) {
  return t("live.step", {
    id: step.step_id,
    rows: step.num_rows,
    prefill: step.num_prefill_rows,
    adapters: step.num_adapters,
    preempted: step.num_preempted,
    time: duration(step.duration_ns / 1e6),
  });
}

function NoSteps({ model }) {
  const body = JSON.stringify({ model, prompt: "The capital of France is", max_tokens: 20 });
  const quoted = body.replaceAll("'", "'\\''");
  return html`<div class="card stack">
    <p>${t("live.none")}</p>
    <pre>curl ${location.origin}/v1/completions -H 'content-type: application/json' -d '${quoted}'</pre>
  </div>`;
}

/** Names of adapters by digest, looked up a few at a time. @param {string[]} digests */
function useNames(digests) {
  const names = useRef(new Map());
  const [, redraw] = useReducer((n) => n + 1, 0);
  const unknown = digests.filter((digest) => !names.current.has(digest)).slice(0, LOOKUPS);
  useEffect(() => {
    for (const digest of unknown) {
      names.current.set(digest, null);
      get(`/v1/adapters?search=${digest}&limit=5`).then(
        ({ data }) => {
          const found = data.find((one) => one.digest === digest);
          names.current.set(digest, found?.name ?? null);
          redraw();
        },
        () => names.current.delete(digest),
      );
    }
  });
  return names.current;
}

function Adapter({ digest, names }) {
  if (!digest) return html`<${Mark} digest="" /> ${t("live.base")}`;
  const name = names.get(digest);
  return html`<${Mark} digest=${digest} /> ${name && html`<${Name} of=${name} />`}`;
}

function Legend({ digests, names, hasGap }) {
  return html`<ul class="legend">
    <li><${Adapter} digest="" /></li>
    ${digests.map((digest) => html`<li key=${digest}><${Adapter} digest=${digest} names=${names} /></li>`)}
    ${KINDS.map((kind) => html`<li key=${kind} class="second"><span class="kind ${kind}"></span> ${t(`live.${kind}`)}</li>`)}
    <li class="second"><span class="kind preempted"></span> ${t("live.preempted")}</li>
    ${hasGap && html`<li class="second"><span class="kind gap"></span> ${t("live.gap")}</li>`}
  </ul>`;
}

function Inspector({ step, origin, names, onClose }) {
  const heading = useId();
  const at = origin + step.start_ns / 1e6;
  return html`<section class="card" aria-labelledby=${heading}>
    <div class="row">
      <h2 id=${heading}>${t("live.inspected", { id: step.step_id })}</h2>
      ${at && html`<span class="second">${moment(at / 1000)}</span>`}
      <div class="row end"><button class="small" onClick=${onClose}>${t("shell.close")}</button></div>
    </div>
    <dl class="fields">
      ${Object.entries(step).map(
        ([field, value]) => html`<div key=${field}>
          <dt><code>${field}</code></dt><dd>${shown(field, value, names)}</dd></div>`,
      )}
    </dl>
  </section>`;
}

/** The value of a field of a step. */
function shown(field, value, names) {
  if (value === null) return t("live.unmeasured");
  if (BY_DIGEST.has(field)) {
    const entries = Object.entries(value);
    if (!entries.length) return "–";
    return html`<ul>${entries.map(
      ([digest, rows]) => html`<li key=${digest}><${Adapter} digest=${digest} names=${names} /> ${count(rows)}</li>`,
    )}</ul>`;
  }
  if (Array.isArray(value)) return value.length ? value.join(", ") : "–";
  if (typeof value === "object") {
    return html`<ul>${Object.entries(value).map(
      ([part, of]) => html`<li key=${part}><code>${part}</code> ${shown(part, of, names)}</li>`,
    )}</ul>`;
  }
  return field.endsWith("_ns") && field !== "start_ns" ? shortTime(value) : count(value);
}

/** @param {number} ns */
const shortTime = (ns) => (ns < 1e6 ? `${count(ns / 1e3, { maximumFractionDigits: 0 })} µs` : duration(ns / 1e6));

function Tile({ title, now, children }) {
  return html`<section class="card">
    <div class="row"><h2>${title}</h2><span class="second row end">${now}</span></div>
    ${children}
  </section>`;
}

const timesOf = (polls) => polls.map((poll) => poll.at);
const compact = (value) => count(value, { notation: "compact", maximumFractionDigits: 1 });
const percent = (value) => count(value, { style: "percent", maximumFractionDigits: value < 0.1 ? 1 : 0 });

function Memory({ polls }) {
  const { blocks_held: held, blocks_cached: cached, blocks_free: free } = polls.at(-1).engine;
  const parts = [
    ["held", "accent", held],
    ["cached", "warn", cached],
    ["free", "line", free],
  ];
  // Stacked: the last one is drawn first, behind the others.
  const curves = parts.map(([part, colour], i) => ({
    name: part,
    colour,
    isFilled: true,
    values: polls.map(({ engine }) => parts.slice(0, i + 1).reduce((all, [one]) => all + engine[`blocks_${one}`], 0)),
  }));
  const now = parts.map(
    ([part, colour, value]) => html`<span key=${part}><span class="colour" style=${{ background: `var(--${colour})` }}></span>
      ${t(`live.${part}`, { blocks: value })}</span>`,
  );
  const label = parts.map(([part, , value]) => t(`live.${part}`, { blocks: value })).join(", ");
  return html`<${Tile} title=${t("live.blocks")} now=${now}>
    <${Chart} label=${`${t("live.blocks")}: ${label}`} times=${timesOf(polls)} curves=${curves.reverse()}
      shown=${compact} most=${held + cached + free} /><//>`;
}

function Pages({ polls }) {
  const { device_pages_used: used, device_pages_total: total } = polls.at(-1).engine.adapters;
  const now = t("live.pagesUsed", { used, total });
  const values = polls.map(({ engine }) => engine.adapters.device_pages_used);
  return html`<${Tile} title=${t("live.pages")} now=${now}>
    <${Chart} label=${`${t("live.pages")}: ${now}`} times=${timesOf(polls)} shown=${compact}
      curves=${[{ name: "pages", colour: "accent", isFilled: true, values }]} /><//>`;
}

function Speed({ polls }) {
  const { tokens } = polls.at(-1);
  const now = tokens === null ? "–" : t("live.speed", { tokens: Math.round(tokens) });
  return html`<${Tile} title=${t("live.tokens")} now=${now}>
    <${Chart} label=${`${t("live.tokens")}: ${now}`} times=${timesOf(polls)} shown=${compact}
      curves=${[{ name: "tokens", colour: "accent", values: polls.map((poll) => poll.tokens) }]} /><//>`;
}

function Share({ of }) {
  const share = shareOf(of.steps.slice(-200));
  const now = share === null ? t("live.unmeasured") : percent(share);
  return html`<${Tile} title=${t("live.share")} now=${now}>
    ${share === null
      ? html`<p class="second">${t("live.whyUnmeasured")}</p>`
      : html`<${Chart} label=${`${t("live.share")}: ${now}`} times=${timesOf(of.polls)} shown=${percent}
          curves=${[{ name: "share", colour: "accent", values: of.polls.map((poll) => poll.share) }]} />`}
  <//>`;
}

function Latencies({ of }) {
  const rows = LATENCIES.map((kind) => [kind, SHARES.map((share) => percentile(of.counts(kind), of.bounds[kind], share))]);
  return html`<${Tile} title=${t("live.latencies")} now=${t("live.lastMinute")}>
    <table>
      <thead><tr><th scope="col">${t("live.latency")}</th>
        ${SHARES.map((share) => html`<th key=${share} scope="col" class="number">p${share * 100}</th>`)}</tr></thead>
      <tbody>${rows.map(
        ([kind, values]) => html`<tr key=${kind}><th scope="row">${t(`live.${kind}`)}</th>
          ${values.map((value, i) => html`<td key=${i} class="number">${value ? `${value.isMore ? "> " : ""}${duration(value.ms)}` : "–"}</td>`)}</tr>`,
      )}</tbody>
    </table><//>`;
}

function Queue({ waiting, all, names }) {
  const rest = all - [...waiting.values()].reduce((sum, number) => sum + number, 0);
  const rows = [...waiting, ...(rest > 0 ? [["", rest]] : [])].sort((one, other) => other[1] - one[1]);
  return html`<${Tile} title=${t("live.queue")} now=${t("live.waiting", { waiting: all })}>
    ${rows.length
      ? html`<ul class="queue">${rows.map(
          ([digest, number]) => html`<li key=${digest}><span>${digest ? html`<${Adapter} digest=${digest} names=${names} />` : t("live.rest")}</span>
            <span class="bar-of" style=${{ inlineSize: `${(number / rows[0][1]) * 40}%` }}></span> ${count(number)}</li>`,
        )}</ul>`
      : html`<p class="second">${t("live.nothingWaits")}</p>`}
  <//>`;
}

function Table({ steps }) {
  const columns = ["step_id", "num_rows", "num_prefill_rows", "num_draft_tokens", "num_base_rows", "num_adapters", "num_new_tokens", "num_preempted"];
  return html`<details>
    <summary>${t("live.table")}</summary>
    <div class="scroll" tabindex="0" role="region" aria-label=${t("live.table")}><table class="steps-table">
      <thead><tr>${columns.map((name) => html`<th key=${name} scope="col" class="number">${t(`live.${name}`)}</th>`)}
        <th scope="col" class="number">${t("live.time")}</th></tr></thead>
      <tbody>${steps.slice(-TABLE_STEPS).reverse().map(
        (step) => html`<tr key=${step.start_ns}>
          ${columns.map((name) => html`<td key=${name} class="number">${count(step[name])}</td>`)}
          <td class="number">${duration(step.duration_ns / 1e6)}</td></tr>`,
      )}</tbody>
    </table></div>
  </details>`;
}
