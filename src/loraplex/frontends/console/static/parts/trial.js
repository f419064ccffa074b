// A dry run in detail: what a load would do, and every tensor with its fate.
import { html, useState } from "../lib/html.js";
import { bytes, count, t } from "../lib/texts.js";
import { Name } from "./name.js";

const PAGE = 100;
const FATES = ["all", "refused", "leftOut", "applied"];

/** @param {{trial: any}} props the response to a dry run with details */
export function Trial({ trial }) {
  const { adapter, error } = trial;
  return html`<section class="stack trial" aria-label=${t("upload.result")}>
    <h3 class=${trial.ok ? "good" : "bad"}>${trial.ok ? `✓ ${t("upload.ok")}` : `✗ ${t("upload.refused")}`}</h3>
    ${error && html`<p class="bad"><${Name} of=${error.message} /></p>`}
    <ul class="trial-facts">
      ${trial.format && html`<li>${trial.format}: ${t("upload.tensors", { applied: applied(trial), all: trial.num_tensors })}</li>`}
      ${adapter && html`<li>${t("upload.size", sizes(adapter))}</li>`}
      ${adapter && html`<li class=${trial.fits_now ? "good" : "warn"}>${trial.fits_now
        ? t("upload.fits", pages(trial))
        : t("upload.full", pages(trial))}</li>`}
      ${trial.changes_base === true && html`<li class="good">${t("upload.differs", { most: difference(adapter) })}</li>`}
      ${trial.changes_base === false && html`<li class="bad">${t("upload.same")}</li>`}
      ${adapter?.unchanged && html`<li class="warn">${t("upload.unchanged", { version: adapter.version })}</li>`}
      ${adapter?.warnings.map((text) => html`<li class="warn"><${Name} of=${text} /></li>`)}
    </ul>
    ${trial.tensors.length > 0 && html`<${Tensors} trial=${trial} />`}
  </section>`;
}

function applied(trial) {
  // Of those that are not in the list, none is refused.
  const others = trial.tensors.filter((tensor) => !tensor.applied).length;
  return trial.num_tensors - others;
}

function sizes({ content, rank, num_bytes }) {
  return { rank, size: bytes(num_bytes), types: content.dtypes.join(", "), own: content.device_dtype };
}

function pages({ adapter, free_pages }) {
  return { pages: adapter.content.device_pages, free: free_pages };
}

function difference(adapter) {
  return count(adapter.canary.largest_difference, { maximumFractionDigits: 2 });
}

function fateOf(tensor) {
  if (tensor.applied) return "applied";
  return tensor.refused ? "refused" : "leftOut";
}

const words = () => ({
  all: t("upload.all"),
  refused: t("upload.onlyRefused"),
  leftOut: t("upload.leftOut"),
  applied: t("upload.applied"),
});

function Tensors({ trial }) {
  const [fate, setFate] = useState(trial.num_refused ? "refused" : "all");
  const [limit, setLimit] = useState(PAGE);
  const found = fate === "all" ? trial.tensors : trial.tensors.filter((tensor) => fateOf(tensor) === fate);
  const word = words();
  return html`
    <div class="row">
      <label class="row">${t("upload.show")}
        <select class="small" value=${fate} onChange=${(event) => { setFate(event.target.value); setLimit(PAGE); }}>
          ${FATES.map((name) => html`<option key=${name} value=${name}>${word[name]}</option>`)}
        </select></label>
      <span class="second">${t("upload.shown", { n: found.length })}</span>
    </div>
    <div class="tensors" role="region" tabindex="0" aria-label=${t("upload.table")}>
      <table>
        <thead><tr>
          <th>${t("upload.tensor")}</th><th>${t("upload.fate")}</th><th>${t("upload.module")}</th><th class="number">${t("upload.layer")}</th>
          <th class="number">${t("upload.rank")}</th><th>${t("upload.shape")}</th>
        </tr></thead>
        <tbody>${found.slice(0, limit).map((tensor) => html`<${Row} key=${tensor.name} tensor=${tensor} word=${word} />`)}</tbody>
      </table>
    </div>
    ${found.length > limit && html`<div><button type="button" class="small" onClick=${() => setLimit(limit + PAGE)}>
      ${t("upload.more", { n: Math.min(PAGE, found.length - limit) })}</button></div>`}
    ${trial.num_tensors > trial.tensors.length && html`<p class="second">
      ${t("upload.cut", { n: trial.tensors.length, all: trial.num_tensors })}</p>`}`;
}

function Row({ tensor, word }) {
  const fate = fateOf(tensor);
  const kind = { applied: "good", refused: "bad", leftOut: "second" }[fate];
  const module = tensor.expert === null ? tensor.module : `${tensor.module} ${tensor.expert}`;
  return html`<tr>
      <td><code><${Name} of=${tensor.name} /></code></td>
      <td class=${kind}>${fate === "refused" ? "✗ " : fate === "applied" ? "✓ " : ""}${word[fate]}</td>
      <td>${module ?? "–"}</td>
      <td class="number">${tensor.layer ?? "–"}</td>
      <td class="number">${tensor.rank ?? "–"}</td>
      <td>${tensor.dtype} ${tensor.shape.join("×")}</td>
    </tr>
    ${tensor.reason && html`<tr class="reason"><td colspan="6" class="second"><${Name} of=${tensor.reason} /></td></tr>`}`;
}
