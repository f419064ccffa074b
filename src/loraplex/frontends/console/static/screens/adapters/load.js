// Load or replace an adapter: its files, what a load would do, and the name.
import { ApiError, apiError, get, keyHeader, post, remove, useMe } from "../../lib/api.js";
import { html, MAX_FILES, useEffect, useId, useRef, useState } from "../../lib/html.js";
import { columnsLink, go, linkTo } from "../../lib/route.js";
import { bytes, count, t } from "../../lib/texts.js";
import { Dialog, Name, Tabs } from "../../parts/basics.js";

const NO_MORE = { task_id: "", model: "", canary: false, pin: false };
const NOTHING = { step: "choose", plan: null, sent: new Map(), path: "", trial: null, tried: "", error: null, loaded: null };

/**
 * @param {{name: string, given: Given | null, onClose: () => void,
 *   onLoaded: (adapter: {name: string, digest: string}) => void}} props name: of the adapter that is replaced; empty: a new one; given: what
 *   was dropped on the page
 */
export function LoadDialog({ name: replaced, given, onClose, onLoaded }) {
  const { uploads } = useMe();
  const field = useRef(null);
  const isNamed = useRef(replaced !== "");
  const [name, setName] = useState(replaced);
  const [more, setMore] = useState(NO_MORE);
  const [work, setWork] = useState(NOTHING);
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
  useEffect(() => () => void reset(), []);
  useEffect(() => {
    if (given) take(given);
  }, [given]);

  /** Do something with the server; an error is shown unless it was stopped. */
  const step = async (kind, signal, action) => {
    set({ step: kind, error: null });
    try {
      await action();
    } catch (error) {
      if (!signal.aborted) set({ step: "ready", error });
    }
  };
  /** A dry run of these files, this name and this base: nothing is loaded without it. */
  const check = (path, as, base = more.model) => {
    if (!path || !as) return field.current?.focus();
    running.current.abort();
    running.current = new AbortController();
    const { signal } = running.current;
    return step("trying", signal, async () => {
      const body = { name: as, path, ...(base && { model: base }), replace: true, dry_run: true, canary: true, details: true };
      let trial = await post("/v1/adapters", body, signal);
      // Outputs like the base model's are no refusal, unless the box is ticked.
      if (!trial.ok && trial.changes_base === false && !more.canary) {
        trial = { ...(await post("/v1/adapters", { ...body, canary: false }, signal)), changes_base: false };
      }
      set({ step: "ready", trial, tried: keyOf(path, as, base) });
    });
  };
  const take = async (source) => {
    const signal = reset();
    const plan = "files" in source ? planOf(source.files, uploads?.files ?? []) : null;
    const paths = plan ? plan.taken.map((one) => one.path) : [source.path];
    const as = isNamed.current ? name : (paths.map(nameOf).find(Boolean) ?? "");
    setWork({ ...NOTHING, plan });
    if (plan && (!uploads || !plan.taken.length || plan.numBytes > uploads.max_bytes)) return;
    setName(as);
    if (!plan) {
      set({ path: source.path });
      await check(source.path, as);
      return;
    }
    const onProgress = (file, sent) => setWork((old) => ({ ...old, sent: new Map(old.sent).set(file, sent) }));
    await step("sending", signal, async () => {
      held.current = await send(plan.taken, onProgress, signal);
      set({ step: "ready", path: held.current });
      await check(held.current, as);
    });
  };
  const load = () =>
    step("loading", running.current.signal, async () => {
      const { task_id: id, model, canary, pin } = more;
      const fields = { ...(id && { task_id: Number(id) }), ...(model && { model }), canary };
      const { version, digest } = await post("/v1/adapters", { name, path: work.path, replace: isReplacement(work.trial), ...fields });
      held.current = "";
      if (pin) await post(`/v1/adapters/${encodeURIComponent(name)}/pin`, { pinned: true });
      setWork({ ...NOTHING, loaded: { name, version } });
      onLoaded({ name, digest });
    });

  const { plan, trial, error, path, loaded } = work;
  const isBusy = ["sending", "trying", "loading"].includes(work.step);
  const isTried = trial !== null && work.tried === keyOf(path, name, more.model);
  const submit = (event) => {
    event.preventDefault();
    if (isTried && trial.ok && !isBusy) load();
  };
  return html`<${Dialog} kind="load" title=${replaced ? t("load.replaceTitle", { name: replaced }) : t("load.title")} onClose=${onClose}>
    ${loaded
      ? html`<${Loaded} of=${loaded} onClose=${onClose} />`
      : html`<form class="load-body" onSubmit=${submit}>
        <div class="load-main stack">
          <${Sources} onGiven=${take} isBusy=${isBusy} path=${plan ? "" : path || (given?.path ?? "")}>
            ${plan && html`<${Files} plan=${plan} sent=${work.sent} isSending=${work.step === "sending"} max=${uploads?.max_bytes ?? 0} />`}
          <//>
          <p aria-live="polite" class="load-step">${isBusy && t(`load.${work.step}`)}</p>
          ${error && html`<p class="bad" role="alert">${error.message}</p>`}
          ${error && plan && (!path || error.code === "upload_not_found") && html`<div><button type="button"
            onClick=${() => take({ files: plan.taken })}>${t("load.again")}</button></div>`}
          ${isTried && html`<${Report} trial=${trial} />`}
          <label>${t("load.name")}<br /><input class="load-name" ref=${field} value=${name} required maxlength="256" readonly=${replaced !== ""}
            autocomplete="off" spellcheck=${false} aria-invalid=${error?.param === "name"}
            onInput=${(event) => { isNamed.current = true; setName(event.target.value); }} onChange=${(event) => check(path, event.target.value)} /></label>
          <${More} more=${more} onChange=${(change) => setMore({ ...more, ...change })} onModel=${(model) => check(path, name, model)} error=${error} />
        </div>
        <div class="row end load-buttons">
          <button type="button" onClick=${onClose}>${t("shell.cancel")}</button>
          <${Submit} trial=${isTried ? trial : null} isBusy=${isBusy} name=${name} />
        </div>
      </form>`}
  <//>`;
}

const keyOf = (path, name, model) => JSON.stringify([path, name, model]);

/** Whether the name has an adapter already. */
function isReplacement({ replaces }) {
  return replaces !== null;
}

function Submit({ trial, isBusy, name }) {
  if (trial?.ok && trial.adapter.unchanged) {
    return html`<button type="button" class="primary" onClick=${() => go(linkTo("adapters", name))}>${t("load.open", { name })}</button>`;
  }
  const version = trial?.adapter?.version ?? 1;
  const text = trial?.ok && otherBase(trial.adapter) ? t("load.anyway") : name ? t("load.loadAs", { name, version }) : t("load.load");
  return html`<button class="primary" disabled=${isBusy || !trial?.ok}>${text}</button>`;
}

function More({ more, onChange, onModel, error }) {
  const check = (name) => html`<label class="check"><input type="checkbox" checked=${more[name]}
    onChange=${(event) => onChange({ [name]: event.target.checked })} />${t(`load.${name}`)}</label>`;
  return html`<details><summary>${t("load.more")}</summary>
    <div class="stack">
      <label>${t("adapters.taskId")}<br /><input inputmode="numeric" pattern="[0-9]*" value=${more.task_id} aria-invalid=${error?.param === "task_id"}
        onInput=${(event) => onChange({ task_id: event.target.value })} /></label>
      <label>${t("adapters.base")}<br /><input value=${more.model} spellcheck=${false} aria-invalid=${error?.param === "model"}
        onInput=${(event) => onChange({ model: event.target.value })} onChange=${(event) => onModel(event.target.value)} /></label>
      ${check("pin")}${check("canary")}
    </div>
  </details>`;
}

function Loaded({ of, onClose }) {
  return html`<p class="good" role="status">✓ <${Name} of=${of.name} /> ${t("load.loaded", { version: of.version })}</p>
    <div class="row end">
      <button type="button" onClick=${onClose}>${t("shell.close")}</button>
      <button type="button" onClick=${() => go(linkTo("adapters", of.name))}>${t("load.openIt")}</button>
      <button type="button" class="primary" onClick=${() => go(columnsLink([null, of.name]))}>${t("adapters.compareBase")}</button>
    </div>`;
}

// A dry run in detail: the verdict, and everything that somebody has to do first.

const FIRST_REFUSED = 20;
const FIRST_APPLIED = 100;

/** @param {{trial: any}} props the response to a dry run with details */
function Report({ trial }) {
  const { adapter, error, tensors } = trial;
  const refused = tensors.filter((tensor) => tensor.refused);
  const others = tensors.filter((tensor) => !tensor.refused);
  return html`<section class="stack report" aria-label=${t("load.result")}>
    <${Verdict} trial=${trial} />
    ${error && !refused.length && html`<p class="bad"><${Name} of=${error.message} /></p>`}
    ${refused.length > 0 && html`<${Tensors} tensors=${refused} first=${FIRST_REFUSED} />`}
    ${adapter && html`<${Facts} trial=${trial} />`}
    ${adapter && otherWarnings(adapter).map((text) => html`<p class="warn" key=${text}>⚠ <${Name} of=${text} /></p>`)}
    ${(adapter?.notes ?? []).map((text) => html`<p class="second" key=${text}>ⓘ <${Name} of=${text} /></p>`)}
    ${others.length > 0 && html`<details>
      <summary>${t("load.tensorsOf", { n: trial.num_tensors - trial.num_refused, format: trial.format })}</summary>
      <${Tensors} tensors=${others} first=${FIRST_APPLIED} />
      ${trial.num_tensors > tensors.length && html`<p class="second">${t("load.cut", { n: tensors.length, all: trial.num_tensors })}</p>`}
    </details>`}
  </section>`;
}

function Verdict({ trial }) {
  const { adapter, num_refused: refused, num_tensors: all } = trial;
  if (!trial.ok) {
    const why = refused ? ` ${t("load.refusedOf", { n: refused, all })}` : "";
    return html`<h3 class="bad">✗ ${t("load.refused")}${why}</h3>`;
  }
  if (adapter.unchanged) return html`<h3>${t("load.unchanged", { version: adapter.version })}</h3>`;
  const base = otherBase(adapter);
  return html`<h3 class="good">✓ ${t("load.ok")}</h3>
    ${base && html`<p class="warn">⚠ ${t("adapters.otherBase", { trained: base, base: adapter.model })}</p>`}`;
}

function Facts({ trial }) {
  const { adapter, replaces } = trial;
  const rows = [
    !adapter.unchanged && ["changes", html`<${Changes} adapter=${adapter} replaces=${replaces} />`],
    ["memory", memory(trial)],
    trial.changes_base === true && ["output", t("load.differs", { most: difference(adapter) })],
    trial.changes_base === false && ["output", html`<span class="warn">⚠ ${t("load.same")}</span>`],
    ["weights", t("load.size", { rank: adapter.rank, size: bytes(adapter.num_bytes), types: adapter.content.dtypes.join(", ") })],
  ];
  return html`<dl class="report-facts">${rows.filter(Boolean).map(([name, value]) => html`<div key=${name}>
    <dt>${t(`load.${name}`)}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** What a load makes of the name, and what becomes of its requests. */
function Changes({ adapter, replaces }) {
  const [before, setBefore] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    setBefore(null);
    if (replaces) {
      const path = `/v1/adapters/${encodeURIComponent(adapter.name)}`;
      get(path).then((found) => isCurrent && setBefore(found), () => {});
    }
    return () => {
      isCurrent = false;
    };
  }, [adapter]);
  if (!replaces) return html`${t("load.isNew")} <${Name} of=${adapter.name} /> v${adapter.version}`;
  const short = before ? inShort(before, adapter) : t("load.rankChange", { before: replaces.rank, after: adapter.rank });
  return html`<${Name} of=${adapter.name} /> v${replaces.version} → v${adapter.version}${short && `: ${short}`}
    ${replaces.num_running > 0 && html`; ${t("load.endWith", { n: replaces.num_running, version: replaces.version })}`}`;
}

function memory({ adapter, free_pages: free, evicts, fits_now: fits }) {
  const pages = t("load.pages", { pages: adapter.content.device_pages, free });
  if (fits) return pages;
  const who = (evicts ?? []).join(", ");
  return html`<span class="warn">⚠ ${pages} ${who ? t("load.evicts", { who }) : t("load.full")}</span>`;
}

function difference(adapter) {
  return count(adapter.canary.largest_difference, { maximumFractionDigits: 2 });
}

function Tensors({ tensors, first }) {
  const [isWhole, setWhole] = useState(false);
  const shown = isWhole ? tensors : tensors.slice(0, first);
  return html`<div class="tensors" role="region" tabindex="0" aria-label=${t("load.table")}>
      <table>
        <thead><tr>
          <th>${t("load.tensor")}</th><th>${t("load.shape")}</th><th class="number">${t("load.rank")}</th>
        </tr></thead>
        <tbody>${shown.map((tensor) => html`<${Row} key=${tensor.name} tensor=${tensor} />`)}</tbody>
      </table>
    </div>
    ${shown.length < tensors.length && html`<div><button type="button" class="small" onClick=${() => setWhole(true)}>
      ${t("load.showAll", { n: tensors.length })}</button></div>`}`;
}

function Row({ tensor }) {
  const [sign, kind] = tensor.refused ? ["✗", "bad"] : tensor.applied ? ["✓", "good"] : ["–", "second"];
  const word = tensor.refused ? "refusedOne" : tensor.applied ? "applied" : "leftOut";
  return html`<tr>
    <td><span class=${kind} title=${t(`load.${word}`)}>${sign}</span> <code><${Name} of=${tensor.name} /></code>
      ${tensor.reason && html`<br /><span class=${kind}><${Name} of=${tensor.reason} /></span>`}</td>
    <td>${tensor.dtype} ${tensor.shape.join("×")}</td>
    <td class="number">${tensor.rank ?? "–"}</td>
  </tr>`;
}

// What differs between two versions of an adapter.

/**
 * @typedef {{content: any, rank: number, num_bytes: number, source?: string, warnings?: string[],
 *   declared_base?: string | null, digest?: string}} Described
 */

/**
 * Only the facts that differ, with both values.
 * @param {Described} before @param {Described} after
 * @returns {{fact: string, before: string, after: string}[]}
 */
export function changes(before, after) {
  const facts = [
    ["base", (one) => one.declared_base ?? "–"],
    ["rank", (one) => String(one.rank)],
    ["modules", (one) => modulesOf(one).join(", ")],
    ["layers", (one) => String(one.content.layers.length)],
    ["size", (one) => bytes(one.num_bytes)],
    ["types", (one) => one.content.dtypes.join(", ")],
    ["source", (one) => one.source || "–"],
    ["warnings", (one) => (one.warnings ?? []).join("; ") || "–"],
  ];
  return facts
    .map(([fact, value]) => ({ fact, before: value(before), after: value(after) }))
    .filter((one) => one.before !== one.after);
}

/** The modules that came and went: "+ up_proj, − q_proj". @param {Described} before @param {Described} after */
function moduleChanges(before, after) {
  const [old, next] = [modulesOf(before), modulesOf(after)];
  const came = next.filter((name) => !old.includes(name)).map((name) => `+ ${name}`);
  const went = old.filter((name) => !next.includes(name)).map((name) => `− ${name}`);
  return [...came, ...went];
}

/** The changes in one line, for a replacement. @param {Described} before @param {Described} after */
function inShort(before, after) {
  const rank = before.rank === after.rank ? [] : [t("load.rankChange", { before: before.rank, after: after.rank })];
  return [...rank, ...moduleChanges(before, after)].join(", ");
}

const modulesOf = ({ content }) => Object.keys(content.module_layers).sort();

const OTHER_BASE = "other_base";

/**
 * The base that an adapter names, if it is another one than the served one.
 * @param {{declared_base: string | null, warning_codes: string[]}} of
 */
export const otherBase = ({ declared_base: declared, warning_codes: codes }) => (codes.includes(OTHER_BASE) ? declared : null);

/**
 * The warnings without the one that otherBase() is about.
 * @param {{declared_base: string | null, warnings: string[], warning_codes: string[]}} of
 */
export const otherWarnings = (of) => of.warnings.filter((_, i) => !otherBase(of) || of.warning_codes[i] !== OTHER_BASE);

// Where an adapter comes from: files of this machine, or a path or address that the server reads.

/** @typedef {{files: Found[]} | {path: string}} Given */

/** @param {{onGiven: (given: Given) => void, isBusy?: boolean, path?: string, children?: unknown}} props */
export function Sources({ onGiven, isBusy = false, path = "", children }) {
  const { uploads } = useMe();
  const [kind, setKind] = useState(path || !uploads ? "path" : "files");
  const options = [["files", t("load.upload")], ["path", t("load.path")]];
  return html`<div class="stack sources">
    <div><${Tabs} label=${t("load.from")} value=${kind} options=${options} onChoice=${setKind} /></div>
    ${kind === "path"
      ? html`<${Path} path=${path} onGiven=${onGiven} />`
      : uploads
        ? html`<${Drop} onGiven=${onGiven} isBusy=${isBusy} />`
        : html`<p>${t("load.off")}</p><pre>loraplex serve … --uploads</pre>`}
    ${children}
  </div>`;
}

/** Checked when the field is left or Enter is pressed, not at each key. */
function Path({ path, onGiven }) {
  const take = (event) => {
    const text = event.target.value.trim();
    if (text) onGiven({ path: text });
  };
  const onKey = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    event.target.blur();
  };
  return html`<label>${t("load.path")}<br />
    <input class="source-path" defaultValue=${path} placeholder="hf://owner/adapter" autocomplete="off" spellcheck=${false}
      onChange=${take} onKeyDown=${onKey} /></label>`;
}

function Drop({ onGiven, isBusy }) {
  const [isOver, setOver] = useState(false);
  const files = useRef(null);
  const folder = useRef(null);
  const hint = useId();
  const take = (event) => {
    const found = chosen(event.target.files);
    event.target.value = "";
    if (found.length) onGiven({ files: found });
  };
  return html`<div class="drop ${isOver ? "over" : ""}" onDragEnter=${() => setOver(true)} onDragLeave=${() => setOver(false)}
      onDrop=${() => setOver(false)}>
    <p id=${hint}>${t("load.drop")}</p>
    <div class="row" role="group" aria-describedby=${hint}>
      <button type="button" disabled=${isBusy} onClick=${() => folder.current.click()}>${t("load.folder")}</button>
      <button type="button" disabled=${isBusy} onClick=${() => files.current.click()}>${t("load.files")}</button>
    </div>
    <input ref=${folder} type="file" webkitdirectory hidden onChange=${take} />
    <input ref=${files} type="file" multiple hidden onChange=${take} />
  </div>`;
}

/**
 * What is sent, and what is not.
 * @param {{plan: Plan, sent: Map<string, number>, isSending: boolean, max: number}} props
 */
function Files({ plan, sent, isSending, max }) {
  if (!plan.taken.length) {
    return plan.left.length > 0 && html`<p class="bad" role="alert">${t("load.none")} ${left(plan)}</p>`;
  }
  return html`<ul class="load-files">
      ${plan.taken.map(({ name, path, file }) => {
        const own = path.split("/").pop();
        return html`<li key=${name}>
          <span><code>${name}</code>${own !== name && html` <span class="second">← <${Name} of=${own} /></span>`}</span>
          <span class="number">${bytes(file.size)}</span>
          ${isSending && html`<progress aria-label=${name} max=${file.size || 1} value=${sent.get(name) ?? 0}></progress>`}
        </li>`;
      })}
    </ul>
    ${plan.left.length > 0 && html`<p class="second">${t("load.left", { n: plan.left.length })} ${left(plan)}</p>`}
    ${plan.numBytes > max && html`<p class="bad" role="alert">${t("load.tooLarge", { size: bytes(plan.numBytes), max: bytes(max) })}</p>`}`;
}

function left({ left: paths }) {
  const shown = paths.slice(0, 5);
  const rest = paths.length - shown.length;
  return html`${shown.map((path, i) => html`${i > 0 && ", "}<${Name} of=${path} />`)}${rest > 0 && ` … +${count(rest)}`}`;
}

// Files of an adapter: which are taken of what was dropped or chosen, and how they are sent.

const CONFIG = "adapter_config.json";
const WEIGHTS = "adapter_model.safetensors";
const SINGLE = "adapter";
const SUFFIXES = [".safetensors", ".gguf"];

/** @typedef {import("../../lib/html.js").Found} Found */
/** @typedef {{name: string, path: string, file: File}} Taken name: at the server */
/** @typedef {{taken: Taken[], left: string[], numBytes: number}} Plan left: paths that are not sent */

/** @param {FileList} files */
export function chosen(files) {
  return [...files].slice(0, MAX_FILES).map((file) => ({ path: file.webkitRelativePath || file.name, file }));
}

/**
 * Which files to send, and under which names: those of the outermost folder that has an adapter.
 * @param {Found[]} found @param {string[]} names those that the server takes
 * @returns {Plan}
 */
function planOf(found, names) {
  const folders = new Map();
  for (const one of found) {
    const end = one.path.lastIndexOf("/");
    const folder = one.path.slice(0, Math.max(end, 0));
    if (isWanted(one.file.name, names)) folders.set(folder, [...(folders.get(folder) ?? []), one]);
  }
  const depth = (folder) => (folder ? folder.split("/").length : 0);
  const [folder] = [...folders.keys()].sort((one, other) => depth(one) - depth(other));
  const taken = named(folders.get(folder) ?? [], names).sort((one, other) => (one.name < other.name ? -1 : 1));
  const sent = new Set(taken.map((one) => one.path));
  return {
    taken,
    left: found.map((one) => one.path).filter((path) => !sent.has(path)),
    numBytes: taken.reduce((sum, one) => sum + one.file.size, 0),
  };
}

function isWanted(name, names) {
  return names.includes(name) || suffixOf(name) !== undefined;
}

function suffixOf(name) {
  return SUFFIXES.find((suffix) => name.endsWith(suffix));
}

/** A single file of weights may have any name: its name at the server says what it is. */
function named(found, names) {
  const taken = found
    .filter(({ file }) => names.includes(file.name))
    .map((one) => ({ ...one, name: one.file.name }));
  const others = found.filter(({ file }) => !names.includes(file.name));
  if (others.length !== 1 || taken.some(({ name }) => suffixOf(name) || name.endsWith(".bin"))) return taken;
  const hasConfig = taken.some(({ name }) => name === CONFIG);
  const suffix = suffixOf(others[0].file.name);
  const isWeights = hasConfig && suffix === SUFFIXES[0];
  return [...taken, { ...others[0], name: isWeights ? WEIGHTS : SINGLE + suffix }];
}

/** Names of files that say nothing of their adapter. */
const NAMELESS = new Set(["adapter_config", "adapter_model", "model", "pytorch_model"]);

/**
 * A name for the adapter: its folder's, or that of its file; empty where that says nothing.
 * @param {string} path of a file, as it was dropped, or of a source
 */
function nameOf(path) {
  const parts = path.replace(/\/+$/, "").split("/");
  const isFile = /\.(safetensors|gguf|json|bin)$/.test(parts.at(-1));
  if (!isFile || parts.length > 1) return (isFile ? parts.at(-2) : parts.at(-1)).slice(0, 256);
  const stem = parts[0].replace(/\.\w+$/, "");
  return NAMELESS.has(stem) ? "" : stem.slice(0, 256);
}

/**
 * Send the files, and return the source to load. What was sent before a failure is removed.
 * @param {Taken[]} taken @param {(name: string, sent: number) => void} onProgress
 * @param {AbortSignal} signal @returns {Promise<string>}
 */
export async function send(taken, onProgress, signal) {
  const upload = await post("/v1/uploads", undefined, signal);
  try {
    for (const { name, file } of taken) {
      await put(`/v1/uploads/${upload.id}/${encodeURIComponent(name)}`, file, (sent) => onProgress(name, sent), signal);
    }
  } catch (error) {
    discard(upload.path);
    throw error;
  }
  return upload.path;
}

/** Remove an upload that nobody will load. Its age removes it otherwise. @param {string} path */
function discard(path) {
  remove(`/v1/uploads/${path.replace("upload://", "")}`).catch(() => {});
}

/** fetch() tells nothing of the progress of what it sends. */
function put(url, file, onProgress, signal) {
  return new Promise((done, fail) => {
    const xhr = new XMLHttpRequest();
    const stop = () => xhr.abort();
    xhr.open("PUT", url);
    for (const [name, value] of Object.entries(keyHeader())) xhr.setRequestHeader(name, value);
    xhr.setRequestHeader("content-type", "application/octet-stream");
    xhr.upload.onprogress = (event) => onProgress(event.loaded);
    xhr.onload = () => {
      if (xhr.status >= 200 && xhr.status < 300) done();
      else fail(errorOf(xhr));
    };
    xhr.onerror = () => fail(new ApiError(`${file.name}: network error`));
    xhr.onabort = () => fail(new DOMException("stopped", "AbortError"));
    xhr.onloadend = () => signal.removeEventListener("abort", stop);
    signal.addEventListener("abort", stop);
    xhr.send(file);
  });
}

function errorOf(xhr) {
  let error = {};
  try {
    error = JSON.parse(xhr.responseText).error ?? {};
  } catch {
    // A proxy's page, or nothing at all.
  }
  return apiError(error, xhr.status, xhr.responseText, xhr.getResponseHeader("retry-after"));
}
