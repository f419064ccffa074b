// Keys that work anywhere on the page, except while somebody types.
import { useEffect } from "./html.js";

const PAUSE_MS = 1000;

/** @param {KeyboardEvent} event */
export function isTyping(event) {
  const target = /** @type {HTMLElement} */ (event.target);
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
