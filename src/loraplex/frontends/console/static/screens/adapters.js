// The list of adapters, what of them fits, and what is done with several of them.
import { get, json, manages, mayManage, post, remove, request, useMe } from "../lib/api.js";
import { html, useDrop, useEffect, useMemo, usePoll, useRef, useState } from "../lib/html.js";
import { columnsLink, go, linkTo } from "../lib/route.js";
import { bytes, count, percent, t } from "../lib/texts.js";
import { AdapterState, Choice, Copy, Dialog, Icon, lookAlikes, lookOf, Mark, Marked, Name, Popover, States, When } from "../parts/basics.js";
import { Capacity } from "../parts/chart.js";
import { Table } from "../parts/table.js";
import { Details } from "./adapter.js";
import { LoadDialog, Sources } from "./adapters/load.js";

const TYPING_MS = 60;
const MAX_COMPARED = 31;
const STATES = ["ready", "unvalidated", "missing", "unfit"];
const TIERS = ["device", "host", "absent", "failed"];
const SORTS = ["name", "-last_used", "-traffic", "-size", "-rank"];
const FILTERS = ["search", "state", "residency", "has_warnings"];
const COMMAND = "loraplex adapters load NAME PATH";

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  if (route.rest) return html`<${Details} key=${route.rest} name=${route.rest} query=${route.query} />`;
  return html`<${List} query=${route.query} />`;
}

function List({ query }) {
  const me = useMe();
  const set = (changes) => {
    const all = { ...Object.fromEntries(query), ...changes };
    go(linkTo("adapters", "", all), { replace: true });
  };
  const [given, setGiven] = useState(null);
  const [picked, setPicked] = useState(new Map());
  const [bulk, setBulk] = useState(null);
  const [pages, onRange] = usePages(asked(query));
  const isAdding = query.has("add") && manages(me);
  useDrop(manages(me), () => set({ add: "1" }), setGiven);
  const all = useRef(0);
  const isFiltered = FILTERS.some((name) => query.get(name));
  if (pages.data && !isFiltered) all.current = pages.data.total;
  const close = () => {
    setGiven(null);
    set({ add: "" });
    pages.again();
  };
  const clear = () => set(Object.fromEntries(FILTERS.map((name) => [name, ""])));
  const onDone = (names) => {
    setPicked((old) => new Map([...old].filter(([name]) => !names.includes(name))));
    pages.again();
  };
  return html`<div class="adapters">
    <div class="row">
      <h1>${t("adapters.title")} <span class="second total" role="status">${pages.data ? count(pages.data.total) : ""}</span></h1>
      ${manages(me) &&
      html`<div class="row end"><button class="primary" onClick=${() => set({ add: "1" })}><${Icon} name="upload" /> ${t("load.title")}</button></div>`}
    </div>
    ${me.operator && html`<${Memory} />`}
    <div class="row list-head">
      <${Filters} query=${query} set=${set} />
      <${Picked} picked=${picked} onBulk=${setBulk} onClear=${() => setPicked(new Map())} mayManage=${manages(me)} />
    </div>
    <${States} of=${pages} rows=${5} needs='list = "all"' isEmpty=${(data) => data.total === 0}
      empty=${isFiltered
        ? html`<p class="row">${all.current ? t("adapters.noneOf", { n: all.current }) : t("adapters.noneFound")} <button class="small" onClick=${clear}>${t("adapters.clear")}</button></p>`
        : html`<${Empty} mayLoad=${manages(me)} onGiven=${(source) => { setGiven(source); set({ add: "1" }); }} />`}>
      ${(data) => html`<${Rows} data=${data} onRange=${onRange} query=${query} set=${set} me=${me}
        picked=${picked} setPicked=${setPicked} onBulk=${setBulk} />`}
    <//>
    ${isAdding && html`<${LoadDialog} name="" given=${given} onClose=${close} onLoaded=${pages.again} />`}
    ${bulk && html`<${Bulk} action=${bulk.action} rows=${bulk.rows} onDone=${onDone} onClose=${() => setBulk(null)} />`}
  </div>`;
}

/** What is asked of the server, in one order, as it is the key of what is loaded. */
function asked(query) {
  const found = new URLSearchParams({ limit: String(PAGE) });
  for (const name of [...FILTERS, "sort"]) {
    if (query.get(name)) found.set(name, query.get(name));
  }
  return String(found);
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
    <${Choice} label=${t("adapters.tier")} any=${t("adapters.tier")} value=${query.get("residency")}
      options=${TIERS.map((name) => [name, t(`adapters.${name}`)])}
      onChoice=${(residency) => set({ residency })} />
    <${Choice} label=${t("adapters.state")} any=${t("adapters.state")} value=${query.get("state")}
      options=${STATES.map((name) => [name, t(`adapters.${name}`)])}
      onChoice=${(state) => set({ state })} />
    <label class="check"><input type="checkbox" checked=${query.get("has_warnings") === "true"}
      onChange=${(event) => set({ has_warnings: event.target.checked ? "true" : "" })} />${t("adapters.withWarnings")}</label>
    <span class="narrow-only"><${Choice} label=${t("adapters.order")} value=${query.get("sort") || "name"}
      options=${SORTS.map((name) => [name, t(`adapters.by_${name.replace("-", "")}`)])}
      onChoice=${(sort) => set({ sort })} /></span>
  </div>`;
}

/** What is done with the rows that are selected. */
function Picked({ picked, onBulk, onClear, mayManage: mayChange }) {
  if (!picked.size) return null;
  const rows = [...picked.values()];
  const act = (action) => html`<button class="small" key=${action} onClick=${() => onBulk({ action, rows })}>${t(`adapters.${action}`)}</button>`;
  return html`<div class="row end picked" role="group" aria-label=${t("adapters.pickedN", { n: rows.length })}>
    <span>${t("adapters.pickedN", { n: rows.length })}</span>
    <button class="small" disabled=${rows.length > MAX_COMPARED}
      onClick=${() => go(columnsLink([null, ...picked.keys()]))}>${t("adapters.compare")}</button>
    ${mayChange && ["pin", "unpin", "unload"].map(act)}
    <button class="small quiet" aria-label=${t("adapters.unpick")} title=${t("adapters.unpick")} onClick=${onClear}>✕</button>
  </div>`;
}

function Empty({ mayLoad, onGiven }) {
  if (!mayLoad) return html`<p>${t("adapters.none")}</p>`;
  return html`<div class="card stack empty"><h2>${t("adapters.noneYet")}</h2>
    <${Sources} onGiven=${onGiven} />
    <p class="row"><code>${COMMAND}</code> <${Copy} text=${() => COMMAND} label=${t("adapters.copy")} /></p>
  </div>`;
}

function Rows({ data, onRange, query, set, me, picked, setPicked, onBulk }) {
  const lastPick = useRef(0);
  const rowAt = (index) => data.rows.get(index);
  const onPick = (index, isRange) => {
    const row = rowAt(index);
    if (!row) return;
    const [from, to] = isRange ? [lastPick.current, index].sort((a, b) => a - b) : [index, index];
    lastPick.current = index;
    setPicked((old) => {
      const next = new Map(old);
      const isOn = isRange || !old.has(row.name);
      for (let i = from; i <= to; i += 1) {
        const one = rowAt(i);
        if (one && isOn) next.set(one.name, one);
        else if (one) next.delete(one.name);
      }
      return next;
    });
  };
  const same = useMemo(() => lookAlikes([...data.rows.values()].map((row) => row.digest)), [data]);
  return html`<${Table}
    of=${data.key}
    label=${t("adapters.title")}
    columns=${columns(same, picked, onPick, me, onBulk)}
    total=${data.total}
    rowAt=${rowAt}
    onRange=${onRange}
    onOpen=${(row) => go(linkTo("adapters", row.name))}
    sort=${query.get("sort") || "name"}
    onSort=${(sort) => set({ sort })}
    isPicked=${(row) => picked.has(row.name)}
    onPick=${onPick}
  />`;
}

function columns(same, picked, onPick, me, onBulk) {
  return [
    {
      name: "pick", title: html`<span class="hidden-text">${t("adapters.pick")}</span>`, kind: "pick less",
      cell: (row, index) => html`<input type="checkbox" tabindex="-1" aria-label=${`${t("adapters.pick")}: ${row.name}`} title="x"
        checked=${picked.has(row.name)} onClick=${(event) => { event.stopPropagation(); onPick(index, event.shiftKey); }} />`,
    },
    { name: "name", title: t("adapters.name"), sort: "name", kind: "name-cell", cell: (row) => nameCell(row, same) },
    { name: "version", title: t("adapters.version"), kind: "number less", cell: (row) => `v${row.version}` },
    { name: "rank", title: t("adapters.rank"), sort: "rank", kind: "number less", cell: (row) => count(row.rank) },
    { name: "size", title: t("adapters.size"), sort: "size", kind: "number less", cell: (row) => bytes(row.num_bytes) },
    { name: "tier", title: t("adapters.tier"), kind: "less", cell: (row) => t(`adapters.${row.residency}`) },
    { name: "state", title: t("adapters.state"), kind: "state-cell", cell: (row) => html`<${AdapterState} of=${row} />` },
    {
      name: "traffic", title: t("adapters.requests"), sort: "traffic", kind: "number less",
      cell: (row) => html`${count(row.requests)}${row.num_running > 0 && html` <span class="good">+${count(row.num_running)}</span>`}`,
    },
    {
      name: "errors", title: t("adapters.errors"), kind: "number less",
      cell: (row) => (row.errors ? html`<span class="bad">${count(row.errors)}</span>` : html`<span class="second">–</span>`),
    },
    {
      name: "used", title: t("adapters.lastUsed"), sort: "last_used", kind: "number less",
      cell: (row) => html`<${When} at=${row.last_used} />`,
    },
    {
      name: "menu", title: html`<span class="hidden-text">${t("adapters.actions")}</span>`, kind: "menu-cell",
      cell: (row) => html`<${RowMenu} row=${row} me=${me} onBulk=${onBulk} />`,
    },
    {
      name: "summary", title: "", kind: "summary second",
      cell: (row) => `v${row.version} · ${t("adapters.rankN", { rank: row.rank })} · ${t(`adapters.${row.residency}`)} · ${t("adapters.requestsN", { n: row.requests })}`,
    },
  ];
}

function RowMenu({ row, me, onBulk }) {
  const choose = (close, act) => () => {
    close();
    act();
  };
  return html`<span onClick=${(event) => event.stopPropagation()}>
    <${Popover} kind="small quiet only-icon row-menu" card="menu" label=${`${t("adapters.actions")}: ${row.name}`} face=${html`<${Icon} name="more" />`}>
      ${(close) => actions(row, me, onBulk).map(({ text, act, isDanger }) => html`<button type="button" key=${text}
        class=${isDanger ? "danger" : null} onClick=${choose(close, act)}>${text}</button>`)}
    <//></span>`;
}

function actions(row, me, onBulk) {
  const page = (tab, more = {}) => () => go(linkTo("adapters", row.name, { tab, ...more }));
  const found = [
    { text: t("adapters.compareBase"), act: () => go(columnsLink([null, row.name])) },
    { text: t("adapters.useIt"), act: page("use") },
  ];
  if (row.num_running === null || !mayManage(me, row.name)) return found;
  const pin = row.pinned ? "unpin" : "pin";
  return [
    ...found,
    { text: t("adapters.replace"), act: page("", { replace: "1" }) },
    { text: t(`adapters.${pin}`), act: () => onBulk({ action: pin, rows: [row] }) },
    { text: t("adapters.unload"), act: () => onBulk({ action: "unload", rows: [row] }), isDanger: true },
  ];
}

function nameCell(row, same) {
  const aliases = row.aliases.length > 0 && html`<span class="second" title=${row.aliases.join("\n")}>${t("adapters.aliasN", { n: row.aliases.length })}</span>`;
  return html`<${Mark} digest=${row.digest} />
    <a href=${linkTo("adapters", row.name)} tabindex="-1"><${Name} of=${row.name} /></a>${same.has(row.digest) && html`<span class="digest">${row.digest.slice(0, 4)}</span>`}
    ${aliases}
    ${row.pinned && html`<span title=${t("adapters.pinned")}><${Icon} name="pin" /><span class="hidden-text">${t("adapters.pinned")}</span></span>`}`;
}

// One change of several adapters: what it ends is named first, and each has a result of its own.

const AT_ONCE = 4;
const SHOWN = 1000;

/** What each action sends. */
const ACTIONS = new Map([
  ["pin", (path) => post(`${path}/pin`, { pinned: true })],
  ["unpin", (path) => post(`${path}/pin`, { pinned: false })],
  ["unload", (path) => remove(path)],
]);

/**
 * @param {{action: "pin" | "unpin" | "unload", rows: any[], onDone: (names: string[]) => void,
 *   onClose: () => void}} props onDone: with those for which it succeeded
 */
function Bulk({ action, rows, onDone, onClose }) {
  const [results, setResults] = useState(new Map());
  const [step, setStep] = useState("ask");
  const running = rows.reduce((sum, row) => sum + (row.num_running ?? 0), 0);
  const run = async () => {
    setStep("busy");
    const done = [];
    const waiting = [...rows];
    const work = async () => {
      for (let row = waiting.shift(); row; row = waiting.shift()) {
        const { name } = row;
        const error = await ACTIONS.get(action)(`/v1/adapters/${encodeURIComponent(name)}`).then(() => null, String);
        if (error === null) done.push(name);
        setResults((old) => new Map(old).set(name, error?.replace(/^\w*Error: /, "") ?? ""));
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    setStep("done");
    onDone(done);
  };
  const title = t(`adapters.${action}N`, { n: rows.length });
  return html`<${Dialog} title=${title} onClose=${onClose}>
    ${action === "unload" && html`<p>${t("adapters.bulkEnds", { n: running })}</p>`}
    <ul class="bulk" tabindex="0" aria-label=${title}>
      ${rows.slice(0, SHOWN).map((row) => html`<li key=${row.name}>
        <span><${Marked} name=${row.name} digest=${row.digest} />
          ${row.num_running > 0 && html` <span class="second">${t("adapters.runningN", { n: row.num_running })}</span>`}</span>
        <${Result} of=${results.get(row.name)} />
      </li>`)}
    </ul>
    <p class="hidden-text" aria-live="polite">${step === "done" && t("adapters.bulkDone", numbers(results))}</p>
    <div class="row end">
      <button type="button" onClick=${onClose}>${t(step === "done" ? "shell.close" : "shell.cancel")}</button>
      ${step !== "done" && html`<button type="button" class=${action === "unload" ? "danger" : "primary"} disabled=${step === "busy"}
        onClick=${run}>${title}</button>`}
    </div>
  <//>`;
}

function Result({ of }) {
  if (of === undefined) return null;
  return of === "" ? html`<span class="good">✓</span>` : html`<span class="bad">✗ ${of}</span>`;
}

function numbers(results) {
  const failed = [...results.values()].filter(Boolean).length;
  return { done: results.size - failed, failed };
}

// How full the memory of adapters is, and how many more fit: for operators.

const SECONDS = 10;
const MAX_SHOWN = 64;
const NEARLY_FULL = 0.85;

function Memory() {
  const memory = usePoll((signal) => get("/v1/memory", signal), SECONDS);
  const placed = usePoll(
    (signal) => get(`/v1/adapters?residency=device&sort=-size&limit=${MAX_SHOWN}`, signal),
    SECONDS,
  );
  return html`<section class="memory" aria-label=${t("adapters.memory")}>
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
  const used = t("adapters.pagesOf", { used: device.pages_used, of: device.pages });
  const share = device.pages_used / Math.max(1, device.pages);
  const [least, ...others] = device.fits;
  return html`<div class="memory-model">
    <div class="row"><h2>${t("adapters.memory")}${!isOne && html` · <${Name} of=${model} />`}</h2><span class="row end">${used}</span></div>
    <${Capacity} label=${`${t("adapters.memory")}: ${used}`} parts=${parts(device, placed)} total=${device.pages} />
    <p class="second">${t("adapters.usedShare", { share: percent(share) })}${least && ` · ${t("adapters.room", least)}`}${others.map((fit) => `, ${t("adapters.orRoom", fit)}`)}
      ${` · ${t("adapters.onHost", { used: bytes(host.bytes_used), of: bytes(host.num_bytes) })}`}
      ${` · ${t("adapters.onDisk", { size: bytes(store.num_bytes) })}`}</p>
    ${share >= NEARLY_FULL && html`<p class="warn" role="status">⚠ ${t("adapters.nearlyFull")}</p>`}
  </div>`;
}

/** Pages by adapter; those of adapters that are not listed come last. */
function parts(device, placed) {
  const known = placed.map((row) => {
    const { colour, texture } = lookOf(row.digest);
    const pages = row.device_pages ?? 0;
    const title = `${row.name}: ${t("adapters.pages", { n: pages })}`;
    return { key: row.digest, amount: pages, look: `c${colour} ${texture}`, title };
  });
  const rest = device.pages_used - known.reduce((sum, { amount }) => sum + amount, 0);
  return [...known, { key: "rest", amount: Math.max(0, rest), look: "base", title: t("adapters.others") }];
}

// The part of a long list that is in view, renewed while it is seen.

const PAGE = 100;
const LIST_SECONDS = 5;
const SCROLLING_MS = 60;

/**
 * Old rows stay until new ones are there.
 * @param {string} key the query, which is the same for the same list
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
