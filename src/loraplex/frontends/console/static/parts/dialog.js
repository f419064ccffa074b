// A question before something that cannot be taken back, and other windows over the page.
import { html, useEffect, useId, useRef } from "../lib/html.js";
import { t } from "../lib/texts.js";

/**
 * A modal window, open as long as it is rendered.
 * @param {{title: string, onClose: () => void, children: unknown}} props
 */
export function Dialog({ title, onClose, children }) {
  const dialog = useRef(null);
  const heading = useId();
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  return html`<dialog ref=${dialog} aria-labelledby=${heading} onClose=${onClose}>
    <h2 id=${heading}>${title}</h2>
    ${children}
  </dialog>`;
}

/**
 * @param {{title: string, text: unknown, action: string, onConfirm: () => void,
 *   onClose: () => void}} props action: the word on the button that does it
 */
export function Confirm({ title, text, action, onConfirm, onClose }) {
  const confirm = () => {
    onClose();
    onConfirm();
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <p>${text}</p>
    <div class="row end">
      <button onClick=${onClose}>${t("shell.cancel")}</button>
      <button class="danger" onClick=${confirm}>${action}</button>
    </div>
  <//>`;
}
