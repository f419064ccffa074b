// One output: who made it, its text, its tokens, its times.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../lib/html.js";
import { count, duration, t } from "../../lib/texts.js";
import { Mark } from "../../parts/mark.js";
import { Name } from "../../parts/name.js";
import { Markdown } from "./markdown.js";
import { differences, unitAt, unitsOf } from "./tokens.js";

const PHASES = ["queue", "load", "prefill", "decode"];
const AT_END_PX = 24;
const MAX_SHOWN_LOGPROB = -9000;

/** Ranges of text that are marked, of all outputs: a text stays one node, however many tokens. */
const MARKS = new Map(
  ["token", "difference", "other"].map((name) => [name, globalThis.Highlight && new Highlight()]),
);
for (const [name, mark] of MARKS) if (mark) CSS.highlights.set(`playground-${name}`, mark);

/**
 * @param {{label: string,
 *   output: import("./run.js").Output | null, reference: import("./run.js").Output | null,
 *   isRendered: boolean, isShown: boolean, head: unknown, onReply: (() => void) | null}} props
 *   label: the name as plain text; isShown: the one that a narrow page shows; head: controls of the
 *   column
 */
export function Column({ label, output, reference, isRendered, isShown, head, onReply }) {
  const digests = output?.end?.adapters?.map(({ digest }) => digest) ?? [];
  return html`<section class=${`column card ${isShown ? "shown" : ""}`} aria-label=${label} data-state=${output?.state ?? "empty"}>
    ${head}
    ${output?.reasoning &&
    html`<details class="second"><summary>${t("playground.reasoning")}</summary><bdi>${output.reasoning}</bdi></details>`}
    ${output && isRendered
      ? html`<div class="output" tabindex="0" role="group" aria-label=${label}>
          <${Rendered} output=${output} /></div>`
      : html`<${Plain} key=${output?.key} label=${label} output=${output} reference=${reference} />`}
    ${output?.calls.map(
      (call) => html`<p class="call"><code><${Name} of=${`${call.name}(${call.arguments})`} /></code></p>`,
    )}
    <div class="about">${output && html`<${Facts} output=${output} digests=${digests} />`}</div>
    ${onReply && output?.state === "done" &&
    html`<button class="small" onClick=${onReply}>${t("playground.reply")}</button>`}
  </section>`;
}

function Rendered({ output }) {
  const [text, setText] = useState(output.text);
  useEffect(() => {
    output.sink = () => setText(output.text);
    setText(output.text);
    return () => {
      output.sink = () => {};
    };
  }, [output]);
  return html`<${Markdown} text=${text} />`;
}

/** The text as it is, in one node; a token in it is chosen by pointer or arrow keys. */
function Plain({ label, output, reference }) {
  const box = useRef(null);
  const node = useRef(null);
  const [chosen, setChosen] = useState(-1);
  useLayoutEffect(() => {
    const text = document.createTextNode(output?.text ?? "");
    node.current = text;
    box.current.replaceChildren(text);
    setChosen(-1);
    if (!output) return undefined;
    speak(box.current, text.data);
    output.sink = (news) => {
      const { scrollTop, clientHeight, scrollHeight } = box.current;
      const follows = scrollHeight - scrollTop - clientHeight < AT_END_PX;
      text.appendData(news);
      speak(box.current, news);
      if (follows) box.current.scrollTop = box.current.scrollHeight;
    };
    return () => {
      output.sink = () => {};
    };
  }, [output]);

  const isOver = Boolean(output) && output.state !== "waiting" && output.state !== "streaming";
  const units = useMemo(() => (isOver ? unitsOf(output.text, output.tokens) : []), [output, isOver]);
  const differing = useMemo(
    () => (isOver && reference && reference !== output ? differences(output.tokens, reference.tokens) : null),
    [output, reference, isOver, reference?.state],
  );
  useMarks("token", node, chosen < 0 ? [] : [units[chosen]]);
  const ofTokens = (indexes) => units.filter(({ first, last }) => indexes.some((i) => first <= i && i <= last));
  useMarks("difference", node, differing && differing.first >= 0 ? ofTokens([differing.first]) : []);
  useMarks("other", node, differing ? ofTokens(differing.others) : []);

  const onPointerMove = (event) => {
    if (!units.length) return;
    const offset = offsetAt(event.clientX, event.clientY, node.current);
    if (offset >= 0) setChosen(unitAt(units, offset));
  };
  const onKeyDown = (event) => {
    const to = { ArrowRight: chosen + 1, ArrowLeft: Math.max(0, chosen - 1), Home: 0, End: units.length - 1 }[event.key];
    if (to === undefined || !units.length || event.ctrlKey || event.altKey) return;
    event.preventDefault();
    setChosen(Math.min(units.length - 1, to));
  };
  return html`<div ref=${box} class="output" tabindex="0" role="textbox" aria-readonly="true" aria-multiline="true"
      dir="auto" aria-label=${label} onPointerMove=${onPointerMove} onKeyDown=${onKeyDown}></div>
    <div class="token second" aria-live="polite">
      ${chosen >= 0 && units[chosen]
        ? html`<${Chosen} unit=${units[chosen]} tokens=${output.tokens} text=${output.text} />`
        : differing && html`<${Difference} output=${output} differing=${differing} reference=${reference} />`}
    </div>`;
}

/** For the right forms of Han characters. */
function speak(box, text) {
  if (/[\u3040-\u30ff]/.test(text)) box.lang = "ja";
  else if (!box.lang && /[\u3400-\u9fff]/.test(text)) box.lang = "zh-Hans";
}

/** The character under the pointer; -1: none. A caret may be before it or behind it. */
function offsetAt(x, y, node) {
  const caret = document.caretPositionFromPoint?.(x, y);
  const range = caret ? null : document.caretRangeFromPoint?.(x, y);
  if ((caret?.offsetNode ?? range?.startContainer) !== node) return -1;
  const offset = caret?.offset ?? range.startOffset;
  const character = document.createRange();
  for (const at of [offset - 1, offset]) {
    if (at < 0 || at >= node.length) continue;
    character.setStart(node, at);
    character.setEnd(node, at + 1);
    const { left, right, top, bottom } = character.getBoundingClientRect();
    if (left <= x && x < right && top <= y && y < bottom) return at;
  }
  return -1;
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

function Chosen({ unit, tokens, text }) {
  const token = tokens[unit.first];
  const piece = text.slice(unit.start, unit.end) || new TextDecoder().decode(new Uint8Array(token.bytes));
  const logprob = tokens.slice(unit.first, unit.last + 1).reduce((sum, each) => sum + each.logprob, 0);
  return html`<span>${t("playground.token", { n: unit.first })} <${Likely} token=${{ token: piece, logprob }} /></span>
    ${token.top.length > 0 &&
    html`<ol class="likeliest" aria-label=${t("playground.likeliest")}>
      ${token.top.map((each) => html`<li><${Likely} token=${each} /></li>`)}
    </ol>`}`;
}

/** A token and its log probability. The bytes of one that is only a part of a character. */
function Likely({ token: { token, bytes, logprob } }) {
  const isPart = bytes && token.includes("\ufffd");
  const text = isPart ? bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ") : token;
  return html`<span><code>${isPart ? text : html`“<${Name} of=${text} />”`}</code> ${logprobText(logprob)}</span>`;
}

const logprobText = (value) =>
  value === null || value < MAX_SHOWN_LOGPROB
    ? "–"
    : count(value, { minimumFractionDigits: 3, maximumFractionDigits: 3 });

function Difference({ output, differing, reference }) {
  if (differing.first < 0) return html`<span>${t("playground.same")}</span>`;
  const versus = output.end?.versus_base?.first;
  const isBase = versus && reference.end && reference.end.versus_base === null && versus.position === differing.first;
  return html`<span>${t("playground.differs", { n: differing.first })}</span>
    ${isBase &&
    html` <span><${Likely} token=${versus.here} /> · ${t("playground.baseSays")} <${Likely}
      token=${{ token: versus.base.token, logprob: versus.base.base_logprob }} /></span>`}`;
}

function Facts({ output, digests }) {
  const { state, end, finish, tokens } = output;
  if (state === "failed") return html`<p class="bad" role="alert">${output.error}</p>`;
  if (state === "cut") return html`<p class="warn">${t("playground.cut", { n: tokens.length })}</p>`;
  if (!end) return html`<p class="second facts">${t(state === "waiting" ? "playground.waiting" : "playground.writing")}</p>`;
  const { timing } = end;
  const facts = [t("playground.tokens", { n: end.num_tokens })];
  if (timing.decode_ms > 0)
    facts.push(t("playground.rate", { n: Math.round(((end.num_tokens - 1) / timing.decode_ms) * 1000) }));
  if (timing.num_cached_tokens > 0) facts.push(t("playground.cached", { n: timing.num_cached_tokens }));
  facts.push(t("playground.finish", { reason: finish }));
  return html`<${TimingBar} timing=${timing} />
    <p class="second facts">${facts.join(" · ")} ${digests.map((digest) => html`<${Mark} digest=${digest} />`)}</p>`;
}

function TimingBar({ timing }) {
  const phases = PHASES.map((name) => [name, timing[name === "load" ? "adapter_load_ms" : `${name}_ms`]]);
  const text = phases.map(([name, ms]) => `${t(`playground.${name}`)} ${duration(ms)}`).join(" · ");
  return html`<div class="timing" role="img" aria-label=${text}>
      ${phases.map(([name, ms]) => ms > 0 && html`<span key=${name} class=${name} style=${{ flexGrow: ms }}></span>`)}
    </div>
    <p class="second facts" aria-hidden="true">${text}</p>`;
}
