// Files of an adapter from this machine: dropped or chosen, sent, tried out in detail, and loaded.
import { post } from "../lib/api.js";
import { html, useEffect, useId, useRef, useState } from "../lib/html.js";
import { useMe } from "../lib/me.js";
import { bytes, count, t } from "../lib/texts.js";
import { chosen, discard, dropped, nameOf, planOf, send } from "../lib/upload.js";
import { Name } from "../parts/name.js";
import { Trial } from "../parts/trial.js";

const NO_PLAN = { taken: [], left: [], numBytes: 0 };
const NOTHING = { step: "choose", plan: NO_PLAN, sent: new Map(), path: "", trial: null, error: null };

/**
 * @param {{name: string, onLoaded: (name: string) => void}} props name: of the adapter that is
 *   replaced; empty: a new one
 */
export function UploadPanel({ name = "", onLoaded = () => {} }) {
  const { uploads } = useMe();
  return html`<div class="stack upload">
    <h2>${t("upload.title")}</h2>
    ${uploads
      ? html`<${Uploader} given=${name} limits=${uploads} onLoaded=${onLoaded} />`
      : html`<p>${t("upload.off")}</p><pre>loraplex serve … --uploads</pre>`}
  </div>`;
}

function Uploader({ given, limits, onLoaded }) {
  const [work, setWork] = useState(NOTHING);
  const [name, setName] = useState(given);
  const running = useRef(new AbortController());
  const held = useRef("");
  const set = (change) => setWork((old) => ({ ...old, ...change }));
  const reset = () => {
    running.current.abort();
    running.current = new AbortController();
    if (held.current) discard(held.current);
    held.current = "";
    return running.current.signal;
  };
  useEffect(() => reset, []);

  /** Do something with the server; an error is shown unless it was stopped. */
  const step = async (kind, signal, action) => {
    set({ step: kind, error: null });
    try {
      await action();
    } catch (error) {
      if (!signal.aborted) set({ step: held.current ? "tried" : "choose", error });
    }
  };
  const tryOut = (path, as, signal) =>
    step("trying", signal, async () => {
      const body = { name: as, path, replace: true, dry_run: true, canary: true, details: true };
      const trial = await post("/v1/adapters", body, signal);
      set({ step: "tried", trial });
    });
  const take = async (found) => {
    const signal = reset();
    const plan = planOf(found, limits.files);
    const as = name || nameOf(plan);
    setWork({ ...NOTHING, plan });
    if (!plan.taken.length || plan.numBytes > limits.max_bytes) return;
    setName(as);
    const onProgress = (file, sent) =>
      setWork((old) => ({ ...old, sent: new Map(old.sent).set(file, sent) }));
    await step("sending", signal, async () => {
      held.current = await send(plan.taken, onProgress, signal);
      set({ path: held.current });
      await tryOut(held.current, as, signal);
    });
  };
  const load = () =>
    step("loading", running.current.signal, async () => {
      const body = { name, path: work.path, replace: work.trial.adapter.name === name && exists(work.trial) };
      const { version } = await post("/v1/adapters", body, running.current.signal);
      held.current = "";
      setWork({ ...NOTHING, loaded: { name, version } });
      onLoaded(name);
    });
  const cancel = () => {
    reset();
    setWork(NOTHING);
  };

  const { plan, trial, error } = work;
  const isBusy = ["sending", "trying", "loading"].includes(work.step);
  const isStale = trial?.adapter && trial.adapter.name !== name;
  return html`
    <${Drop} onFound=${take} isBusy=${isBusy} />
    <${Problems} plan=${plan} max=${limits.max_bytes} />
    ${plan.taken.length > 0 && html`<${Files} plan=${plan} sent=${work.sent} isSending=${work.step === "sending"} />`}
    <div aria-live="polite" class="row">
      ${work.step === "sending" && html`<span>${t("upload.sending")}</span>`}
      ${work.step === "trying" && html`<span>${t("upload.trying")}</span>`}
      ${work.step === "loading" && html`<span>${t("upload.loading")}</span>`}
      ${work.loaded && html`<span class="good">✓ <${Name} of=${work.loaded.name} />: ${t("upload.loaded", { version: work.loaded.version })}</span>`}
      ${isBusy && html`<button class="small" onClick=${cancel}>${t("shell.cancel")}</button>`}
    </div>
    ${error && html`<p class="bad" role="alert">${error.message}</p>`}
    ${error && !work.path && html`<div class="row">
      <button onClick=${() => take(plan.taken)}>${t("upload.again")}</button></div>`}
    ${work.path && work.step !== "sending" && html`<form class="stack" onSubmit=${(event) => { event.preventDefault(); load(); }}>
      ${trial && html`<${Trial} trial=${trial} />`}
      <div class="row">
        <label>${t("upload.name")}<br />
          <input value=${name} required maxlength="256" readonly=${given !== ""} autocomplete="off" spellcheck=${false}
            aria-invalid=${error?.param === "name"} onInput=${(event) => setName(event.target.value)} /></label>
        <div class="row end">
          <button type="button" disabled=${isBusy || !name} onClick=${() => tryOut(work.path, name, running.current.signal)}>
            ${t("upload.tryAgain")}</button>
          <button class="primary" disabled=${isBusy || !name || !trial?.ok || isStale}>
            ${trial && exists(trial) ? t("upload.replace", { version: trial.adapter.version }) : t("upload.load")}</button>
        </div>
      </div>
      ${isStale && html`<p class="second">${t("upload.renamed")}</p>`}
      ${error?.code === "upload_not_found" && html`<div class="row">
        <button type="button" onClick=${() => take(plan.taken)}>${t("upload.again")}</button></div>`}
    </form>`}`;
}

/** Whether the name had an adapter before. */
function exists({ adapter }) {
  return adapter !== null && (adapter.unchanged || adapter.version > 1);
}

function Drop({ onFound, isBusy }) {
  const [isOver, setOver] = useState(false);
  const files = useRef(null);
  const folder = useRef(null);
  const hint = useId();
  const drop = async (event) => {
    event.preventDefault();
    setOver(false);
    if (!isBusy) onFound(await dropped(event.dataTransfer));
  };
  const over = (event) => {
    event.preventDefault();
    setOver(true);
  };
  const take = (event) => {
    const found = chosen(event.target.files);
    event.target.value = "";
    if (found.length) onFound(found);
  };
  return html`<div class="drop ${isOver ? "over" : ""}" onDragOver=${over} onDragLeave=${() => setOver(false)} onDrop=${drop}>
    <p id=${hint}>${t("upload.drop")}</p>
    <div class="row" role="group" aria-describedby=${hint}>
      <button type="button" disabled=${isBusy} onClick=${() => folder.current.click()}>${t("upload.folder")}</button>
      <button type="button" disabled=${isBusy} onClick=${() => files.current.click()}>${t("upload.files")}</button>
    </div>
    <input ref=${folder} type="file" webkitdirectory hidden onChange=${take} />
    <input ref=${files} type="file" multiple hidden onChange=${take} />
  </div>`;
}

/** What is wrong with the files before any is sent. */
function Problems({ plan, max }) {
  if (!plan.taken.length && plan.left.length) return html`<p class="bad" role="alert">${t("upload.none")} ${left(plan)}</p>`;
  if (plan.numBytes > max) {
    const size = { size: bytes(plan.numBytes), max: bytes(max) };
    return html`<p class="bad" role="alert">${t("upload.tooLarge", size)}</p>`;
  }
  return plan.left.length > 0 && html`<p class="second">${t("upload.left", { n: plan.left.length })} ${left(plan)}</p>`;
}

function left({ left }) {
  const shown = left.slice(0, 5);
  const rest = left.length - shown.length;
  return html`${shown.map((path, i) => html`${i > 0 && ", "}<${Name} of=${path} />`)}${rest > 0 && ` … +${count(rest)}`}`;
}

function Files({ plan, sent, isSending }) {
  return html`<ul class="upload-files">
    ${plan.taken.map(({ name, path, file }) => {
      const own = path.split("/").pop();
      return html`<li key=${name}>
        <span><code>${name}</code>${own !== name && html` <span class="second">← <${Name} of=${own} /></span>`}</span>
        <span class="number">${bytes(file.size)}</span>
        ${isSending && html`<progress aria-label=${name} max=${file.size || 1} value=${sent.get(name) ?? 0}></progress>`}
      </li>`;
    })}
  </ul>`;
}
