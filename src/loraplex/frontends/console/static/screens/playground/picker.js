// A window to choose adapters from: the newest list of the server, searched as one types.
import { get } from "../../lib/api.js";
import { html, useEffect, useState } from "../../lib/html.js";
import { usePoll } from "../../lib/poll.js";
import { t } from "../../lib/texts.js";
import { Dialog } from "../../parts/dialog.js";
import { Mark } from "../../parts/mark.js";
import { Name } from "../../parts/name.js";
import { States } from "../../parts/states.js";

const NUM_SHOWN = 50;
const TYPING_MS = 150;

/**
 * Adapters whose name has a text in it, of one base model.
 * @param {string} search @param {string} model empty: any @param {AbortSignal} [signal]
 * @returns {Promise<{name: string, digest: string, model: string}[]>}
 */
export async function adaptersLike(search, model, signal) {
  const asked = new URLSearchParams({ search, limit: String(NUM_SHOWN) });
  const { data } = await get(`/v1/adapters?${asked}`, signal);
  const wanted = search.toLowerCase();
  return data
    .filter((adapter) => !model || adapter.model === model)
    .filter(({ name }) => name.toLowerCase().includes(wanted))
    .slice(0, NUM_SHOWN);
}

/**
 * @param {{title: string, model: string, hasBase: boolean, isFull: boolean,
 *   onPick: (part: {name: string, digest: string} | null) => void, onClose: () => void}} props
 *   hasBase: the base can be chosen, too
 */
export function Picker({ title, model, hasBase, isFull, onPick, onClose }) {
  const [typed, setTyped] = useState("");
  const [search, setSearch] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => setSearch(typed), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  const found = usePoll((signal) => adaptersLike(search, model, signal), 0, [search, model]);
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <div class="stack">
      <input type="search" aria-label=${t("playground.search")} placeholder=${t("playground.search")}
        value=${typed} onInput=${(event) => setTyped(event.target.value)} autofocus />
      <ul class="picks">
        ${hasBase &&
        html`<li><button disabled=${isFull} onClick=${() => onPick(null)}>
          <${Mark} digest="" /> ${t("playground.base")}</button></li>`}
        <${States} of=${found} isEmpty=${(list) => !list.length} empty=${t("playground.noAdapters")}>
          ${(list) => list.map(
            (adapter) => html`<li key=${`${adapter.model}/${adapter.name}`}>
              <button disabled=${isFull} onClick=${() => onPick(adapter)}>
                <${Mark} digest=${adapter.digest} /> <${Name} of=${adapter.name} />
              </button>
            </li>`,
          )}
        <//>
      </ul>
      <div class="row end"><button onClick=${onClose}>${t("shell.close")}</button></div>
    </div>
  <//>`;
}
