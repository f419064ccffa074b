// What screens are made of: names and marks, controls, windows over the page, icons, and states of data.
import { html, useEffect, useId, useLayoutEffect, useRef, useState } from "../lib/html.js";
import { ago, moment, t } from "../lib/texts.js";

// An adapter's mark: a colour and a texture from its digest, so that a new version looks new.

const NUM_COLOURS = 8;
const NUM_DIGITS = 4;
const TEXTURES = ["plain", "stripes", "dots"];

/** @param {string} digest empty: the base model, or not known yet */
export function lookOf(digest) {
  if (!digest) return { colour: -1, texture: "plain" };
  const number = parseInt(digest.slice(0, 8), 16);
  return {
    colour: number % NUM_COLOURS,
    texture: TEXTURES[Math.floor(number / NUM_COLOURS) % TEXTURES.length],
  };
}

/** Those digests of a view that look like another one in it. @param {string[]} digests */
export function lookAlikes(digests) {
  const byLook = new Map();
  for (const digest of new Set(digests.filter(Boolean))) {
    const { colour, texture } = lookOf(digest);
    const look = `${colour} ${texture}`;
    byLook.set(look, [...(byLook.get(look) ?? []), digest]);
  }
  return new Set([...byLook.values()].filter((alike) => alike.length > 1).flat());
}

/** @param {{digest: string}} props */
export function Mark({ digest }) {
  const { colour, texture } = lookOf(digest);
  const swatch = colour < 0 ? "base" : `c${colour}`;
  return html`<span class="swatch ${swatch} ${texture}" aria-hidden="true"></span>`;
}

/**
 * An adapter's mark and name, and the beginning of its digest where its mark is not enough.
 * @param {{name: string, digest: string, alike?: Set<string>}} props alike: see lookAlikes
 */
export function Marked({ name, digest, alike }) {
  return html`<span class="marked"><${Mark} digest=${digest} /><${Name} of=${name} />${alike?.has(digest) &&
    html`<span class="digest">${digest.slice(0, NUM_DIGITS)}</span>`}</span>`;
}

// Names that strangers chose. They cannot change the direction of the text around them, and what is
// invisible in them is shown.

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

// Whether requests may use an adapter, and whether something is to be done about it.

const KINDS = new Map([["ready", "good"], ["unvalidated", "second"]]);

/** @param {{of: {state: string, warnings: string[]}}} props */
export function AdapterState({ of }) {
  const { state, warnings } = of;
  return html`<span class=${KINDS.get(state) ?? "bad"}>${t(`adapters.${state}`)}</span>
    ${warnings.length > 0 && html` <span class="warn" title=${warnings.join("\n")}
      ><span aria-hidden="true">⚠ ${warnings.length}</span><span class="hidden-text">${t("adapters.warnings", { n: warnings.length })}</span></span>`}`;
}

// A choice of one of a few words: in a list, or all of them seen.

/**
 * @param {{label: string, value: string | null, options: string[][], small?: boolean,
 *   any?: string, onChoice: (name: string) => void}} props options: pairs of a name and its text;
 *   any: the text of no choice, whose name is empty
 */
export function Choice({ label, value, options, any, small = false, onChoice }) {
  return html`<select class=${small ? "small" : null} aria-label=${label} value=${value ?? ""}
    onChange=${(event) => onChoice(event.target.value)}>
    ${any && html`<option value="">${any}</option>`}
    ${options.map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}
  </select>`;
}

/**
 * @param {{label: string, value: string, options: string[][], onChoice: (name: string) => void}} props
 *   options: pairs of a name and its text
 */
export function Tabs({ label, value, options, onChoice }) {
  return html`<span class="tabs" role="group" aria-label=${label}>
    ${options.map(([name, text]) => html`<button type="button" key=${name} class="small" aria-pressed=${name === value}
      onClick=${() => onChoice(name)}>${text}</button>`)}
  </span>`;
}

// A button that copies a text.

/** @param {{text: () => string, label: string, isIcon?: boolean}} props */
export function Copy({ text, label, isIcon = false }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text());
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  if (isIcon)
    return html`<button class="quiet only-icon small" aria-label=${isDone ? t("shell.copied") : label} title=${label} onClick=${copy}
      >${isDone ? "✓" : html`<${Icon} name="copy" />`}</button>`;
  return html`<button class="small" onClick=${copy}>
    <span aria-live="polite">${isDone ? t("shell.copied") : label}</span>
  </button>`;
}

// A button that opens a card over the page. The browser closes it on Escape and on a press outside.

const EDGE_PX = 8;

/**
 * @param {{face: unknown, label?: string, title?: string, kind?: string, card?: string,
 *   children: (close: () => void) => unknown}} props face: what the button shows; label: its name if
 *   it shows no words; kind: its classes; card: classes of what opens; children: drawn while it is open
 */
export function Popover({ face, label, title, kind = "", card = "", children }) {
  const id = useId();
  const button = useRef(null);
  const popover = useRef(null);
  const [isOpen, setOpen] = useState(false);
  const close = () => popover.current?.hidePopover();
  useLayoutEffect(() => {
    if (!isOpen) return undefined;
    const place = () => {
      const from = button.current.getBoundingClientRect();
      const { offsetWidth: width, offsetHeight: height, style } = popover.current;
      const left = from.left + width + EDGE_PX > innerWidth ? from.right - width : from.left;
      const isAbove = from.bottom + height + EDGE_PX > innerHeight && from.top > innerHeight - from.bottom;
      style.left = `${Math.max(EDGE_PX, Math.min(left, innerWidth - width - EDGE_PX))}px`;
      style.top = `${Math.max(EDGE_PX, isAbove ? from.top - height - 4 : from.bottom + 4)}px`;
    };
    place();
    const observer = new ResizeObserver(place);
    observer.observe(popover.current);
    addEventListener("resize", place);
    return () => {
      observer.disconnect();
      removeEventListener("resize", place);
    };
  }, [isOpen]);
  return html`<button type="button" ref=${button} class=${kind} aria-label=${label} title=${title ?? label}
      popovertarget=${id} aria-expanded=${isOpen ? "true" : "false"}>${face}</button>
    <div ref=${popover} id=${id} class="popover" popover="auto"
      onToggle=${(event) => setOpen(event.newState === "open")}>
      ${isOpen && html`<div class=${card}>${children(close)}</div>`}</div>`;
}

// A question before something that cannot be taken back, and other windows over the page.

/**
 * A modal window, open as long as it is rendered.
 * @param {{title: string, kind?: string, hasClose?: boolean, onClose: () => void, children: unknown}} props
 *   kind: "drawer" at the side, "sheet" from below, "load" wide; hasClose: with a button for that at its top
 */
export function Dialog({ title, kind = "", hasClose = false, onClose, children }) {
  const dialog = useRef(null);
  const heading = useId();
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  return html`<dialog ref=${dialog} class=${kind} aria-labelledby=${heading} onClose=${onClose}>
    <div class="row"><h2 id=${heading}>${title}</h2>
      ${hasClose && html`<div class="row end"><button class="quiet only-icon" aria-label=${t("shell.close")} title=${t("shell.close")} onClick=${onClose}><${Icon} name="close" /></button></div>`}</div>
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

// Icons, drawn in a square of 16. An icon without a word beside it needs `aria-label` and `title`
// on its button.

const PATHS = new Map([
  ["chat", "M2.5 3h11v8H7l-3 2.5V11H2.5z"],
  ["adapters", "M8 2l6 3-6 3-6-3zM2 8l6 3 6-3M2 11l6 3 6-3"],
  ["live", "M1.5 8.5h3l2-5.5 3 10 2-4.5h3"],
  ["requests", "M2.5 4h11M2.5 8h11M2.5 12h7"],
  ["server", "M2.5 2.5h11v4h-11zM2.5 9.5h11v4h-11zM5 4.5h.5M5 11.5h.5"],
  ["sliders", "M2 4.5h6M12 4.5h2M2 11.5h2M8 11.5h6M10 2.5v4M6 9.5v4"],
  ["send", "M8 13.5v-11M3.5 7L8 2.5 12.5 7"],
  ["stop", "M4 4h8v8H4z"],
  ["redo", "M13 8a5 5 0 1 1-1.5-3.5L13 6M13 2.5V6H9.5"],
  ["copy", "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3"],
  ["edit", "M3 13l.5-3L10.5 3 13 5.5 6 12.5z"],
  ["plus", "M8 3v10M3 8h10"],
  ["close", "M4 4l8 8M12 4l-8 8"],
  ["more", "M3.5 8h.01M8 8h.01M12.5 8h.01"],
  ["chevron", "M4.5 6.5L8 10l3.5-3.5"],
  ["upload", "M8 10.5v-8M4.5 6L8 2.5 11.5 6M2.5 10.5v3h11v-3"],
  ["pin", "M5.5 2.5h5l-.5 5 2 2H4l2-2zM8 9.5v4.5"],
  ["expand", "M9.5 2.5h4v4M6.5 13.5h-4v-4M13.5 2.5L9 7M2.5 13.5L7 9"],
]);

/** @param {{name: string}} props */
export const Icon = ({ name }) =>
  html`<svg class="icon ${name}" viewBox="0 0 16 16" aria-hidden="true"><path d=${PATHS.get(name)} /></svg>`;

// What a screen shows of data that it asks for: nothing is ever blank.

const QUIET_MS = 300;

/**
 * The children with the data, or why there is none. Old data stays, greyed, while the server is
 * gone.
 * @template T
 * @param {{of: import("../lib/html.js").Polled<T>, children: (data: T) => unknown,
 *   isEmpty?: (data: T) => boolean, empty?: unknown, rows?: number, needs?: string}} props rows: how
 *   many grey ones stand for data that loads; needs: the line of keys.toml that would allow it
 */
export function States({ of, children, isEmpty = () => false, empty, rows = 1, needs }) {
  const { state, data, error, at, retryAt, again } = of;
  if (data === null && state === "loading") return html`<${Loading} rows=${rows} />`;
  if (state === "refused")
    return html`<div class="state" role="alert">${error.message}
      ${needs && html`<p>${t("shell.needs")}</p><pre>[tenants.NAME]
${needs}</pre>`}</div>`;
  const shown = data !== null && (isEmpty(data) ? html`<div class="state">${empty}</div>` : children(data));
  if (state === "ready" || state === "loading") return shown;
  return html`
    <div class="state bad" role="alert">
      ${state === "gone" ? t("shell.gone") : error.message}
      ${data !== null && html` <${Age} at=${at} />`} <${Countdown} to=${retryAt} />
      <button class="small" onClick=${again}>${t("shell.again")}</button>
    </div>
    <div class="old">${shown}</div>`;
}

/** Shown only when it takes a moment, so that nothing flickers. @param {{rows?: number}} props */
export function Loading({ rows = 1 }) {
  const [isLate, setLate] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), QUIET_MS);
    return () => clearTimeout(timer);
  }, []);
  return html`<div class="state grey-rows" aria-live="polite">
    ${isLate && html`<span class="hidden-text">${t("shell.loading")}</span>${Array.from({ length: rows }, (_, i) => html`<i key=${i}></i>`)}`}
  </div>`;
}

/** Renders each second. @returns {number} Unix milliseconds */
function useNow() {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}

/** Seconds until something is tried again. @param {{to: number, text?: string}} props Unix ms; 0: never; text: a name */
export function Countdown({ to, text = "shell.nextTry" }) {
  const now = useNow();
  if (!to) return null;
  return html`<span>${t(text, { seconds: Math.max(0, Math.ceil((to - now) / 1000)) })}</span>`;
}

/** How old something is. @param {{at: number}} props ms */
function Age({ at }) {
  const seconds = Math.max(0, Math.round((useNow() - at) / 1000));
  return html`<span class="second">${t("shell.age", { seconds })}</span>`;
}

// A moment in a list, short; its title is exact.

/** @param {{at: number | null}} props Unix seconds; null: never */
export function When({ at }) {
  if (at === null) return "–";
  return html`<time dateTime=${new Date(at * 1000).toISOString()} title=${moment(at)}>${ago(at)}</time>`;
}
