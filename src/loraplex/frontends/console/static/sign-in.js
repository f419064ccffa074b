// Signing in with an API key.
import { html, useId, useState } from "./lib/html.js";
import { t } from "./lib/texts.js";

/** @param {{isWrong: boolean, onKey: (key: string, keep: boolean) => void}} props */
export function SignIn({ isWrong, onKey }) {
  const [key, setKey] = useState("");
  const [keep, setKeep] = useState(false);
  const field = useId();
  const submit = (event) => {
    event.preventDefault();
    if (key.trim()) onKey(key.trim(), keep);
  };
  return html`<form class="card narrow" onSubmit=${submit}>
    <h1>${t("signIn.title")}</h1>
    <label for=${field}>${t("signIn.key")}</label>
    <input id=${field} type="password" autocomplete="current-password" spellcheck=${false} required
      value=${key} aria-invalid=${isWrong} onInput=${(event) => setKey(event.target.value)} />
    ${isWrong && html`<p class="bad" role="alert">${t("signIn.wrong")}</p>`}
    <label class="check">
      <input type="checkbox" checked=${keep} onChange=${(event) => setKeep(event.target.checked)} />
      ${t("signIn.keep")}
    </label>
    <p class="second">${t("signIn.where")}</p>
    <div class="row end"><button class="primary">${t("signIn.enter")}</button></div>
  </form>`;
}
