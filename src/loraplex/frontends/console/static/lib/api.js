// Requests to the server of this page, with the key of who is signed in.
import { createContext, useContext } from "./html.js";

const STORED = "loraplex-key";
const MAX_RETRY_SECONDS = 30;

/** The key lives here, and in this tab's session storage if its owner asked for that. */
let key = sessionStorage.getItem(STORED) ?? "";

/** @param {string} text empty: sign out @param {boolean} keep until the tab is closed */
export function setKey(text, keep = false) {
  key = text;
  sessionStorage.removeItem(STORED);
  if (text && keep) sessionStorage.setItem(STORED, text);
}

export const hasKey = () => key !== "";

/** @returns {Record<string, string>} */
export const keyHeader = () => (key ? { authorization: `Bearer ${key}` } : {});

/** What the server refused, or that it cannot be reached. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string, param?: string | null, retrySeconds?: number}} facts
   *   status: 0 if there was no response
   */
  constructor(message, { status = 0, code = "", param = null, retrySeconds = 0 } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.retrySeconds = retrySeconds;
  }

  get isGone() {
    return this.status === 0;
  }
}

/**
 * Send a request, and return its response, which is a good one.
 * @param {string} method
 * @param {string} path
 * @param {{body?: unknown, signal?: AbortSignal, headers?: Record<string, string>,
 *   takes?: number[]}} options takes: statuses that are no errors, in addition to 2xx
 */
export async function request(method, path, { body, signal, headers = {}, takes = [] } = {}) {
  const json = body === undefined ? {} : { "content-type": "application/json" };
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: { ...json, ...keyHeader(), ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(String(error instanceof Error ? error.message : error));
  }
  if (response.ok || takes.includes(response.status)) return response;
  if (response.status === 401 && path !== "/v1/me") dispatchEvent(new Event("unauthenticated"));
  throw await errorOf(response);
}

/** @param {string} path @param {AbortSignal} [signal] */
export async function get(path, signal) {
  return json(await request("GET", path, { signal }));
}

/** @param {string} path @param {unknown} body @param {AbortSignal} [signal] */
export async function post(path, body, signal) {
  return json(await request("POST", path, { body, signal }));
}

/** @param {string} path */
export async function remove(path) {
  return json(await request("DELETE", path));
}

/** The JSON of a response, null without any. @param {Response} response */
export async function json(response) {
  try {
    const text = await response.text();
    return text ? JSON.parse(text) : null;
  } catch (error) {
    throw new ApiError(String(error instanceof Error ? error.message : error));
  }
}

/**
 * The error that a response has. Front ends of the server write it in two forms.
 * @param {Response} response
 */
async function errorOf(response) {
  let error = {};
  let text = "";
  try {
    text = await response.text();
    error = JSON.parse(text).error ?? {};
  } catch {
    // A proxy's page, or nothing at all.
  }
  return apiError(error, response.status, text, response.headers.get("retry-after"));
}

/**
 * @param {any} error @param {number} status @param {string} text
 * @param {string | null} retryAfter
 */
export function apiError(error, status, text = "", retryAfter = null) {
  const said = typeof error === "string" ? error : error.message;
  return new ApiError(said || text.slice(0, 500) || `HTTP ${status}`, {
    status,
    code: error.code ?? "",
    param: error.param ?? null,
    retrySeconds: Math.min(Number(retryAfter) || 0, MAX_RETRY_SECONDS),
  });
}

/**
 * Send a request whose response is a stream of events, and yield the JSON of each. The stream is
 * whole if it ends with [DONE]; else it throws.
 * @param {string} path @param {unknown} body @param {AbortSignal} signal
 */
export async function* events(path, body, signal) {
  const response = await request("POST", path, { body, signal });
  if (!response.body) throw new ApiError("the response has no body");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for await (const data of lines(reader, signal)) {
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError("the stream ended too early");
}

/**
 * The data of server-sent events, whatever pieces they arrive in.
 * @param {ReadableStreamDefaultReader<string>} reader @param {AbortSignal} [signal]
 */
async function* lines(reader, signal) {
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(String(error instanceof Error ? error.message : error));
    }
    if (piece.done) return;
    const found = (rest + piece.value).split(/\r\n|\n|\r/);
    rest = found.pop() ?? "";
    for (const line of found) {
      if (line.startsWith("data:")) yield line.slice(5).trimStart();
    }
  }
}

// Who is signed in, and what they may do: GET /v1/me.

/**
 * @typedef {{tenant: string, has_keys: boolean, operator: boolean, version: string,
 *   rights: {use: string[], list: string[], manage: string[], models: string[]},
 *   limits: Record<string, number | null>,
 *   uploads: {max_bytes: number, files: string[]} | null}} Me
 */

export const MeContext = createContext(null);

/** @returns {Me} */
export const useMe = () => useContext(MeContext);

/** Whether any adapter may be changed. @param {Me} me */
export const manages = (me) => me.rights.manage.length > 0;

/**
 * Whether an own adapter of this name may be changed. Patterns are a shell's.
 * @param {Me} me @param {string} name
 */
export function mayManage(me, name) {
  return me.rights.manage.some((pattern) => expressionOf(pattern).test(name));
}

/** @param {string} pattern */
function expressionOf(pattern) {
  const text = pattern.replace(/[.+^${}()|\\[\]]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  return new RegExp(`^${text}$`, "su");
}

// The base models of the server: GET /v1/models.

/**
 * @typedef {{id: string, created: number, root: string, max_model_len: number, device?: string,
 *   device_name?: string, dtype?: string, quantization?: string | null,
 *   capabilities?: Record<string, boolean>,
 *   defaults?: Record<string, Record<string, unknown>>}} Model
 */

export const ModelsContext = createContext([]);

/** @returns {Model[]} empty: not known yet */
export const useModels = () => useContext(ModelsContext);

/** Without other names of a model. @param {AbortSignal} signal @returns {Promise<Model[]>} */
export async function baseModels(signal) {
  const { data } = await get("/v1/models?kind=base", signal);
  return data.filter(({ id, root }) => id === root);
}

/** The model that an address names, else the first. @param {Model[]} models @param {URLSearchParams} query */
export const chosenModel = (models, query) =>
  models.find(({ id }) => id === query.get("model")) ?? models[0] ?? null;
