// The list of earlier comparisons.
import { html, useState } from "../../lib/html.js";
import { moment, t } from "../../lib/texts.js";
import { Dialog } from "../../parts/dialog.js";
import { Name } from "../../parts/name.js";
import { entries, forget } from "./history.js";

const MAX_SHOWN = 80;

/** @param {{onOpen: (entry: import("./history.js").Entry) => void}} props */
export function History({ onOpen }) {
  const [isOpen, setOpen] = useState(false);
  return html`<button onClick=${() => setOpen(true)}>${t("playground.history")}</button>
    ${isOpen && html`<${List} onOpen=${onOpen} onClose=${() => setOpen(false)} />`}`;
}

function List({ onOpen, onClose }) {
  const [list, setList] = useState(entries);
  const clear = () => {
    forget();
    setList([]);
  };
  return html`<${Dialog} title=${t("playground.history")} onClose=${onClose}>
    <div class="stack">
      <p class="second">${t(list.length ? "playground.historyWhere" : "playground.historyEmpty")}</p>
      <ul class="picks">
        ${list.map(
          (entry) => html`<li key=${entry.at}><button onClick=${() => { onClose(); onOpen(entry); }}>
            <span class="second">${moment(entry.at / 1000)}</span> <${Name} of=${promptOf(entry.setup)} />
          </button></li>`,
        )}
      </ul>
      <div class="row end">
        <button class="danger" disabled=${!list.length} onClick=${clear}>${t("playground.clear")}</button>
        <button onClick=${onClose}>${t("shell.close")}</button>
      </div>
    </div>
  <//>`;
}

function promptOf({ kind, prompt, messages }) {
  const text = kind === "chat" ? messages.map(({ content }) => content).join(" / ") : prompt;
  return text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
}
