import { html } from "../lib/html.js";
import { t } from "../lib/texts.js";

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  return html`<h1>${t("playground.title")}</h1>`;
}
