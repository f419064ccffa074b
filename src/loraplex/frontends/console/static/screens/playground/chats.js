// Earlier chats and presets: in this tab, or in this browser if the reader wants that; never the key.
import { html, useState } from "../../lib/html.js";
import { moment, t } from "../../lib/texts.js";
import { Dialog, Name } from "../../parts/basics.js";

const CHATS = "loraplex-chats";
const SETUP = "loraplex-playground";
const TENANT = "loraplex-playground-tenant";
const KEEPS = "loraplex-chats-keep";
const PRESETS = "loraplex-presets";
const MAX_CHATS = 50;
const MAX_LENGTH = 200_000;

/**
 * @typedef {{id: number, at: number, setup: import("./setup.js").Setup,
 *   turns: ReturnType<typeof import("./chat.js").saved>}} Chat at: Unix ms
 * @typedef {{name: string, options: Record<string, string>, system: string,
 *   structured: import("./setup.js").Setup["structured"], tools: import("./setup.js").Setup["tools"]}} Preset
 */

/** Forget what another tenant did in this tab. @param {string} tenant */
export function keepOnlyOf(tenant) {
  if (sessionStorage.getItem(TENANT) !== tenant) {
    sessionStorage.removeItem(CHATS);
    sessionStorage.removeItem(SETUP);
  }
  sessionStorage.setItem(TENANT, tenant);
}

const tenantOf = () => sessionStorage.getItem(TENANT) ?? "";
const place = () => (keepsInBrowser() ? [localStorage, `${CHATS}:${tenantOf()}`] : [sessionStorage, CHATS]);

const keepsInBrowser = () => localStorage.getItem(`${KEEPS}:${tenantOf()}`) === "1";

/** @param {boolean} isOn off: what the browser has is moved to the tab */
function setKeepsInBrowser(isOn) {
  const list = chats();
  const [from, name] = place();
  from.removeItem(name);
  if (isOn) localStorage.setItem(`${KEEPS}:${tenantOf()}`, "1");
  else localStorage.removeItem(`${KEEPS}:${tenantOf()}`);
  write(...place(), list);
}

/** @returns {Chat[]} newest first */
export const chats = () => read(...place()) ?? [];

/** Unless another tenant has the tab by now. @param {Chat} chat @param {string} tenant its own */
export function keepChat(chat, tenant) {
  if (tenantOf() !== tenant || JSON.stringify(chat).length > MAX_LENGTH) return;
  write(...place(), [chat, ...chats().filter(({ id }) => id !== chat.id)].slice(0, MAX_CHATS));
}

/** @param {Chat[]} list */
const setChats = (list) => write(...place(), list.slice(0, MAX_CHATS));

/** @returns {{model: string, setup: import("./setup.js").Setup, chat: Chat | null} | null} before a reload */
export const savedSetup = () => read(sessionStorage, SETUP);

/** @param {ReturnType<typeof savedSetup>} saved */
export function saveSetup(saved) {
  if (JSON.stringify(saved).length <= MAX_LENGTH) write(sessionStorage, SETUP, saved);
}

/** @returns {Preset[]} */
export const presets = () => read(localStorage, `${PRESETS}:${tenantOf()}`) ?? [];

/** @param {Preset[]} list */
export const setPresets = (list) => write(localStorage, `${PRESETS}:${tenantOf()}`, list);

/** @param {Storage} storage @param {string} name */
function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name) ?? "null");
  } catch {
    return null;
  }
}

/** @param {Storage} storage @param {string} name @param {unknown} value */
function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
  } catch {
    // The browser's storage is full: nothing is kept then.
    storage.removeItem(name);
  }
}

const MAX_SHOWN = 80;

/** @param {{onOpen: (chat: Chat) => void, onNew: () => void, onClose: () => void}} props */
export function Chats({ onOpen, onNew, onClose }) {
  const [list, setList] = useState(chats);
  const [search, setSearch] = useState("");
  const [keeps, setKeeps] = useState(keepsInBrowser);
  const [error, setError] = useState("");
  const change = (next) => {
    setChats(next);
    setList(next);
  };
  const take = async (event) => {
    try {
      const added = JSON.parse(await event.target.files[0].text());
      if (!added.every(({ id, setup, turns }) => id && setup.columns && turns)) throw new Error(t("playground.notChats"));
      const ids = new Set(added.map(({ id }) => id));
      change([...added, ...list.filter(({ id }) => !ids.has(id))]);
      setError("");
    } catch (failure) {
      setError(failure.message);
    }
  };
  const wanted = search.toLowerCase();
  const found = list.filter((chat) => textOf(chat).toLowerCase().includes(wanted));
  const then = (act) => () => {
    onClose();
    act();
  };
  return html`<${Dialog} title=${t("playground.chats")} kind="drawer" onClose=${onClose}>
    <div class="stack">
      <button class="primary" onClick=${then(onNew)}>${t("playground.newChat")} <kbd>n</kbd></button>
      ${list.length > 0 && html`<input type="search" aria-label=${t("playground.searchChats")} placeholder=${t("playground.searchChats")}
        value=${search} onInput=${(event) => setSearch(event.target.value)} />`}
      ${!list.length && html`<p class="second">${t("playground.noChats")}</p>`}
      <ul class="picks">
        ${found.map(
          (chat) => html`<li class="row" key=${chat.id}>
            <button class="quiet" onClick=${then(() => onOpen(chat))}><${Name} of=${titleOf(chat)} /><br />
              <span class="second label">${moment(chat.at / 1000)}</span></button>
            <button class="quiet small" aria-label=${t("playground.removeChat", { name: titleOf(chat) })}
              onClick=${() => change(list.filter(({ id }) => id !== chat.id))}>×</button>
          </li>`,
        )}
      </ul>
      <label class="check"><input type="checkbox" checked=${keeps} onChange=${(event) => {
        setKeepsInBrowser(event.target.checked);
        setKeeps(event.target.checked);
      }} /> ${t("playground.keep")}</label>
      <p class="second label">${t(keeps ? "playground.keptInBrowser" : "playground.keptInTab")}</p>
      ${error && html`<p class="bad" role="alert">${error}</p>`}
      <div class="row">
        <${Export} label=${t("playground.exportChats")} name="loraplex-chats.json" of=${list} />
        <${Import} label=${t("playground.importChats")} onFile=${take} />
        <button class="danger small" disabled=${!list.length} onClick=${() => change([])}>${t("playground.clear")}</button>
      </div>
      <div class="row end"><button onClick=${onClose}>${t("shell.close")}</button></div>
    </div>
  <//>`;
}

/** A link that saves a value as a file of JSON. */
export function Export({ label, name, of }) {
  const save = (event) => {
    const link = event.currentTarget;
    link.href = URL.createObjectURL(new Blob([JSON.stringify(of, null, 1)], { type: "application/json" }));
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  return html`<a class="button small" href="#" download=${name} onClick=${save}>${label}</a>`;
}

export const Import = ({ label, onFile }) =>
  html`<label class="button small">${label}<input class="hidden-text" type="file" accept="application/json" onChange=${onFile} /></label>`;

const textOf = ({ turns }) => turns.map(({ text }) => text).join(" / ");

/** The first message. @param {{turns: {text: string}[]}} chat */
export function titleOf(chat) {
  const text = chat.turns[0]?.text ?? "";
  return text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
}
