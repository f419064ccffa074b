// Both ways to load an adapter, beside each other.
import { html } from "../lib/html.js";
import { LoadForm } from "../parts/load-form.js";
import { UploadPanel } from "./upload.js";

/**
 * @param {{name: string, onLoaded: (name: string) => void}} props name: of the adapter that is
 *   replaced; empty: a new one
 */
export function Add({ name, onLoaded }) {
  return html`<div class="add">
    <section class="card"><${UploadPanel} name=${name} onLoaded=${onLoaded} /></section>
    <section class="card"><${LoadForm} name=${name} onLoaded=${onLoaded} /></section>
  </div>`;
}
