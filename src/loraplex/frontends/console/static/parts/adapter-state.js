// Whether requests may use an adapter.
import { html } from "../lib/html.js";
import { t } from "../lib/texts.js";

const KINDS = new Map([["ready", "good"], ["unvalidated", "second"]]);

/** @param {{of: {state: string, warnings: string[]}}} props */
export function AdapterState({ of }) {
  const { state, warnings } = of;
  return html`<span class=${KINDS.get(state) ?? "bad"}>${t(`adapters.${state}`)}</span>
    ${warnings.length > 0 && html` <span class="warn">${t("adapters.warnings", { n: warnings.length })}</span>`}`;
}
