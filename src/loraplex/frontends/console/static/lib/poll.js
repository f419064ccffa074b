// Asking again and again, while somebody looks.
import { useCallback, useEffect, useRef, useState } from "./html.js";

const MAX_SECONDS = 30;

/**
 * @template T
 * @typedef {{
 *   state: "loading" | "ready" | "refused" | "failed" | "gone",
 *   data: T | null,
 *   error: import("./api.js").ApiError | null,
 *   at: number,
 *   again: () => void,
 * }} Polled
 * `data` is the newest there was, also when the server is gone; `at` is its time in ms.
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
  const [polled, setPolled] = useState({ state: "loading", data: null, error: null, at: 0 });
  const wake = useRef(() => {});
  const again = useCallback(() => wake.current(), []);
  useEffect(() => {
    let data = null;
    let failures = 0;
    let timer = 0;
    let isBusy = false;
    let isDue = false;
    const ended = new AbortController();
    setPolled({ state: "loading", data: null, error: null, at: 0 });

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
        setPolled({ state: "ready", data, error: null, at: Date.now() });
      } catch (error) {
        if (ended.signal.aborted) return;
        failures += 1;
        setPolled((old) => ({ ...old, state: stateOf(error), error }));
        wait = error.retrySeconds || Math.min(MAX_SECONDS, (seconds || 1) * 2 ** (failures - 1));
        if (error.status === 401 || error.status === 403) wait = 0;
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
