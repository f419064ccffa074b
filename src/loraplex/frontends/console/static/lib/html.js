// Preact's parts, and `html` for templates of nodes: texts in them are text nodes, never HTML. Then
// the hooks that every screen uses.
import { h, htm, useCallback, useEffect, useRef, useState } from "../vendor/preact.mjs";

export * from "../vendor/preact.mjs";
export const html = htm.bind(h);

// Keys that work anywhere on the page, except while somebody types.

const PAUSE_MS = 1000;

/** @param {KeyboardEvent} event */
export function isTyping(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (target instanceof HTMLInputElement && target.type === "checkbox") return false;
  return target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName);
}

/**
 * Call a function for a key, such as "/" or "?", or for two in a row, such as "g l".
 * @param {Map<string, () => void>} actions
 */
export function useKeys(actions) {
  useEffect(() => {
    let first = "";
    let at = 0;
    /** @param {KeyboardEvent} event */
    const onKey = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
      if (document.querySelector("dialog[open]")) return;
      const isSecond = first && event.timeStamp - at < PAUSE_MS;
      const action = (isSecond && actions.get(`${first} ${event.key}`)) || actions.get(event.key);
      first = event.key;
      at = event.timeStamp;
      if (action) {
        event.preventDefault();
        action();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [actions]);
}

// What the browser's window is like.

/** Whether a media query holds, and a render when that changes. @param {string} query */
export function useMedia(query) {
  const [holds, setHolds] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const onChange = () => setHolds(media.matches);
    media.addEventListener("change", onChange);
    return () => media.removeEventListener("change", onChange);
  }, [query]);
  return holds;
}

export const PHONE = "(max-width: 640px)";
export const WIDE = "(min-width: 1024px)";

// Asking again and again, while somebody looks.

const MAX_SECONDS = 30;
const LOADING = { state: "loading", data: null, error: null, at: 0, retryAt: 0 };

/**
 * @template T
 * @typedef {{
 *   state: "loading" | "ready" | "refused" | "failed" | "gone",
 *   data: T | null,
 *   error: import("./api.js").ApiError | null,
 *   at: number,
 *   retryAt: number,
 *   again: () => void,
 * }} Polled
 * `data` is the newest there was, also when the server is gone; `at` is its time in ms,
 * and `retryAt` that of the next try after a failure.
 */

/**
 * Load now, and every `seconds` while the page is visible; 0: once. A failure is tried again, later
 * each time, or when the server says.
 * @template T
 * @param {(signal: AbortSignal, before: T | null) => Promise<T>} load
 * @param {number} seconds
 * @param {unknown[]} depends load anew, without the old data, when one of these changes
 * @returns {Polled<T>}
 */
export function usePoll(load, seconds, depends = []) {
  const [polled, setPolled] = useState(LOADING);
  const wake = useRef(() => {});
  const again = useCallback(() => wake.current(), []);
  useEffect(() => {
    let data = null;
    let failures = 0;
    let timer = 0;
    let isBusy = false;
    let isDue = false;
    const ended = new AbortController();
    setPolled(LOADING);

    async function run() {
      clearTimeout(timer);
      if (isBusy || document.hidden) {
        isDue = true;
        return;
      }
      isBusy = true;
      isDue = false;
      let wait = seconds;
      try {
        data = await load(ended.signal, data);
        if (ended.signal.aborted) return;
        failures = 0;
        setPolled({ state: "ready", data, error: null, at: Date.now(), retryAt: 0 });
      } catch (error) {
        if (ended.signal.aborted) return;
        failures += 1;
        wait = error.retrySeconds || Math.min(MAX_SECONDS, (seconds || 1) * 2 ** (failures - 1));
        if (error.status === 401 || error.status === 403) wait = 0;
        const retryAt = wait ? Date.now() + wait * 1000 : 0;
        setPolled((old) => ({ ...old, state: stateOf(error), error, retryAt }));
      }
      isBusy = false;
      if (ended.signal.aborted) return;
      if (isDue) run();
      else if (wait) timer = setTimeout(run, wait * 1000);
    }

    const onVisible = () => {
      if (!document.hidden && (isDue || seconds)) run();
    };
    wake.current = run;
    document.addEventListener("visibilitychange", onVisible);
    run();
    return () => {
      ended.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
    };
  }, depends);
  return { ...polled, again };
}

function stateOf(error) {
  if (error.isGone) return "gone";
  return error.status === 401 || error.status === 403 ? "refused" : "failed";
}

// Files that are dropped anywhere on the page.

export const MAX_FILES = 2000;
const MAX_DEPTH = 5;

/** @typedef {{path: string, file: File}} Found path: as it was dropped, with folders */

/**
 * Take the files that are dropped on the page.
 * @param {boolean} isOn @param {() => void} onOver they are over the page
 * @param {(source: {files: Found[]}) => void} onFiles
 */
export function useDrop(isOn, onOver, onFiles) {
  const act = useRef(null);
  act.current = { onOver, onFiles };
  useEffect(() => {
    if (!isOn) return undefined;
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const over = (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      if (event.type === "dragenter" && !document.querySelector("dialog[open]")) act.current.onOver();
    };
    const drop = async (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      const files = await dropped(event.dataTransfer);
      act.current.onOver();
      act.current.onFiles({ files });
    };
    addEventListener("dragenter", over);
    addEventListener("dragover", over);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragenter", over);
      removeEventListener("dragover", over);
      removeEventListener("drop", drop);
    };
  }, [isOn]);
}

/** The files of a drop, folders included. Call it within the event. @param {DataTransfer} data */
async function dropped(data) {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  /** @type {Found[]} */
  const found = [];
  for (const entry of entries) await walk(entry, entry.name, found, 0);
  return found;
}

async function walk(entry, path, found, depth) {
  if (found.length >= MAX_FILES || depth > MAX_DEPTH) return;
  if (entry.isFile) {
    const file = await new Promise((take, fail) => entry.file(take, fail));
    found.push({ path, file });
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    // A reader gives a hundred at a time, and none at the end.
    const entries = await new Promise((take, fail) => reader.readEntries(take, fail));
    if (!entries.length) return;
    for (const inner of entries) await walk(inner, `${path}/${inner.name}`, found, depth + 1);
  }
}
