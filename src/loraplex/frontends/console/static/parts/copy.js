// A button that copies a text.
import { html, useState } from "../lib/html.js";
import { t } from "../lib/texts.js";

/** @param {{text: () => string, label: string}} props */
export function Copy({ text, label }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text());
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  return html`<button class="small" onClick=${copy}>
    <span aria-live="polite">${isDone ? t("shell.copied") : label}</span>
  </button>`;
}
