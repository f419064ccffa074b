// Names that strangers chose. They cannot change the direction of the text around them, and what is
// invisible in them is shown.
import { html } from "../lib/html.js";
import { t } from "../lib/texts.js";

const INVISIBLE = /([\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]|^ | $)/u;

/** @param {{of: string}} props */
export function Name({ of }) {
  const pieces = of.split(INVISIBLE);
  return html`<bdi class="name">${pieces.map((piece, i) => (i % 2 ? invisible(piece) : piece))}</bdi>`;
}

function invisible(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return html`<span class="invisible" title=${t("shell.invisible")}>U+${code}</span>`;
}
