// All columns: their heads, and the turns under them. The reader who is at the end stays there while
// text comes.
import { get, manages, useMe } from "../../lib/api.js";
import { html, useEffect, useLayoutEffect, useMemo, usePoll, useRef, useState } from "../../lib/html.js";
import { linkTo } from "../../lib/route.js";
import { count, duration, t } from "../../lib/texts.js";
import { Copy, Countdown, Icon, lookAlikes, Mark, Marked, Name, Popover, States } from "../../parts/basics.js";
import { versionOf } from "./chat.js";
import { labelOf, MAX_COLUMNS } from "./setup.js";

/**
 * @typedef {{column: import("./setup.js").Column, index: number, numColumns: number, model: string,
 *   alike: Set<string>, output: import("./chat.js").Output | null, mayCancel: boolean, isGreedy: boolean,
 *   canDo: boolean, isExpanded: boolean, act: Record<string, Function>}} HeadProps
 * output: the newest one; canDo: there are replies to go on from; act: by name what changes the
 * columns, see Columns of playground.js
 */

/** @param {HeadProps} props */
function Head(props) {
  const { column, output, isExpanded, mayCancel, act } = props;
  const { parts, key } = column;
  const isOpen = output?.isOpen;
  return html`<div class="head" role="group" aria-label=${t("playground.columnOf", { name: labelOf(parts) })}>
    <${Popover} kind="quiet who" card="picker" title=${t("playground.change")} face=${html`<${Who} ...${props} />`}>
      ${(close) => html`<${Picker} model=${props.model} chosen=${new Set(parts.map(({ name }) => name))} hasBase=${true} isBaseChosen=${!parts.length}
        onPick=${(adapter) => { close(); act.replace(key, adapter); }} />`}
    <//>
    ${parts.length > 0 && html`<${Popover} kind="quiet small" card="scales" label=${t("playground.scale", { name: labelOf(parts) })}
      face=${parts.map(({ scale }) => `×${count(scale, { minimumFractionDigits: 2 })}`).join(" ")}>
      ${() => html`<${Scales} ...${props} />`}<//>`}
    <span class="head-end">
      ${isOpen && html`<${Counter} output=${output} />`}
      ${isOpen && mayCancel && html`<button class="quiet only-icon small" aria-label=${t("playground.stopOf", { name: labelOf(parts) })}
        title=${t("playground.stopOf", { name: labelOf(parts) })} onClick=${() => act.cancel(key)}><${Icon} name="stop" /></button>`}
      <button class="quiet only-icon small" aria-pressed=${isExpanded ? "true" : "false"} aria-label=${t("playground.expand", { name: labelOf(parts) })}
        title=${t("playground.expandHint")} onClick=${() => act.expand(isExpanded ? null : key)}><${Icon} name="expand" /></button>
      <${Popover} kind="quiet only-icon small" card="menu" label=${t("playground.menuOf", { name: labelOf(parts) })} face=${html`<${Icon} name="more" />`}>
        ${(close) => html`<${Menu} ...${props} close=${close} />`}<//>
    </span>
  </div>`;
}

/** @param {HeadProps} props */
function Who({ column: { parts }, alike }) {
  if (!parts.length) return html`<span class="marked"><${Mark} digest="" />${t("playground.base")}</span>`;
  return parts.map(({ name, digest }, i) => html`${i > 0 && " + "}<${Marked} key=${i} name=${name} digest=${digest} alike=${alike} />`);
}

/** @param {HeadProps} props */
function Scales({ column: { parts, key }, act }) {
  const set = (index, scale) => act.parts(key, parts.with(index, { ...parts[index], scale }));
  return parts.map(({ name, scale }, index) => html`<div class="scale" key=${index}>
    <strong class="name">${name}</strong>
    <input type="range" min="-2" max="2" step="0.05" value=${scale} aria-label=${t("playground.scaleOf", { name })}
      onInput=${(event) => set(index, Number(event.target.value))} />
    <input class="number" type="number" step="0.05" value=${scale} aria-label=${t("playground.scaleNumber", { name })}
      onChange=${(event) => set(index, event.target.valueAsNumber || 0)} />
    <button class="small" disabled=${scale === 1} onClick=${() => set(index, 1)}>${t("playground.reset")}</button>
    ${parts.length > 1 && html`<button class="small" aria-label=${t("playground.drop", { name })} onClick=${() => act.parts(key, parts.toSpliced(index, 1))}>×</button>`}
  </div>`);
}

/** @param {HeadProps & {close: () => void}} props */
function Menu({ column: { parts, key }, index, numColumns, model, isGreedy, canDo, act, close }) {
  const item = (name, isOn, run) => html`<button class="quiet" disabled=${!isOn} onClick=${() => { close(); run(); }}>${t(`playground.menu_${name}`)}</button>`;
  return html`<details><summary>${t("playground.menu_add")}</summary>
      <${Picker} model=${model} chosen=${new Set(parts.map(({ name }) => name))} hasBase=${false}
        onPick=${(adapter) => { close(); act.parts(key, [...parts, adapter]); }} /></details>
    ${item("duplicate", true, () => act.duplicate(key))}
    ${item("left", index > 0, () => act.move(key, -1))}
    ${item("right", index + 1 < numColumns, () => act.move(key, 1))}
    ${isGreedy && item("warmer", canDo, () => act.warmer(key))}
    ${item("share", canDo && numColumns > 1, () => act.share(key))}
    ${parts.map(({ name }) => html`<a key=${name} href=${linkTo("adapters", name)} onClick=${close}>${t("playground.menu_open", { name })}</a>`)}
    ${item("remove", numColumns > 1, () => act.remove(key))}`;
}

const NUM_SHOWN = 50;
const TYPING_MS = 150;

/**
 * Adapters whose name has a text in it, of one base model; those used or loaded last come first.
 * @param {string} search @param {string} model empty: any @param {AbortSignal} [signal]
 * @returns {Promise<{name: string, digest: string, model: string}[]>}
 */
export async function adaptersLike(search, model, signal) {
  const asked = new URLSearchParams({ search, sort: "-last_used", limit: String(NUM_SHOWN) });
  const { data } = await get(`/v1/adapters?${asked}`, signal);
  const wanted = search.toLowerCase();
  return data
    .filter((adapter) => !model || adapter.model === model)
    .filter(({ name }) => name.toLowerCase().includes(wanted))
    .slice(0, NUM_SHOWN);
}

/**
 * @param {{model: string, chosen: Set<string>, hasBase: boolean, isBaseChosen?: boolean, isFull?: boolean,
 *   onPick: (part: import("./setup.js").Part | null) => void}} props chosen: names with a mark
 */
function Picker({ model, chosen, hasBase, isBaseChosen = false, isFull = false, onPick }) {
  const field = useRef(null);
  const [typed, setTyped] = useState("");
  const [search, setSearch] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => setSearch(typed), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  useEffect(() => field.current.focus(), []);
  const found = usePoll((signal) => adaptersLike(search, model, signal), 0, [search, model]);
  const choice = (isChosen, isOff, part, face) => html`<button class="quiet" aria-pressed=${isChosen ? "true" : "false"} disabled=${isOff}
    onClick=${() => onPick(part)}>${face}${isChosen && html`<span class="tick" aria-hidden="true">✓</span>`}</button>`;
  return html`<div class="stack">
    <input ref=${field} type="search" aria-label=${t("playground.search")} placeholder=${t("playground.search")}
      value=${typed} onInput=${(event) => setTyped(event.target.value)} />
    <ul class="picks">
      ${hasBase && html`<li>${choice(isBaseChosen, isFull, null, html`<span class="marked"><${Mark} digest="" />${t("playground.base")}</span>`)}</li>`}
      <${States} of=${found} isEmpty=${(list) => !list.length} empty=${t("playground.noAdapters")} rows=${3}>
        ${(list) => {
          const alike = lookAlikes(list.map(({ digest }) => digest));
          return list.map(({ name, digest, model: of }) => html`<li key=${`${of}/${name}`}>
            ${choice(chosen.has(name), isFull && !chosen.has(name), { name, digest, scale: 1 }, html`<${Marked} name=${name} digest=${digest} alike=${alike} />`)}</li>`);
        }}
      <//>
    </ul>
  </div>`;
}

const AT_END_PX = 40;
const SWIPE_PX = 60;

/**
 * @param {{handle: {current: object | null}, chat: {turns: import("./chat.js").Turn[]},
 *   setup: import("./setup.js").Setup, model: import("../../lib/api.js").Model, view: string,
 *   reference: number | null, alike: Set<string>, isGreedy: boolean, isRunning: boolean,
 *   runs: Set<import("./chat.js").Run>, isPhone: boolean, act: Record<string, Function>,
 *   menu: unknown, onExample: (text: string) => void}} props handle: gets what the screen moves the board by
 */
export function Board({ handle, chat, setup, model, view, reference, alike, isGreedy, isRunning, runs, isPhone, act, menu, onExample }) {
  const box = useRef(null);
  const isAtEnd = useRef(true);
  const [isBehind, setBehind] = useState(false);
  const [expanded, setExpanded] = useState(null);
  const [picked, setPicked] = useState(null);
  const { columns } = setup;
  const { turns } = chat;
  const isExpanded = columns.some(({ key }) => key === expanded);
  const only = columns.some(({ key }) => key === picked) ? picked : columns[0].key;
  const shown = isPhone ? only : isExpanded ? expanded : null;
  const follow = () => {
    if (isAtEnd.current && box.current) box.current.scrollTop = box.current.scrollHeight;
    else setBehind(true);
  };
  handle.current = {
    follow,
    toEnd: () => {
      isAtEnd.current = true;
      setBehind(false);
    },
    escape: () => setExpanded(null),
  };
  useLayoutEffect(follow, [turns.length, isRunning]);
  useEffect(() => {
    isAtEnd.current = true;
    setBehind(false);
  }, [chat.id]);
  const onScroll = () => {
    const { scrollTop, clientHeight, scrollHeight } = box.current;
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < AT_END_PX;
    if (isAtEnd.current) setBehind(false);
  };
  const swipe = useSwipe((by) => {
    const at = columns.findIndex(({ key }) => key === only) + by;
    if (isPhone && columns[at]) setPicked(columns[at].key);
  });
  const outputs = new Map(columns.map(({ key }) => [key, turns.length ? (versionOf(turns.at(-1), key)?.at(-1) ?? null) : null]));
  const propsOf = (column, index) => ({
    column, index, numColumns: columns.length, model: model.id, alike, isGreedy, act: { ...act, expand: setExpanded },
    output: outputs.get(column.key), isExpanded: expanded === column.key, canDo: turns.length > 0 && !isRunning,
    mayCancel: [...runs].some((run) => run.id && run.outputs.includes(outputs.get(column.key))),
  });
  const add = html`<${Popover} kind="quiet only-icon small add-column" card="picker" label=${t("playground.add")} face=${html`<${Icon} name="plus" />`}>
    ${() => html`<${Picker} model=${model.id} chosen=${new Set(columns.filter(({ parts }) => parts.length === 1).map(({ parts }) => parts[0].name))} hasBase
      isBaseChosen=${columns.some(({ parts }) => !parts.length)} isFull=${columns.length >= MAX_COLUMNS} onPick=${act.toggle} />`}<//>`;
  const seen = shown === null ? columns : columns.filter(({ key }) => key === shown);
  return html`<div class="board-frame" ...${swipe}>
    ${isPhone && html`<div class="chips">${menu}<div class="chips-scroll" role="group" aria-label=${t("playground.columns")}>
      ${columns.map((column, index) => html`<${Chip} key=${column.key} ...${propsOf(column, index)} isPicked=${column.key === only}
        reference=${reference === column.key ? null : outputs.get(reference)} onPick=${() => setPicked(column.key)} />`)}</div>${add}</div>`}
    <div class="board" ref=${box} onScroll=${onScroll} tabindex="0" role="region" aria-label=${t("playground.outputs")} data-columns=${seen.length > 1 ? "many" : "one"} style=${{ "--n": seen.length }}>
      ${!isPhone && html`<div class="heads">${columns.map((column, index) => (shown === null || column.key === shown) && html`<${Head} key=${column.key} ...${propsOf(column, index)} />`)}${add}</div>`}
      ${!turns.length && html`<${First} setup=${setup} onExample=${onExample} />`}
      ${turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} index=${index} columns=${columns} view=${view} reference=${reference}
        maxTokens=${model.max_model_len} isGreedy=${isGreedy} isRunning=${isRunning} shown=${shown} act=${act} />`)}
    </div>
    ${isBehind && html`<button class="newest" onClick=${() => { handle.current.toEnd(); follow(); box.current.scrollTop = box.current.scrollHeight; }}>↓ ${t("playground.newest")}</button>`}
  </div>`;
}

/** What there is before the first message. */
function First({ setup: { kind, columns }, onExample }) {
  const me = useMe();
  const names = ["example_1", "example_2", "example_3"];
  return html`<div class="first">
    <p class="second">${t(kind === "chat" ? "playground.firstChat" : "playground.firstPrompt")}</p>
    <div class="row">${names.map((name) => html`<button key=${name} onClick=${() => onExample(t(`playground.${name}`))}>${t(`playground.${name}`)}</button>`)}</div>
    ${manages(me) && me.uploads && html`<p class="second">${t("playground.firstDrop")}</p>`}
    ${manages(me) && !columns.some(({ parts }) => parts.length) && html`<a class="button" href=${linkTo("adapters", "", { add: "1" })}>+ ${t("playground.loadFirst")}</a>`}
  </div>`;
}

/** The head of a column on a phone. Pressed again, it opens what the head has on a wide page. */
function Chip(props) {
  const { column: { parts }, output, reference, isPicked, onPick } = props;
  const sign = output?.isOpen ? "…" : output?.state === "failed" ? "✗" : output && reference && !reference.isOpen ? (output.shown === reference.shown ? "✓" : "≠") : "";
  const face = html`<${Who} ...${props} /> ${sign}`;
  if (!isPicked) return html`<button class="chip small" aria-pressed="false" onClick=${onPick}>${face}</button>`;
  return html`<${Popover} kind="chip small picked" card="menu" title=${t("playground.menuOf", { name: labelOf(parts) })} face=${face}>
    ${(close) => html`<${Scales} ...${props} /><${Menu} ...${props} close=${close} />`}<//>`;
}

/** Handlers that report a swipe to the left (1) or right (-1). @param {(by: number) => void} onSwipe */
function useSwipe(onSwipe) {
  const start = useRef(null);
  return {
    onTouchStart: ({ touches }) => {
      start.current = touches.length === 1 ? { x: touches[0].clientX, y: touches[0].clientY } : null;
    },
    onTouchEnd: ({ changedTouches }) => {
      if (!start.current) return;
      const x = changedTouches[0].clientX - start.current.x;
      const y = changedTouches[0].clientY - start.current.y;
      if (Math.abs(x) > SWIPE_PX && Math.abs(x) > 2 * Math.abs(y)) onSwipe(x < 0 ? 1 : -1);
    },
  };
}

// A message, and under it the replies of all columns: texts, tokens, numbers.

/**
 * @param {{turn: import("./chat.js").Turn, index: number, columns: import("./setup.js").Column[],
 *   view: string, reference: number | null, maxTokens: number, isGreedy: boolean, isRunning: boolean,
 *   shown: number | null,
 *   act: {edit: (index: number) => void, again: (index: number, key: number) => void,
 *   show: (index: number, key: number, version: number) => void,
 *   answer: (index: number, key: number) => void, goOn: (index: number, key: number) => void}}} props reference: the key of the column that
 *   others are compared with; shown: the key of the only column that is seen, null for all
 */
function Turn({ turn, index, columns, view, reference, maxTokens, isGreedy, isRunning, shown, act }) {
  const compared = view === "rendered" || reference === null ? null : (versionOf(turn, reference)?.[0] ?? null);
  return html`<section class="turn">
    <div class="asked">
      <div class="bubble" dir="auto">${turn.text}</div>
      <button class="quiet only-icon small" aria-label=${t("playground.edit")} title=${t("playground.edit")} disabled=${isRunning}
        onClick=${() => act.edit(index)}><${Icon} name="edit" /></button>
    </div>
    <div class="replies">
      ${columns.map((column) => {
        const { key } = column;
        const version = versionOf(turn, key);
        const states = version?.map(({ key: of, state, calls }) => `${of} ${state} ${calls.length}`).join();
        const make = () => html`<${Reply} label=${labelOf(column.parts)} version=${version} reply=${turn.replies.get(key)} view=${view}
          compared=${compared} isGreedy=${isGreedy} isRunning=${isRunning} isHidden=${shown !== null && shown !== key}
          onAgain=${() => act.again(index, key)} onShow=${(n) => act.show(index, key, n)} onAnswer=${() => act.answer(index, key)}
          onGoOn=${() => act.goOn(index, key)} />`;
        const depends = [turn, column, states, turn.replies.get(key)?.shown, turn.replies.get(key)?.versions.length, view, compared, compared?.state, isGreedy, isRunning, shown];
        return html`<${Kept} key=${key} make=${make} depends=${depends} />`;
      })}
    </div>
    <${Batch} run=${turn.run} maxTokens=${maxTokens} />
  </section>`;
}

/** What is drawn again only when one of the values that it depends on changes. */
function Kept({ make, depends }) {
  return useMemo(make, depends);
}

function Reply({ label, version, reply, view, compared, isGreedy, isRunning, isHidden, onAgain, onShow, onAnswer, onGoOn }) {
  const last = version?.at(-1);
  const hint = isGreedy ? t("playground.sameText") : t("playground.again");
  return html`<article class="reply ${isHidden ? "hidden" : ""}" aria-label=${label} data-state=${last?.state ?? "empty"}
      aria-busy=${last?.isOpen ? "true" : "false"}>
    ${version?.map((output) => html`<${Part} key=${output.key} label=${label} output=${output} view=${view}
      reference=${compared} isRunning=${isRunning} onAnswer=${onAnswer} onAgain=${onAgain} />`)}
    ${!last?.isOpen &&
    html`<div class="reply-foot">
      ${last && html`<${Numbers} output=${last} />`}
      ${last?.isFormed && last.state === "done" && (last.finish === "length"
        ? html`<span class="warn label">⚠ ${t("playground.formCut")}</span>`
        : html`<span class="good label">✓ ${t("playground.formMatches")}</span>`)}
      ${last?.state === "cut" && last.shown && !last.calls.length && html`<button class="small" disabled=${isRunning} onClick=${onGoOn}>${t("playground.goOn")}</button>`}
      ${last?.state !== "failed" && html`<button class="quiet only-icon small" aria-label=${t("playground.again")} title=${hint} disabled=${isRunning} onClick=${onAgain}><${Icon} name="redo" /></button>`}
      ${last?.shown && html`<${Copy} isIcon label=${t("playground.copyText")} text=${() => version.map(({ shown }) => shown).join("\n\n")} />`}
      ${reply?.versions.length > 1 && html`<span class="versions label" role="group" aria-label=${t("playground.versions")}>
        <button class="quiet only-icon small" aria-label=${t("playground.earlier")} disabled=${reply.shown === 0} onClick=${() => onShow(reply.shown - 1)}>‹</button>
        ${reply.shown + 1}/${reply.versions.length}
        <button class="quiet only-icon small" aria-label=${t("playground.later")} disabled=${reply.shown + 1 === reply.versions.length} onClick=${() => onShow(reply.shown + 1)}>›</button>
      </span>`}
    </div>`}
  </article>`;
}

/** One output of a reply. A reply has several where tools were called. */
function Part({ label, output, view, reference, isRunning, onAnswer, onAgain }) {
  const { state, reasoning, calls, error, retryAt, shown } = output;
  return html`${reasoning &&
    html`<details class="second reasoning" open=${output.isOpen && !shown}><summary>${t("playground.reasoning")}</summary><bdi>${reasoning}</bdi></details>`}
    ${(shown || output.isOpen || !calls.length) && state !== "failed" &&
    (view === "rendered"
      ? html`<${Rendered} output=${output} />`
      : html`<${Plain} key=${output.key} label=${label} output=${output} reference=${reference} />`)}
    ${state === "failed" && html`<div class="failed" role="alert">${shown && html`<p>${shown}</p>`}<bdi>${error}</bdi> <${Countdown} to=${retryAt} text="playground.busyFor" />
      <button class="small" disabled=${isRunning} onClick=${onAgain}>${t("playground.again")}</button></div>`}
    ${calls.length > 0 && html`<${Calls} calls=${calls} isOver=${!output.isOpen} isRunning=${isRunning} onAnswer=${onAnswer} />`}`;
}

/** Calls of tools, and a field for the result of each. */
function Calls({ calls, isOver, isRunning, onAnswer }) {
  const [results, setResults] = useState(calls.map(({ result }) => result ?? ""));
  const isSent = calls.every(({ result }) => result !== null);
  const send = (event) => {
    event.preventDefault();
    calls.forEach((call, i) => {
      call.result = results[i] ?? "";
    });
    onAnswer();
  };
  return html`<form class="calls" onSubmit=${send}>
    ${calls.map((call, i) => html`<div class="call" key=${i}><code>ƒ ${call.name}(<bdi>${call.arguments}</bdi>)</code>
      ${isOver && html`<input aria-label=${t("playground.resultOf", { name: call.name })} placeholder=${t("playground.result")} value=${results[i] ?? ""}
        readonly=${isSent} onInput=${(event) => setResults(calls.map((_, n) => (n === i ? event.target.value : (results[n] ?? ""))))} />`}</div>`)}
    ${isOver && !isSent && html`<div><button class="small" disabled=${isRunning}>${t("playground.sendResult")}</button></div>`}
  </form>`;
}

/** What shows that the outputs were one batch. */
function Batch({ run, maxTokens }) {
  if (!run || run.state === "running") return null;
  const { timings, summary } = run;
  const words = [];
  if (timings.length) {
    const first = Math.min(...timings.map(({ first_step }) => first_step));
    const last = Math.max(...timings.map(({ last_step }) => last_step));
    const isOne = timings.every(({ first_step }) => first_step === first);
    words.push(t(isOne ? "playground.oneBatch" : "playground.batches", { n: timings.length, first, last }));
    const used = Math.max(...run.outputs.map(({ end }) => (end?.num_tokens ?? 0) + (end?.prompt_tokens ?? summary?.prompt_tokens ?? 0)));
    words.push(t("playground.context", { used, max: maxTokens }));
  }
  return html`<p class="batch label" role="status">
    ${run.state === "gone" && html`<span class="bad">${t("playground.gone")}</span> `}
    ${run.state === "stopped" && html`<span class="warn">${t("playground.stopped")}</span> `}
    <span class="second">${words.join(" · ")}</span>
    ${timings.some(({ restarts }) => restarts > 0) && html` <span class="warn">${t("playground.restarted")}</span>`}
  </p>`;
}

const PHASES = ["queue", "load", "prefill", "decode"];
const MAX_SHOWN_LOGPROB = -9000;
const RENDER_MS = 80;
const UNSURE = Math.log(0.5);
const CARD_GAP_PX = 4;

/** Ranges of text that are marked, of all outputs: a text stays one node, however many tokens. */
const MARKS = new Map(
  ["token", "difference", "other", "unsure"].map((name) => [name, globalThis.Highlight && new Highlight()]),
);
for (const [name, mark] of MARKS) if (mark) CSS.highlights.set(`playground-${name}`, mark);

/** One card is open at a time: this closes the one that is. @type {(chosen: number) => void} */
let hideCard = () => {};

/** Markdown's parser is loaded with the first reply. */
let Markdown = null;
export async function loadMarkdown() {
  ({ Markdown } = await import("./markdown.js"));
}

/** The text as a page. @param {{output: import("./chat.js").Output}} props */
function Rendered({ output }) {
  const [text, setText] = useState(output.shown);
  const [, setReady] = useState(Boolean(Markdown));
  useEffect(() => {
    if (!Markdown) loadMarkdown().then(() => setReady(true));
    let timer = 0;
    const show = () => {
      timer = 0;
      setText(output.shown);
    };
    const sink = () => {
      timer ||= setTimeout(show, RENDER_MS);
    };
    output.sinks.add(sink);
    show();
    return () => {
      clearTimeout(timer);
      output.sinks.delete(sink);
    };
  }, [output, output.state]);
  // The last of it comes with what stands under it, which would move otherwise.
  const now = output.isOpen ? text : output.shown;
  return html`<div class="output" dir="auto" lang=${languageOf(now)}>
    ${Markdown ? html`<${Markdown} text=${now} />` : now}${output.state === "streaming" && html`<span class="caret" aria-hidden="true">▍</span>`}</div>`;
}

/**
 * The text as it is, in one node; a token in it is chosen by pointer, finger or arrow keys.
 * @param {{label: string, output: import("./chat.js").Output,
 *   reference: import("./chat.js").Output | null}} props reference: what differences are marked to
 */
function Plain({ label, output, reference }) {
  const box = useRef(null);
  const node = useRef(null);
  const [chosen, show] = useState(-1);
  const setChosen = (index) => {
    if (index >= 0 && hideCard !== show) {
      hideCard(-1);
      hideCard = show;
    }
    show(index);
  };
  useLayoutEffect(() => {
    const text = document.createTextNode(output.shown);
    node.current = text;
    box.current.replaceChildren(text);
    setChosen(-1);
    const speak = () => {
      box.current.lang = languageOf(text.data) ?? "";
    };
    speak();
    const sink = (news) => {
      text.appendData(news);
      if (!box.current.lang) speak();
    };
    output.sinks.add(sink);
    return () => output.sinks.delete(sink);
  }, [output]);

  const isOver = !output.isOpen;
  const units = useMemo(() => (isOver && !output.isBare ? unitsOf(output.shown, output.tokens) : []), [output, isOver]);
  const differing = useMemo(
    () => (isOver && reference && reference !== output && !output.isBare && !reference.isBare ? differences(output.tokens, reference.tokens) : null),
    [output, reference, isOver, reference?.state],
  );
  const ofTokens = (indexes) => units.filter(({ first, last }) => indexes.some((i) => first <= i && i <= last));
  useMarks("token", node, chosen < 0 ? [] : [units[chosen]]);
  useMarks("unsure", node, units.filter(({ first }) => output.tokens[first].logprob < UNSURE));
  useMarks("difference", node, differing && differing.first >= 0 ? ofTokens([differing.first]) : []);
  useMarks("other", node, differing ? ofTokens(differing.others) : []);

  const onPointer = (event) => {
    if (!units.length) return;
    const offset = offsetAt(event.clientX, event.clientY, node.current);
    setChosen(offset >= 0 ? unitAt(units, offset) : -1);
  };
  const onKeyDown = (event) => {
    const to = { ArrowRight: chosen + 1, ArrowLeft: Math.max(0, chosen - 1), Home: 0, End: units.length - 1 }[event.key];
    if (to === undefined || !units.length || event.ctrlKey || event.altKey) return;
    event.preventDefault();
    setChosen(Math.min(units.length - 1, to));
  };
  const unit = units[chosen];
  return html`<div ref=${box} class="output plain" tabindex="0" role="textbox" aria-readonly="true" aria-multiline="true"
      dir="auto" aria-label=${label} onPointerMove=${onPointer} onPointerDown=${onPointer} onPointerLeave=${(event) => event.pointerType === "mouse" && setChosen(-1)}
      onBlur=${() => setChosen(-1)} onKeyDown=${onKeyDown}></div>
    ${differing && html`<${Difference} output=${output} differing=${differing} units=${units} reference=${reference} />`}
    ${unit && html`<${TokenCard} unit=${unit} output=${output} node=${node.current} />`}`;
}

/** For the right forms of Han characters. @param {string} text */
function languageOf(text) {
  if (/[\u3040-\u30ff]/.test(text)) return "ja";
  return /[\u3400-\u9fff]/.test(text) ? "zh-Hans" : null;
}

/** The character under the pointer; -1: none. A caret may be before it or behind it. */
function offsetAt(x, y, node) {
  const caret = document.caretPositionFromPoint?.(x, y);
  const range = caret ? null : document.caretRangeFromPoint?.(x, y);
  if ((caret?.offsetNode ?? range?.startContainer) !== node) return -1;
  const offset = caret?.offset ?? range.startOffset;
  for (const at of [offset - 1, offset]) {
    if (at < 0 || at >= node.length) continue;
    const { left, right, top, bottom } = rectOf(node, at, at + 1);
    if (left <= x && x < right && top <= y && y < bottom) return at;
  }
  return -1;
}

function rectOf(node, start, end) {
  const range = document.createRange();
  range.setStart(node, start);
  range.setEnd(node, end);
  return range.getBoundingClientRect();
}

function useMarks(name, node, units) {
  const key = units.map(({ start }) => start).join();
  useEffect(() => {
    const mark = MARKS.get(name);
    if (!mark || !key) return undefined;
    const ranges = units.map(({ start, end }) => {
      const range = new StaticRange({
        startContainer: node.current,
        startOffset: start,
        endContainer: node.current,
        endOffset: end,
      });
      mark.add(range);
      return range;
    });
    return () => ranges.forEach((range) => mark.delete(range));
  }, [name, key]);
}

/** Over the page, beside its token. It takes no pointer, so that nothing flickers under it. */
function TokenCard({ unit, output, node }) {
  const card = useRef(null);
  useLayoutEffect(() => {
    const box = card.current;
    if (!box.matches(":popover-open")) box.showPopover();
    const { left, top, bottom } = rectOf(node, unit.start, unit.end);
    const isAbove = bottom + box.offsetHeight + CARD_GAP_PX > innerHeight;
    box.style.left = `${Math.max(CARD_GAP_PX, Math.min(left, innerWidth - box.offsetWidth - CARD_GAP_PX))}px`;
    box.style.top = `${isAbove ? top - box.offsetHeight - CARD_GAP_PX : bottom + CARD_GAP_PX}px`;
  });
  const token = output.tokens[unit.first];
  const logprob = logprobOf(output, unit);
  return html`<div ref=${card} class="popover token-card" popover="manual" aria-live="polite">
    <p>${t("playground.token", { n: unit.first + 1 })} <${Piece} text=${textOf(output, unit)} bytes=${token.bytes} /> <strong>${percent(logprob)}</strong> <span class="second">${logprobText(logprob)}</span></p>
    ${token.top.length > 0 &&
    html`<ol class="likeliest" aria-label=${t("playground.likeliest")}>
      ${token.top.map((each) => html`<li><${Piece} text=${each.token} bytes=${each.bytes} /><span class="likely-bar"
        ><i style=${{ inlineSize: `${Math.exp(each.logprob) * 100}%` }}></i></span><span class="number">${percent(each.logprob)}</span></li>`)}
    </ol>`}
  </div>`;
}

const textOf = (output, unit) =>
  output.shown.slice(unit.start, unit.end) || new TextDecoder().decode(new Uint8Array(output.tokens[unit.first].bytes));

/** Several tokens of one character have come together. */
const logprobOf = (output, { first, last }) =>
  output.tokens.slice(first, last + 1).reduce((sum, each) => sum + each.logprob, 0);

/** A token. The bytes of one that is only a part of a character. */
function Piece({ text, bytes }) {
  if (text.includes("\ufffd")) return html`<code>${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}</code>`;
  return html`<code>“<${Name} of=${text} />”</code>`;
}

const percent = (logprob) => count(Math.exp(logprob), { style: "percent", maximumSignificantDigits: 3 });

const logprobText = (value) =>
  value === null || value < MAX_SHOWN_LOGPROB
    ? "–"
    : count(value, { minimumFractionDigits: 3, maximumFractionDigits: 3 });

function Difference({ output, differing, units, reference }) {
  if (differing.first < 0) return html`<p class="second label difference">${t("playground.same")}</p>`;
  const side = (of, list) => {
    const unit = list.find(({ first, last }) => first <= differing.first && differing.first <= last);
    return unit ? html`<${Piece} text=${textOf(of, unit)} bytes=${of.tokens[unit.first].bytes} /> ${percent(logprobOf(of, unit))}` : "–";
  };
  return html`<p class="second label difference">${t("playground.differs", { n: differing.first + 1 })} ${side(output, units)} · ${t("playground.baseSays")} ${side(reference, unitsOf(reference.shown, reference.tokens))}</p>`;
}

/** One quiet line of numbers, and what is behind it. @param {{output: import("./chat.js").Output}} props */
function Numbers({ output }) {
  const { state, end, finish, tokens } = output;
  if (state === "cut" && tokens.length) return html`<span class="warn label">${t("playground.cut", { n: tokens.length })}</span>`;
  if (!end) return null;
  const { timing } = end;
  const facts = [duration(end.ttft_ms ?? timing.queue_ms + timing.prefill_ms), t("playground.tokens", { n: end.num_tokens })];
  if (timing.decode_ms > 0)
    facts.push(t("playground.rate", { n: Math.round(((end.num_tokens - 1) / timing.decode_ms) * 1000) }));
  if (finish !== "stop") facts.push(finish);
  return html`<${Popover} kind="quiet small numbers" card="stack" title=${t("playground.numbers")} face=${facts.join(" · ")}>
    ${() => html`<${Timing} timing=${timing} />
      <p class="second label">${[t("playground.finish", { reason: finish }), t("playground.cached", { n: timing.num_cached_tokens })].join(" · ")}</p>`}
  <//>`;
}

function Timing({ timing }) {
  const phases = PHASES.map((name) => [name, timing[name === "load" ? "adapter_load_ms" : `${name}_ms`]]);
  return html`<div class="timing" aria-hidden="true">
      ${phases.map(([name, ms]) => ms > 0 && html`<span key=${name} class=${name} style=${{ flexGrow: ms }}></span>`)}
    </div>
    <dl class="facts-list">${phases.map(([name, ms]) => html`<dt key=${name}>${t(`playground.${name}`)}</dt><dd class="number">${duration(ms)}</dd>`)}</dl>`;
}

/** How many tokens have come, while they come. @param {{output: import("./chat.js").Output}} props */
function Counter({ output }) {
  const [n, setCount] = useState(output.tokens.length);
  useEffect(() => {
    const sink = () => setCount(output.tokens.length);
    output.sinks.add(sink);
    return () => output.sinks.delete(sink);
  }, [output]);
  return html`<span class="second label">${n ? t("playground.tokens", { n }) : t("playground.waiting")}</span>`;
}

const MAX_ALIGNED = 600;

/**
 * @typedef {{start: number, end: number, first: number, last: number}} Unit
 * Characters [start, end) of the text that tokens first to last make. Several tokens may be parts of
 * one character; a token that the text leaves out has an empty range.
 */

/** @param {string} text @param {{bytes: number[]}[]} tokens @returns {Unit[]} */
export function unitsOf(text, tokens) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const units = [];
  let at = 0;
  let first = 0;
  tokens.forEach(({ bytes }, index) => {
    const piece = decoder.decode(new Uint8Array(bytes), { stream: true });
    if (!piece && bytes.length && index + 1 < tokens.length) return;
    const [start, end] = placeOf(piece, text, at);
    units.push({ start, end, first, last: index });
    at = end;
    first = index + 1;
  });
  return units;
}

function placeOf(piece, text, at) {
  // Tokenizers that put a space before every text leave it out at the beginning.
  for (const form of at === 0 ? [piece, piece.trimStart()] : [piece])
    if (text.startsWith(form, at)) return [at, at + form.length];
  return [at, at];
}

/** The unit that has a character of the text. @param {Unit[]} units @param {number} offset */
export function unitAt(units, offset) {
  let low = 0;
  let high = units.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (units[middle].end > offset) high = middle;
    else low = middle + 1;
  }
  return units.length ? low : -1;
}

/**
 * @param {{id: number}[]} mine @param {{id: number}[]} its
 * @returns {{first: number, others: number[]}} the first token that differs (-1: none), and those
 *   behind it that have no partner: they come after different texts, so this is for the eye only
 */
export function differences(mine, its) {
  const length = Math.min(mine.length, its.length);
  let first = 0;
  while (first < length && mine[first].id === its[first].id) first += 1;
  if (first === mine.length && first === its.length) return { first: -1, others: [] };
  const rest = mine.slice(first + 1, first + MAX_ALIGNED).map(({ id }) => id);
  const paired = common(rest, its.slice(first + 1, first + MAX_ALIGNED).map(({ id }) => id));
  return { first, others: rest.flatMap((_, i) => (paired.has(i) ? [] : [first + 1 + i])) };
}

/** Indexes in `left` of a longest common subsequence. */
function common(left, right) {
  const width = right.length + 1;
  const lengths = new Uint16Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i--)
    for (let j = right.length - 1; j >= 0; j--)
      lengths[i * width + j] =
        left[i] === right[j]
          ? lengths[(i + 1) * width + j + 1] + 1
          : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
  const found = new Set();
  for (let i = 0, j = 0; i < left.length && j < right.length; ) {
    if (left[i] === right[j]) {
      found.add(i);
      i += 1;
      j += 1;
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return found;
}
