// How full the memory of adapters is, and how many more fit: for operators.
import { get } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/poll.js";
import { bytes, count, t } from "../lib/texts.js";
import { lookOf } from "../parts/mark.js";
import { Name } from "../parts/name.js";
import { States } from "../parts/states.js";

const SECONDS = 10;
const MAX_SHOWN = 64;

export function Residency() {
  const memory = usePoll((signal) => get("/v1/memory", signal), SECONDS);
  const placed = usePoll(
    (signal) => get(`/v1/adapters?residency=device&sort=-size&limit=${MAX_SHOWN}`, signal),
    SECONDS,
  );
  return html`<section class="card residency" aria-label=${t("adapters.memory")}>
    <${States} of=${memory}>
      ${(models) =>
        Object.entries(models).map(
          ([model, tiers]) => html`<${Model} key=${model} model=${model} tiers=${tiers}
            isOne=${Object.keys(models).length === 1}
            placed=${contents(placed.data?.data ?? [], model)} />`,
        )}
    <//>
  </section>`;
}

/** The adapters of a model; names of one content share its pages. */
function contents(rows, model) {
  const ofModel = rows.filter((row) => row.model === model);
  return [...new Map(ofModel.map((row) => [row.digest, row])).values()];
}

function Model({ model, tiers, isOne, placed }) {
  const { device, host, store } = tiers;
  return html`<div class="stack">
    ${!isOne && html`<h2><${Name} of=${model} /></h2>`}
    <div class="row memory-facts">
      <span><b>${t("adapters.device")}</b> ${t("adapters.pagesUsed", { used: device.pages_used, of: device.pages })}</span>
      ${device.fits.map(
        (fit) => html`<span key=${fit.rank}>${t("adapters.more", { n: fit.more, rank: fit.rank })}</span>`,
      )}
      <span class="second"><b>${t("adapters.host")}</b> ${count(host.adapters)} · ${bytes(host.bytes_used)} / ${bytes(host.num_bytes)}</span>
      <span class="second"><b>${t("adapters.disk")}</b> ${count(store.adapters)} · ${bytes(store.num_bytes)}</span>
    </div>
    <${Pages} device=${device} placed=${placed} />
  </div>`;
}

/** A picture of the device's pages. Which adapters they are of, the list tells by its filter. */
function Pages({ device, placed }) {
  const known = placed.reduce((sum, row) => sum + (row.device_pages ?? 0), 0);
  const rest = Math.max(0, device.pages_used - known);
  const piece = (pages) => ({ width: `${(100 * pages) / Math.max(1, device.pages)}%` });
  const label = t("adapters.pagesUsed", { used: device.pages_used, of: device.pages });
  return html`<div class="map" role="img" aria-label=${label}>
    ${placed.map((row) => {
      const { colour, texture } = lookOf(row.digest);
      return html`<span key=${row.digest} class="swatch c${colour} ${texture}"
        style=${piece(row.device_pages ?? 0)}></span>`;
    })}
    ${rest > 0 && html`<span class="swatch base" style=${piece(rest)}></span>`}
  </div>`;
}
