import { html } from "../lib/html.js";
import { t } from "../lib/texts.js";

/** Panel that the screen of adapters shows. */
export function UploadPanel() {
  return html`<h2>${t("upload.title")}</h2>`;
}
