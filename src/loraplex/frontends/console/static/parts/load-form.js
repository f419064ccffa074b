// Loads an adapter from a path of the server, or from a URL.
import { post } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { bytes, count, t } from "../lib/texts.js";
import { Name } from "./name.js";

/**
 * @param {{name: string, onLoaded: (name: string) => void}} props name: of the adapter that is
 *   replaced; empty: a new one
 */
export function LoadForm({ name, onLoaded }) {
  const [fields, setFields] = useState({ name, path: "", model: "", canary: false });
  const [work, setWork] = useState({ isBusy: false, report: null, error: null });
  const set = (change) => setFields((old) => ({ ...old, ...change }));
  const load = async (dryRun) => {
    setWork({ isBusy: true, report: null, error: null });
    const { model, ...given } = fields;
    const body = { ...given, ...(model ? { model } : {}), replace: name !== "", dry_run: dryRun };
    try {
      const report = await post("/v1/adapters", body);
      setWork({ isBusy: false, report, error: null });
      if (!dryRun) onLoaded(report.name);
    } catch (error) {
      setWork({ isBusy: false, report: null, error });
    }
  };
  const submit = (event) => {
    event.preventDefault();
    load(false);
  };
  const { isBusy, report, error } = work;
  return html`<form class="stack load-form" onSubmit=${submit}>
    <h2>${name ? t("adapters.replaceFrom") : t("adapters.loadFrom")}</h2>
    ${!name &&
    html`<${Field} label=${t("adapters.name")} value=${fields.name} error=${error} param="name"
      onInput=${(text) => set({ name: text })} />`}
    <${Field} label=${t("adapters.source")} value=${fields.path} error=${error} param="path"
      placeholder="hf://owner/adapter" onInput=${(text) => set({ path: text })} />
    ${!name &&
    html`<${Field} label=${t("adapters.base")} value=${fields.model} error=${error} param="model"
      isOptional onInput=${(text) => set({ model: text })} />`}
    <label class="check"><input type="checkbox" checked=${fields.canary}
      onChange=${(event) => set({ canary: event.target.checked })} />${t("adapters.canary")}</label>
    <div class="row">
      <button class="primary" disabled=${isBusy}>${name ? t("adapters.replace") : t("adapters.load")}</button>
      <button type="button" disabled=${isBusy} onClick=${() => load(true)}>${t("adapters.dryRun")}</button>
      <span aria-live="polite">${isBusy ? t("adapters.busy") : ""}</span>
    </div>
    ${error && html`<p class="bad" role="alert">${error.message}</p>`}
    ${report && html`<${Report} report=${report} />`}
  </form>`;
}

function Field({ label, value, onInput, error, param, placeholder = "", isOptional = false }) {
  return html`<label>${isOptional ? t("adapters.optional", { label }) : label}<br />
    <input value=${value} required=${!isOptional} placeholder=${placeholder} autocomplete="off"
      spellcheck=${false} aria-invalid=${error?.param === param}
      onInput=${(event) => onInput(event.target.value)} /></label>`;
}

function Report({ report }) {
  const { content, warnings, canary } = report;
  return html`<div role="status">
    <p class="good">
      ${report.dry_run ? t("adapters.wouldLoad") : report.unchanged ? t("adapters.unchanged") : t("adapters.loaded")}
      ${" "}<${Name} of=${report.name} /> v${count(report.version)}
    </p>
    <p class="second">${t("adapters.content", {
      tensors: content.num_tensors,
      rank: report.rank,
      size: bytes(content.host_bytes),
      pages: content.device_pages,
    })}</p>
    ${canary && html`<p class="second">${t("adapters.differs", { most: count(canary.largest_difference) })}</p>`}
    ${warnings.map((warning) => html`<p class="warn" key=${warning}>${warning}</p>`)}
  </div>`;
}
