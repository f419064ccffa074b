// The time of one generation as a bar of phases, which is read as a text, too.
import { html } from "../../lib/html.js";
import { duration, t } from "../../lib/texts.js";

/** Phases in their order. */
const PHASES = ["admit", "adapter_load", "queue", "prefill", "decode", "write"];

/** @typedef {{name: string, ms: number}} Part */

/** The known phases of a generation that has ended. @returns {Part[]} */
export function phasesOf(generation) {
  return PHASES.map((name) => ({ name, ms: generation.phases[`${name}_ms`] })).filter(({ ms }) => ms);
}

/** What is known of one that runs: when it was admitted, and its first token. @returns {Part[]} */
export function openPhases(generation, total) {
  const elapsed = Math.max(0, total - generation.start_ms);
  const admit = generation.phases.admit_ms ?? elapsed;
  const first = generation.first_token_seconds === null ? elapsed : generation.first_token_seconds * 1000;
  const parts = [
    { name: "admit", ms: admit },
    { name: "queue", ms: first - admit },
    { name: "decode", ms: elapsed - first },
  ];
  return parts.filter(({ ms }) => ms > 0);
}

/** @param {{of: {offset: number, total: number, parts: Part[]}}} props */
export function Phases({ of }) {
  const share = (ms) => `${of.total ? (100 * ms) / of.total : 0}%`;
  const text = of.parts.map(({ name, ms }) => `${t(`requests.${name}`)} ${duration(ms)}`).join(", ");
  return html`<span class="phases" role="img" aria-label=${text || t("requests.noPhases")}>
    <span style=${{ width: share(of.offset) }}></span>
    ${of.parts.map(({ name, ms }) => html`<span key=${name} class="phase ${name}" style=${{ width: share(ms) }}
      title=${`${t(`requests.${name}`)} ${duration(ms)}`}></span>`)}
  </span>`;
}

/** What the colours mean. */
export function PhaseKey() {
  return html`<p class="row second phase-key">
    ${PHASES.map((name) => html`<span key=${name} class="row"><span class="phase ${name}" aria-hidden="true"></span>${t(`requests.${name}`)}</span>`)}
  </p>`;
}
