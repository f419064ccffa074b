// Earlier comparisons: in this tab only, a few of them, never the key.

const STORED = "loraplex-history";
const STORED_SETUP = "loraplex-playground";
const STORED_TENANT = "loraplex-playground-tenant";
const MAX_ENTRIES = 20;
const MAX_TEXT = 4000;
const MAX_SETUP = 200_000;

/** @typedef {{at: number, setup: import("./setup.js").Setup, texts: string[]}} Entry */

/** Forget what another tenant did in this tab. @param {string} tenant */
export function keepOnlyOf(tenant) {
  if (sessionStorage.getItem(STORED_TENANT) !== tenant) {
    forget();
    sessionStorage.removeItem(STORED_SETUP);
  }
  sessionStorage.setItem(STORED_TENANT, tenant);
}

/** @returns {Entry[]} newest first */
export const entries = () => read(STORED) ?? [];

/** Unless another tenant has the tab by now. @param {import("./run.js").Run} run @param {string} tenant its own */
export function remember(run, tenant) {
  const texts = run.outputs.map(({ text }) => text.slice(0, MAX_TEXT));
  const entry = { at: Date.now(), setup: run.setup, texts };
  if (JSON.stringify(entry).length > MAX_SETUP || sessionStorage.getItem(STORED_TENANT) !== tenant) return;
  write(STORED, [entry, ...entries()].slice(0, MAX_ENTRIES));
}

export const forget = () => sessionStorage.removeItem(STORED);

/** @returns {import("./setup.js").Setup | null} what the reader had put together before a reload */
export const savedSetup = () => read(STORED_SETUP);

/** @param {import("./setup.js").Setup} setup */
export function saveSetup(setup) {
  if (JSON.stringify(setup).length <= MAX_SETUP) write(STORED_SETUP, setup);
}

function read(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name) ?? "null");
  } catch {
    return null;
  }
}

function write(name, value) {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
  } catch {
    // The browser's storage is full: there is no history then.
    sessionStorage.removeItem(STORED);
  }
}
