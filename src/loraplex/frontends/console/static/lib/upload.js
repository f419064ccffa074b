// Files of an adapter: taken from a drop or an input, and sent one after another.
import { ApiError, apiError, keyHeader, post, remove } from "./api.js";

const CONFIG = "adapter_config.json";
const WEIGHTS = "adapter_model.safetensors";
const SINGLE = "adapter";
const SUFFIXES = [".safetensors", ".gguf"];
const MAX_FILES = 2000;
const MAX_DEPTH = 5;

/** @typedef {{path: string, file: File}} Found path: as it was dropped, with folders */
/** @typedef {{name: string, path: string, file: File}} Taken name: at the server */
/** @typedef {{taken: Taken[], left: string[], numBytes: number}} Plan left: paths that are not sent */

/** The files of a drop, folders included. Call it within the event. @param {DataTransfer} data */
export async function dropped(data) {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  /** @type {Found[]} */
  const found = [];
  for (const entry of entries) await walk(entry, entry.name, found, 0);
  return found;
}

/** @param {FileList} files */
export function chosen(files) {
  return [...files].slice(0, MAX_FILES).map((file) => ({ path: file.webkitRelativePath || file.name, file }));
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

/**
 * Which files to send, and under which names: those of the outermost folder that has an adapter.
 * @param {Found[]} found @param {string[]} names those that the server takes
 * @returns {Plan}
 */
export function planOf(found, names) {
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

/** A name for the adapter: of its folder, or of its file. @param {Plan} plan */
export function nameOf({ taken }) {
  const parts = (taken[0]?.path ?? "").split("/");
  const own = parts.length > 1 ? parts[parts.length - 2] : parts[0].replace(/\.[^.]*$/, "");
  return own.slice(0, 256);
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
export function discard(path) {
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
