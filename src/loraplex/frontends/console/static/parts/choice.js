// A choice of one of a few words.
import { html } from "../lib/html.js";

/**
 * @param {{label: string, value: string | null, options: string[][], small?: boolean,
 *   any?: string, onChoice: (name: string) => void}} props options: pairs of a name and its text;
 *   any: the text of no choice, whose name is empty
 */
export function Choice({ label, value, options, any, small = false, onChoice }) {
  return html`<select class=${small ? "small" : null} aria-label=${label} value=${value ?? ""}
    onChange=${(event) => onChoice(event.target.value)}>
    ${any && html`<option value="">${any}</option>`}
    ${options.map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}
  </select>`;
}
