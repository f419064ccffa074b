// The list of adapters, and what of them fits.
import { json, request } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { manages, useMe } from "../lib/me.js";
import { usePoll } from "../lib/poll.js";
import { go, linkTo } from "../lib/route.js";
import { bytes, count, moment, t } from "../lib/texts.js";
import { AdapterState } from "../parts/adapter-state.js";
import { Choice } from "../parts/choice.js";
import { Mark } from "../parts/mark.js";
import { Name } from "../parts/name.js";
import { States } from "../parts/states.js";
import { Table } from "../parts/table.js";
import { Details } from "./adapter.js";
import { Add } from "./add-adapter.js";
import { Residency } from "./residency.js";

const PAGE = 100;
const LIST_SECONDS = 5;
const TYPING_MS = 60;
const SCROLLING_MS = 60;
const STATES = ["ready", "unvalidated", "missing", "unfit"];
const TIERS = ["device", "host", "absent", "failed"];
const SORTS = ["name", "-last_used", "-traffic", "-size", "-rank"];

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  if (route.rest) return html`<${Details} key=${route.rest} name=${route.rest} />`;
  return html`<${List} query=${route.query} />`;
}

function List({ query }) {
  const me = useMe();
  const isAdding = query.has("add");
  const set = (changes) => {
    const all = { ...Object.fromEntries(query), ...changes };
    go(linkTo("adapters", "", all), { replace: true });
  };
  const [pages, onRange] = usePages(asked(query));
  const isFiltered = ["search", "state", "residency"].some((name) => query.get(name));
  return html`<div class="adapters">
    <div class="row">
      <h1>${t("adapters.title")}</h1>
      <span class="second" role="status">
        ${pages.data ? t("adapters.total", { n: pages.data.total }) : ""}
      </span>
      ${manages(me) &&
      html`<div class="row end">
        <button class="primary" aria-expanded=${isAdding} onClick=${() => set({ add: isAdding ? "" : "1" })}>
          ${t("adapters.add")}
        </button>
      </div>`}
    </div>
    ${isAdding && manages(me) && html`<${Add} name="" onLoaded=${pages.again} />`}
    ${me.operator && html`<${Residency} />`}
    <${Filters} query=${query} set=${set} />
    <${States} of=${pages} isEmpty=${(data) => data.total === 0}
      empty=${html`<${Empty} isFiltered=${isFiltered} mayLoad=${manages(me)} />`}>
      ${(data) => html`<${Rows} data=${data} onRange=${onRange} query=${query} set=${set} />`}
    <//>
  </div>`;
}

/** What is asked of the server, in one order, as it is the key of what is loaded. */
function asked(query) {
  const found = new URLSearchParams({ limit: String(PAGE) });
  for (const name of ["search", "state", "residency", "sort"]) {
    if (query.get(name)) found.set(name, query.get(name));
  }
  return String(found);
}

/**
 * The pages in view of a list, renewed while they are seen. Old rows stay until new ones are there.
 * @param {string} key
 */
function usePages(key) {
  const kept = useRef({ key: "", total: 0, rows: new Map(), tags: new Map() });
  const [seen, setSeen] = useState({ key, first: 0, last: 0 });
  const resting = useRef(0);
  const { first, last } = seen.key === key ? seen : { first: 0, last: 0 };
  const polled = usePoll(
    async (signal) => {
      let of = kept.current;
      if (of.key !== key) of = { key, total: 0, rows: new Map(), tags: new Map() };
      for (let page = first; page <= last; page += 1) await loadPage(of, page, signal);
      kept.current = { ...of };
      return kept.current;
    },
    LIST_SECONDS,
    [key, first, last],
  );
  // What is scrolled past is not loaded.
  const onRange = (from, to) => {
    clearTimeout(resting.current);
    const next = { key, first: Math.floor(from / PAGE), last: Math.floor(Math.max(from, to - 1) / PAGE) };
    resting.current = setTimeout(() => setSeen(next), SCROLLING_MS);
  };
  return [{ ...polled, data: kept.current.key ? kept.current : null }, onRange];
}

async function loadPage(of, page, signal) {
  const path = `/v1/adapters?${of.key}&offset=${page * PAGE}`;
  const tag = of.tags.get(page);
  const headers = tag ? { "if-none-match": tag } : {};
  const response = await request("GET", path, { signal, headers, takes: [304] });
  if (response.status === 304) return;
  const { data, total } = await json(response);
  if (total !== of.total) {
    of.rows.clear();
    of.tags.clear();
  }
  of.total = total;
  of.tags.set(page, response.headers.get("etag"));
  data.forEach((row, i) => of.rows.set(page * PAGE + i, row));
}

function Filters({ query, set }) {
  const search = query.get("search") ?? "";
  const [text, setText] = useState(search);
  const sent = useRef(search);
  useEffect(() => {
    const timer = setTimeout(() => {
      if (text === sent.current) return;
      sent.current = text;
      set({ search: text });
    }, TYPING_MS);
    return () => clearTimeout(timer);
  }, [text]);
  // Another search, by Back or a link.
  useEffect(() => {
    if (search !== sent.current) setText((sent.current = search));
  }, [search]);
  return html`<div class="row filters">
    <input type="search" maxlength="256" aria-label=${t("adapters.search")}
      placeholder=${t("adapters.searchKey")} value=${text}
      onInput=${(event) => setText(event.target.value)} />
    <${Choice} label=${t("adapters.tier")} any=${t("adapters.anyTier")} value=${query.get("residency")}
      options=${TIERS.map((name) => [name, t(`adapters.${name}`)])}
      onChoice=${(residency) => set({ residency })} />
    <${Choice} label=${t("adapters.state")} any=${t("adapters.anyState")} value=${query.get("state")}
      options=${STATES.map((name) => [name, t(`adapters.${name}`)])}
      onChoice=${(state) => set({ state })} />
    <${Choice} label=${t("adapters.order")} value=${query.get("sort") || "name"}
      options=${SORTS.map((name) => [name, t(`adapters.by_${name.replace("-", "")}`)])}
      onChoice=${(sort) => set({ sort })} />
  </div>`;
}

function Empty({ isFiltered, mayLoad }) {
  if (isFiltered) return html`<p>${t("adapters.noneFound")}</p>`;
  if (!mayLoad) return html`<p>${t("adapters.none")}</p>`;
  return html`<p>${t("adapters.loadFirst")}</p>
    <pre>loraplex adapters load NAME hf://OWNER/ADAPTER</pre>`;
}

function Rows({ data, onRange, query, set }) {
  const open = (row) => go(linkTo("adapters", row.name));
  return html`<${Table}
    of=${data.key}
    label=${t("adapters.title")}
    columns=${columns()}
    total=${data.total}
    rowAt=${(index) => data.rows.get(index)}
    onRange=${onRange}
    onOpen=${open}
    sort=${query.get("sort") || "name"}
    onSort=${(sort) => set({ sort })}
  />`;
}

function columns() {
  return [
    { name: "name", title: t("adapters.name"), sort: "name", kind: "wide", cell: nameCell },
    { name: "version", title: t("adapters.version"), kind: "number less", cell: (row) => `v${row.version}` },
    { name: "rank", title: t("adapters.rank"), sort: "rank", kind: "number less", cell: (row) => count(row.rank) },
    { name: "size", title: t("adapters.size"), sort: "size", kind: "number less", cell: (row) => bytes(row.num_bytes) },
    { name: "tier", title: t("adapters.tier"), cell: (row) => t(`adapters.${row.residency}`) },
    { name: "state", title: t("adapters.state"), kind: "less", cell: (row) => html`<${AdapterState} of=${row} />` },
    {
      name: "traffic", title: t("adapters.requests"), sort: "traffic", kind: "number",
      cell: (row) => html`${count(row.requests)}${row.num_running > 0 && html` <span class="good">+${count(row.num_running)}</span>`}`,
    },
    {
      name: "errors", title: t("adapters.errors"), kind: "number less",
      cell: (row) => html`<span class=${row.errors ? "bad" : "second"}>${count(row.errors)}</span>`,
    },
    {
      name: "used", title: t("adapters.lastUsed"), sort: "last_used", kind: "number less",
      cell: (row) => (row.last_used === null ? "–" : moment(row.last_used)),
    },
  ];
}

function nameCell(row) {
  return html`<${Mark} digest=${row.digest} />
    <a href=${linkTo("adapters", row.name)} tabindex="-1"><${Name} of=${row.name} /></a>
    ${row.pinned && html`<span class="tag">${t("adapters.pinned")}</span>`}
    ${row.aliases.map((alias) => html`<span class="second" key=${alias}>= <${Name} of=${alias} /></span>`)}`;
}
