// An adapter's mark: a colour and a texture from its digest, so that a new version looks new.
import { html } from "../lib/html.js";

const NUM_COLOURS = 8;
export const TEXTURES = ["plain", "stripes", "dots"];

/** @param {string} digest empty: the base model, or not known yet */
export function lookOf(digest) {
  if (!digest) return { colour: -1, texture: "plain" };
  const number = parseInt(digest.slice(0, 8), 16);
  return {
    colour: number % NUM_COLOURS,
    texture: TEXTURES[Math.floor(number / NUM_COLOURS) % TEXTURES.length],
  };
}

/** @param {{digest: string, short?: boolean}} props short: without the digits */
export function Mark({ digest, short = false }) {
  const { colour, texture } = lookOf(digest);
  const swatch = colour < 0 ? "base" : `c${colour}`;
  return html`<span class="mark">
    <span class="swatch ${swatch} ${texture}" aria-hidden="true"></span>
    ${!short && digest && html`<span class="digest">${digest.slice(0, 4)}</span>`}
  </span>`;
}
