// The prompt, or the messages of a chat.
import { html, useLayoutEffect, useRef } from "../../lib/html.js";
import { t } from "../../lib/texts.js";
import { ROLES } from "./setup.js";

/** @param {{setup: import("./setup.js").Setup, change: (news: object) => void, models: string[],
 *   error: string | undefined}} props */
export function Prompt({ setup, change, models, error }) {
  return html`<div class="stack">
    <div class="row">
      <div class="kinds row" role="radiogroup" aria-label=${t("playground.kind")}>
        ${["completion", "chat"].map(
          (kind) => html`<label class="check" key=${kind}><input type="radio" name="kind" checked=${setup.kind === kind}
            onChange=${() => change({ kind })} />${t(`playground.${kind}`)}</label>`,
        )}
      </div>
      ${models.length > 1 &&
      html`<label class="row">${t("playground.model")}
        <select class="small" value=${setup.model || models[0]} onChange=${(event) => change({ model: event.target.value })}>
          ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label>`}
    </div>
    ${setup.kind === "chat"
      ? html`<${Messages} messages=${setup.messages} onChange=${(messages) => change({ messages })} />`
      : html`<${Growing} label=${t("playground.prompt")} value=${setup.prompt} isBad=${Boolean(error)}
          onInput=${(prompt) => change({ prompt })} />`}
    ${error && html`<p class="bad" role="alert">${error}</p>`}
  </div>`;
}

function Messages({ messages, onChange }) {
  const set = (index, news) => onChange(messages.with(index, { ...messages[index], ...news }));
  return html`<div class="stack">
    ${messages.map(
      ({ role, content }, index) => html`<div class="message" key=${index}>
        <select class="small" aria-label=${t("playground.role")} value=${role}
          onChange=${(event) => set(index, { role: event.target.value })}>
          ${ROLES.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
        <${Growing} label=${`${role} ${index + 1}`} value=${content} onInput=${(text) => set(index, { content: text })} />
        ${messages.length > 1 &&
        html`<button class="small quiet" aria-label=${t("playground.removeMessage", { n: index + 1 })}
          onClick=${() => onChange(messages.toSpliced(index, 1))}>×</button>`}
      </div>`,
    )}
    <div><button class="small" onClick=${() => onChange([...messages, { role: "user", content: "" }])}>
      + ${t("playground.message")}</button></div>
  </div>`;
}

/** A text area as high as its text. */
function Growing({ label, value, isBad = false, onInput }) {
  const area = useRef(null);
  useLayoutEffect(() => {
    area.current.style.blockSize = "auto";
    area.current.style.blockSize = `${area.current.scrollHeight + 2}px`;
  }, [value]);
  return html`<textarea ref=${area} class="prompt" rows="2" dir="auto" aria-label=${label} placeholder=${label} value=${value}
    aria-invalid=${isBad ? "true" : null} onInput=${(event) => onInput(event.target.value)} />`;
}
