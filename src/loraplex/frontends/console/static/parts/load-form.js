// Loads an adapter from a path of the server, or from a URL.
import { post } from "../lib/api.js";
import { html, useState } from "../lib/html.js";
import { t } from "../lib/texts.js";
import { Name } from "./name.js";
import { Trial } from "./trial.js";

const NOTHING = { isBusy: false, trial: null, loaded: null, error: null };

/**
 * @param {{name: string, onLoaded: (name: string) => void}} props name: of the adapter that is
 *   replaced; empty: a new one
 */
export function LoadForm({ name, onLoaded }) {
  const [fields, setFields] = useState({ name, path: "", model: "", canary: false });
  const [work, setWork] = useState(NOTHING);
  const set = (change) => setFields((old) => ({ ...old, ...change }));
  const send = async (further, done) => {
    setWork({ ...NOTHING, isBusy: true });
    const { model, ...given } = fields;
    const body = { ...given, ...(model ? { model } : {}), ...further, replace: name !== "" };
    try {
      setWork({ ...NOTHING, ...done(await post("/v1/adapters", body)) });
    } catch (error) {
      setWork({ ...NOTHING, error });
    }
  };
  const tryOut = () => send({ dry_run: true, details: true }, (trial) => ({ trial }));
  const submit = (event) => {
    event.preventDefault();
    send({}, (loaded) => {
      onLoaded(loaded.name);
      return { loaded };
    });
  };
  const { isBusy, trial, loaded, error } = work;
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
      <button type="button" disabled=${isBusy} onClick=${tryOut}>${t("adapters.dryRun")}</button>
      <span aria-live="polite">${isBusy ? t("adapters.busy") : ""}</span>
    </div>
    ${error && html`<p class="bad" role="alert">${error.message}</p>`}
    ${trial && html`<${Trial} trial=${trial} />`}
    ${loaded &&
    html`<p class="good" role="status">
      ${loaded.unchanged ? t("adapters.unchanged") : t("adapters.loaded")}
      ${" "}<${Name} of=${loaded.name} /> v${loaded.version}
    </p>`}
  </form>`;
}

function Field({ label, value, onInput, error, param, placeholder = "", isOptional = false }) {
  return html`<label>${isOptional ? t("adapters.optional", { label }) : label}<br />
    <input value=${value} required=${!isOptional} placeholder=${placeholder} autocomplete="off"
      spellcheck=${false} aria-invalid=${error?.param === param}
      onInput=${(event) => onInput(event.target.value)} /></label>`;
}
