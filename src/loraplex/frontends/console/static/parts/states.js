// What a screen shows of data that it asks for: nothing is ever blank.
import { html, useEffect, useState } from "../lib/html.js";
import { count, t } from "../lib/texts.js";

const QUIET_MS = 300;

/**
 * The children with the data, or why there is none. Old data stays, greyed, while the server is
 * gone.
 * @template T
 * @param {{of: import("../lib/poll.js").Polled<T>, children: (data: T) => unknown,
 *   isEmpty?: (data: T) => boolean, empty?: unknown}} props
 */
export function States({ of, children, isEmpty = () => false, empty }) {
  const { state, data, error, at, again } = of;
  if (data === null && state === "loading") return html`<${Loading} />`;
  if (state === "refused") return html`<p class="state" role="alert">${error.message}</p>`;
  const shown = data !== null && (isEmpty(data) ? html`<div class="state">${empty}</div>` : children(data));
  if (state === "ready" || state === "loading") return shown;
  return html`
    <div class="state bad" role="alert">
      ${state === "gone" ? t("shell.gone") : error.message}
      ${data !== null && html` <${Age} at=${at} />`}
      <button class="small" onClick=${again}>${t("shell.again")}</button>
    </div>
    <div class="old">${shown}</div>`;
}

/** Shown only when it takes a moment, so that nothing flickers. */
export function Loading() {
  const [isLate, setLate] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), QUIET_MS);
    return () => clearTimeout(timer);
  }, []);
  return html`<p class="state" aria-live="polite">${isLate && t("shell.loading")}</p>`;
}

/** How old something is. @param {{at: number}} props ms */
export function Age({ at }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  const seconds = Math.max(0, Math.round((now - at) / 1000));
  return html`<span class="second">${t("shell.age", { seconds: count(seconds) })}</span>`;
}
