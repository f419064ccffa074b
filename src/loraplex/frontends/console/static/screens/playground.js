/* One prompt or chat, the base and adapters side by side, as one batch. */
import { get } from "../lib/api.js";
import { html, useEffect, useMemo, useReducer, useRef, useState } from "../lib/html.js";
import { useMe } from "../lib/me.js";
import { usePoll } from "../lib/poll.js";
import { count, t } from "../lib/texts.js";
import { Copy } from "../parts/copy.js";
import { Mark } from "../parts/mark.js";
import { Name } from "../parts/name.js";
import { Column } from "./playground/column.js";
import { curl, openai, triton } from "./playground/copies.js";
import { History } from "./playground/earlier.js";
import { keepOnlyOf, remember, saveSetup, savedSetup } from "./playground/history.js";
import { CHAT_FIELDS, FIELDS, Options } from "./playground/options.js";
import { Picker, adaptersLike } from "./playground/picker.js";
import { Prompt } from "./playground/prompt.js";
import { Output, Run } from "./playground/run.js";
import { MAX_COLUMNS, STRUCTURES, bodyOf, fieldOf, newSetup } from "./playground/setup.js";

const SAVE_MS = 300;
const NUM_FIRST = 2;
/** What the screen was before the reader looked at another one. */
let kept = { tenant: "", setup: null, run: null };

export function Screen() {
  const { tenant } = useMe();
  const [setup, setSetup] = useState(() => {
    keepOnlyOf(tenant);
    if (kept.tenant !== tenant) kept = { tenant, setup: null, run: null };
    return kept.setup ?? savedSetup();
  });
  const models = usePoll(async (signal) => baseNames(await get("/v1/models", signal)), 0);
  useEffect(() => {
    if (!setup) firstSetup().then(setSetup, () => setSetup(newSetup()));
  }, []);
  if (!setup) return html`<h1>${t("playground.title")}</h1>`;
  return html`<${Playground} tenant=${tenant} setup=${setup} setSetup=${setSetup} models=${models.data ?? []} />`;
}

/** Base models, without their adapters. */
const baseNames = ({ data }) => data.filter(({ parent }) => !parent).map(({ id }) => id);

/** The first base beside its first adapters. */
async function firstSetup() {
  const [base = ""] = baseNames(await get("/v1/models"));
  const chosen = (await adaptersLike("", base)).slice(0, NUM_FIRST);
  const columns = chosen.map(({ name, digest }) => [{ name, digest, scale: 1 }]);
  return { ...newSetup(), columns: [[], ...columns] };
}

function Playground({ tenant, setup, setSetup, models }) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  const [run, setRun] = useState(kept.run);
  const [reference, setReference] = useState("base");
  const [isRendered, setRendered] = useState(false);
  const redrawn = useRef(redraw);
  kept = { ...kept, setup, run };
  useEffect(() => {
    const timer = setTimeout(() => saveSetup(setup), SAVE_MS);
    return () => clearTimeout(timer);
  }, [setup]);
  useEffect(() => {
    if (run) run.onChange = () => {
      redrawn.current();
      if (run.state !== "running") remember(run, tenant);
    };
  }, [run]);

  const change = (news) => setSetup((old) => ({ ...old, ...news }));
  const { body, errors } = useMemo(() => bodyOf(setup), [setup]);
  const isRunning = run?.state === "running";
  const refused = run?.error?.param ? fieldOf(run.error.param) : "";
  const shownErrors = refused && run.setup === setup ? new Map([...errors, [refused, run.error.message]]) : errors;
  const start = () => {
    if (isRunning || errors.size) return;
    saveSetup(setup);
    const next = new Run(setup, body, () => {});
    setRun(next);
    next.start();
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      start();
    } else if (event.key === "Escape" && isRunning && !document.querySelector("dialog[open]")) run.stop();
  };
  // An effect of each render would come too late for who types and presses Enter at once.
  const newest = useRef(onKeyDown);
  newest.current = onKeyDown;
  useEffect(() => {
    const listener = (event) => newest.current(event);
    addEventListener("keydown", listener);
    return () => removeEventListener("keydown", listener);
  }, []);
  const open = ({ setup: earlier, texts }) => {
    const shown = new Run(earlier, bodyOf(earlier).body, () => {});
    shown.state = "done";
    shown.outputs = texts.map((text) => Object.assign(new Output(), { text, state: "cut" }));
    setSetup(earlier);
    setRun(shown);
  };
  // Columns that were changed after a run show nothing of it.
  const shown = run && run.setup.columns === setup.columns ? run : null;
  // Outputs change often: what does not depend on them is not drawn again.
  const form = useMemo(
    () => html`<${Request} setup=${setup} change=${change} models=${models} errors=${shownErrors} />`,
    [setup, models, errors, run?.state],
  );
  const foot = useMemo(
    () => html`<${Foot} setup=${setup} body=${body} models=${models} reference=${reference} onReference=${setReference}
      isRendered=${isRendered} onRendered=${setRendered} />`,
    [setup, models, reference, isRendered],
  );
  return html`<h1 class="hidden-text">${t("playground.title")}</h1>
    <div class="playground stack">
      ${form}
      <div class="row">
        <button class="primary" onClick=${start} disabled=${isRunning || errors.size > 0}>
          ${t(run?.state === "gone" || run?.state === "stopped" ? "playground.runAgain" : "playground.run")}
          <kbd>Ctrl+Enter</kbd></button>
        <button onClick=${() => run.stop()} disabled=${!isRunning}>${t("playground.stop")} <kbd>Esc</kbd></button>
        <${Summary} run=${shown ?? run} />
        <div class="row end"><${History} onOpen=${open} /></div>
      </div>
      <${Columns} setup=${setup} change=${change} run=${shown} reference=${reference} isRendered=${isRendered}
        models=${models} />
      ${foot}
    </div>`;
}

function Request({ setup, change, models, errors }) {
  const isChat = setup.kind === "chat";
  const set = (name, text) => change({ options: { ...setup.options, [name]: text } });
  const fields = isChat ? [...FIELDS, ...CHAT_FIELDS] : FIELDS;
  const numSet = fields.filter(({ name }) => setup.options[name]).length;
  const isBad = fields.some(({ name }) => errors.has(name));
  return html`<div class="stack">
    <${Prompt} setup=${setup} change=${change} models=${models} error=${errors.get("prompt") ?? errors.get("messages")} />
    <div class="row top">
      <details class="card" open=${isBad || null}>
        <summary>${t("playground.sampling")} <span class="second">${count(numSet)}</span></summary>
        <${Options} fields=${fields} values=${setup.options} errors=${errors} onInput=${set} />
      </details>
      <${Structured} structured=${setup.structured} error=${errors.get("structured_outputs")}
        onChange=${(structured) => change({ structured })} />
    </div>
  </div>`;
}

function Structured({ structured, error, onChange }) {
  const { kind, text } = structured;
  const hasText = kind !== "none" && kind !== "json_object";
  return html`<details class="card" open=${error ? true : null}>
    <summary>${t("playground.structured")} ${kind !== "none" && html`<code>${kind}</code>`}</summary>
    <div class="stack">
      <label>${t("playground.form")}
        <select value=${kind} onChange=${(event) => onChange({ kind: event.target.value, text })}>
          ${STRUCTURES.map((name) => html`<option key=${name} value=${name}>${name === "none" ? t("playground.none") : name}</option>`)}
        </select>
      </label>
      ${hasText &&
      html`<label>${t(`playground.${kind}`)}
        <textarea rows="4" spellcheck="false" value=${text} aria-invalid=${error ? "true" : null}
          onInput=${(event) => onChange({ kind, text: event.target.value })} />
      </label>`}
      ${error && html`<p class="bad" role="alert">${error}</p>`}
    </div>
  </details>`;
}

/** How the run stands, in one line. */
function Summary({ run }) {
  if (!run) return null;
  if (run.state === "running") return html`<span class="second">${t("playground.running")}</span>`;
  const isRestarted = run.timings.some(({ restarts }) => restarts > 0);
  return html`<span role="status">
    ${run.state === "gone" && html`<span class="bad">${t("playground.gone")}</span>`}
    ${run.state === "stopped" && html`<span class="warn">${t("playground.stopped")}</span>`}
    ${run.state === "failed" && html`<span class="bad">${run.error.message}</span>`}
    ${run.timings.length > 0 && html`<span class="second"> ${batchText(run.timings)}</span>`}
    ${isRestarted && html` <span class="warn">${t("playground.restarted")}</span>`}
  </span>`;
}

function batchText(timings) {
  const first = Math.min(...timings.map(({ first_step }) => first_step));
  const last = Math.max(...timings.map(({ last_step }) => last_step));
  const isOne = timings.every(({ first_step }) => first_step === first);
  const values = { rows: timings.length, first, last };
  return t(isOne ? "playground.oneBatch" : "playground.batches", values);
}

function Columns({ setup, change, run, reference, isRendered, models }) {
  const [picking, setPicking] = useState(null);
  const [shown, setShown] = useState(0);
  const { columns } = setup;
  const set = (index, parts) => change({ columns: columns.with(index, parts) });
  const pick = (adapter) => {
    const part = adapter && { name: adapter.name, digest: adapter.digest, scale: 1 };
    if (picking === "new") change({ columns: [...columns, part ? [part] : []] });
    else {
      set(picking, [...columns[picking], part]);
      setPicking(null);
    }
  };
  const indexOfReference = reference === "base" ? columns.findIndex((parts) => !parts.length) : Number(reference);
  const compared = reference === "none" ? null : run?.outputs[indexOfReference];
  const model = setup.model || models[0] || "";
  const reply = setup.kind === "chat" && ((index) => change({ messages: replied(setup.messages, run.outputs[index].text) }));
  const visible = Math.min(shown, columns.length - 1);
  return html`<div class="tabs" role="group" aria-label=${t("playground.outputs")}>
      ${columns.map(
        (parts, index) => html`<button class="small" key=${index} aria-pressed=${index === visible ? "true" : "false"}
          onClick=${() => setShown(index)}><${Mark} digest=${parts[0]?.digest ?? ""} short /> <${Name} of=${labelOf(parts)} /></button>`,
      )}
    </div>
    <div class="columns" aria-busy=${run?.state === "running" ? "true" : "false"}>
      ${columns.map(
        (parts, index) => {
          const output = run?.outputs[index] ?? null;
          const column = () => html`<${Column} isShown=${index === visible} label=${labelOf(parts)} output=${output}
            reference=${compared ?? null} isRendered=${isRendered} onReply=${reply && (() => reply(index))}
            head=${html`<${Head} parts=${parts} onChange=${(changed) => set(index, changed)} onCompose=${() => setPicking(index)}
              onRemove=${columns.length > 1 ? () => change({ columns: columns.toSpliced(index, 1) }) : null} />`} />`;
          const depends = [setup, output, output?.state, compared, compared?.state, isRendered, index === visible];
          return html`<${Kept} key=${index} make=${column} depends=${depends} />`;
        },
      )}
    </div>
    <button class="more" disabled=${columns.length >= MAX_COLUMNS} onClick=${() => setPicking("new")}>+ ${t("playground.add")}</button>
    ${picking !== null &&
    html`<${Picker} title=${t("playground.add")} model=${model} hasBase=${picking === "new"}
      isFull=${columns.length >= MAX_COLUMNS} onPick=${pick} onClose=${() => setPicking(null)} />`}`;
}

/** What is drawn again only when one of the values that it depends on changes. */
function Kept({ make, depends }) {
  return useMemo(make, depends);
}

const replied = (messages, content) => [...messages, { role: "assistant", content }, { role: "user", content: "" }];

/** A column's name as plain text, for those who hear it. */
function labelOf(parts) {
  if (!parts.length) return t("playground.base");
  return parts.map(({ name, scale }) => (scale === 1 ? name : `${scale} × ${name}`)).join(" + ");
}

function Head({ parts, onChange, onCompose, onRemove }) {
  const set = (index, scale) => onChange(parts.with(index, { ...parts[index], scale }));
  return html`<div class="head">
    ${!parts.length && html`<div class="part"><${Mark} digest="" /> <strong>${t("playground.base")}</strong></div>`}
    ${parts.map(
      ({ name, digest, scale }, index) => html`<div class="part" key=${index}>
        <${Mark} digest=${digest} /> <strong><${Name} of=${name} /></strong>
        <input type="range" min="-2" max="2" step="0.05" value=${scale} aria-label=${t("playground.scaleOf", { name })}
          onInput=${(event) => set(index, Number(event.target.value))} />
        <output class="number">×${count(scale, { minimumFractionDigits: 2 })}</output>
        ${parts.length > 1 &&
        html`<button class="small quiet" aria-label=${t("playground.drop", { name })}
          onClick=${() => onChange(parts.toSpliced(index, 1))}>−</button>`}
      </div>`,
    )}
    <div class="row end">
      ${parts.length > 0 && html`<button class="small quiet" onClick=${onCompose}>+ ${t("playground.compose")}</button>`}
      ${onRemove && html`<button class="small quiet" aria-label=${t("playground.remove", { name: labelOf(parts) })}
        onClick=${onRemove}>×</button>`}
    </div>
  </div>`;
}

function Foot({ setup, body, models, reference, onReference, isRendered, onRendered }) {
  return html`<div class="row foot">
    <span class="second">${t("playground.copyAs")}</span>
    <${Copy} label="curl" text=${() => curl(body)} />
    <${Copy} label="Python openai" text=${() => openai(body, setup.model || models[0])} />
    ${setup.kind === "completion" && models.length < 2 && html`<${Copy} label="Python tritonclient" text=${() => triton(body)} />`}
    <div class="row end">
      <label class="check"><input type="checkbox" checked=${isRendered} onChange=${(event) => onRendered(event.target.checked)} />
        ${t("playground.rendered")}</label>
      <label class="row">${t("playground.differencesTo")}
        <select class="small" value=${reference} onChange=${(event) => onReference(event.target.value)}>
          <option value="base">${t("playground.base")}</option>
          <option value="none">${t("playground.none")}</option>
          ${setup.columns.map((parts, index) => parts.length > 0 && html`<option key=${index} value=${index}>${labelOf(parts)}</option>`)}
        </select></label>
    </div>
  </div>`;
}
