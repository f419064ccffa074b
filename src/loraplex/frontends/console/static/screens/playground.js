// One message or prompt, the base and adapters side by side, as one batch.
import { chosenModel, get, manages, useMe, useModels } from "../lib/api.js";
import { html, PHONE, useDrop, useEffect, useKeys, useLayoutEffect, useMedia, useMemo, useReducer, useRef, useState, WIDE } from "../lib/html.js";
import { go, linkTo } from "../lib/route.js";
import { t } from "../lib/texts.js";
import { Loading, lookAlikes } from "../parts/basics.js";
import { begin, copyOf, goingOn, messagesOf, repliesOf, restored, Run, saved, shareReplies, versionOf } from "./playground/chat.js";
import { Chats, keepChat, keepOnlyOf, savedSetup, saveSetup } from "./playground/chats.js";
import { adaptersLike, Board, loadMarkdown } from "./playground/columns.js";
import { Code, Composer, Panel, Parameters, Structure, Toolbar, Tools, Vectors } from "./playground/composer.js";
import { bodyOf, changedFields, fieldOf, fieldsOf, MAX_COLUMNS, newSetup, nextKey } from "./playground/setup.js";

const SAVE_MS = 300;
const NUM_FIRST = 2;
const NUM_DIGITS = 8;
const WARM = "0.8";
/** The panel that has a field of the request. */
const PANELS = new Map([["structured_outputs", "structure"], ["tools", "tools"], ["tool_choice", "tools"], ["parallel_tool_calls", "tools"]]);
/** What the screen was before the reader looked at another one. */
let kept = { tenant: "", state: null };

/** @param {{route: import("../lib/route.js").Route}} props */
export function Screen({ route }) {
  const { tenant } = useMe();
  const model = chosenModel(useModels(), route.query);
  const [state, setState] = useState(null);
  const named = route.query.get("columns");
  const isNamed = useRef(false);
  useEffect(() => {
    if (!model) return;
    keepOnlyOf(tenant);
    if (kept.tenant !== tenant) kept = { tenant, state: null };
    const earlier = kept.state ?? read();
    if (named) {
      firstState(model, named).then(setState);
      // Back and reload find what became of them.
      isNamed.current = true;
      go(linkTo("playground", "", { model: route.query.get("model") ?? "" }), { replace: true });
    } else if (isNamed.current) isNamed.current = false;
    else if (earlier?.model === model.id) setState(earlier);
    else firstState(model, null).then(setState);
  }, [tenant, model?.id, named]);
  if (!state || !model) return html`<h1 class="hidden-text">${t("playground.title")}</h1><${Loading} rows=${3} />`;
  return html`<${Playground} key=${`${state.model} ${state.id}`} tenant=${tenant} model=${model} first=${state} />`;
}

/** What was put together before a reload. */
function read() {
  const found = savedSetup();
  return found?.setup && { model: found.model, setup: found.setup, id: found.chat?.id ?? Date.now(), turns: restored(found.chat?.turns ?? []) };
}

/** The columns that an address names, or the base beside the adapters used or loaded last. */
async function firstState(model, named) {
  const setup = newSetup(model.capabilities?.chat === false ? "completion" : "chat");
  const lists = named ? await Promise.all(JSON.parse(named).map(partsOf)) : await recent(model);
  const columns = lists.slice(0, MAX_COLUMNS).map((parts, i) => ({ key: i + 1, parts }));
  return { model: model.id, setup: { ...setup, columns }, id: Date.now(), turns: [] };
}

async function recent(model) {
  const listed = await adaptersLike("", model.id).catch(() => []);
  const parts = listed.slice(0, NUM_FIRST).map(({ name, digest }) => ({ name, digest, scale: 1 }));
  parts.sort((left, right) => left.name.localeCompare(right.name));
  return [[], ...parts.map((part) => [part])];
}

/** The parts of a column that an address names: null, a name, or the digest of a version. */
async function partsOf(entry) {
  if (entry === null) return [];
  if (entry.digest) return [{ name: entry.digest.slice(0, NUM_DIGITS), digest: entry.digest, scale: 1, isVersion: true }];
  const found = await get(`/v1/adapters/${encodeURIComponent(entry)}`).catch(() => null);
  return [{ name: entry, digest: found?.digest ?? "", scale: 1 }];
}

function Playground({ tenant, model, first }) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  const me = useMe();
  const models = useModels();
  const [setup, setSetup] = useState(first.setup);
  const [chat, setChat] = useState({ id: first.id, turns: first.turns });
  const [text, setText] = useState(first.text ?? "");
  const [editing, setEditing] = useState(null);
  const [panel, setPanel] = useState("");
  const [view, setView] = useState("");
  const [reference, setReference] = useState(null);
  const [refusal, setRefusal] = useState({ field: "", message: "", setup: null });
  const isPhone = useMedia(PHONE);
  const isWide = useMedia(WIDE);
  const [given, setGiven] = useState(null);
  const LoadDialog = useRef(null);
  const field = useRef(null);
  const board = useRef(null);
  const runs = useRef(first.runs ?? new Set());
  const redrawn = useRef(redraw);
  redrawn.current = redraw;
  const current = { model: model.id, setup, id: chat.id, turns: chat.turns, text, runs: runs.current };
  kept = { tenant, state: current };
  useEffect(() => {
    const timer = setTimeout(() => saveSetup({ model: model.id, setup, chat: { id: chat.id, turns: saved(chat.turns) } }), SAVE_MS);
    return () => clearTimeout(timer);
  }, [setup, chat]);
  // Runs go on while another screen is looked at.
  useEffect(() => {
    for (const run of runs.current) run.onChange = () => changed(run);
  }, []);

  const isRunning = runs.current.size > 0;
  const change = (news) => setSetup((old) => ({ ...old, ...news }));
  const { fields, errors } = useMemo(() => fieldsOf(setup), [setup]);
  const shownErrors = refusal.setup === setup ? new Map([...errors, [refusal.field, refusal.message]]) : errors;
  const isChat = setup.kind === "chat";
  const shownView = view || (isChat ? "rendered" : "text");
  const base = (setup.columns.find(({ parts }) => !parts.length) ?? setup.columns[0]).key;
  const compared = setup.columns.some(({ key }) => key === reference) ? reference : base;
  const temperature = Number(setup.options.temperature || (model.defaults?.compare.temperature ?? 0));

  const setTurns = (turns) => setChat((old) => ({ ...old, turns }));
  function changed(run) {
    if (run.state !== "running") runs.current.delete(run);
    // Another tenant has signed in meanwhile: nothing of it is kept.
    if (run.state !== "running" && kept.tenant === tenant) {
      const { id, turns, setup: now } = kept.state;
      if (turns.length) keepChat({ id, at: Date.now(), setup: now, turns: saved(turns) }, tenant);
      const param = run.error?.param;
      const name = fieldOf(param);
      if (name && !["messages", "prompt", "adapters", "entries", "model"].includes(name)) {
        setRefusal({ field: name, message: run.error.message, setup: now });
        setPanel(PANELS.get(name) ?? "parameters");
      }
      saveSetup({ model: model.id, setup: now, chat: { id, turns: saved(turns) } });
    }
    redrawn.current();
  }
  /** Send entries, each to the output that it has. */
  const send = (entries, outputs, own = {}) => {
    const body = bodyOf(models.length > 1 ? model.id : "", { ...fields, ...own }, entries);
    for (const output of outputs) output.isFormed = "structured_outputs" in fields;
    const run = new Run(body, outputs, () => changed(run), () => board.current?.follow());
    runs.current.add(run);
    if (shownView === "rendered") loadMarkdown();
    run.start();
    redraw();
    return run;
  };
  const entryOf = (column, turns) =>
    isChat ? { column, messages: messagesOf(setup.system, turns, column.key) } : { column, prompt: turns.at(-1).text };
  const ask = () => {
    if (isRunning || errors.size || !text.trim()) return;
    const turn = { text, replies: new Map(), run: null };
    const turns = [...(editing === null ? chat.turns : chat.turns.slice(0, editing)), turn];
    const outputs = setup.columns.map(({ key }) => begin(turn, key));
    setTurns(turns);
    kept.state.turns = turns;
    turn.run = send(setup.columns.map((column) => entryOf(column, turns)), outputs);
    setEditing(null);
    if (isChat) setText("");
    board.current?.toEnd();
  };
  const columnOf = (key) => setup.columns.find((column) => column.key === key);
  const again = (index, key, own) => {
    if (isRunning || errors.size) return;
    const turns = chat.turns.slice(0, index + 1);
    send([entryOf(columnOf(key), turns)], [begin(turns[index], key)], own);
  };
  const answer = (index, key) => {
    const turns = chat.turns.slice(0, index + 1);
    const version = versionOf(turns[index], key);
    const messages = [...messagesOf(setup.system, turns, key), ...repliesOf(version)];
    const output = begin({ replies: new Map() }, key);
    version.push(output);
    send([{ column: columnOf(key), messages }], [output]);
  };
  /** A text that was cut is the beginning of the one that takes its place. */
  const goOn = (index, key) => {
    const turns = chat.turns.slice(0, index + 1);
    const version = versionOf(turns[index], key);
    const cut = version.pop();
    const earlier = isChat && [...messagesOf(setup.system, turns, key), ...repliesOf(version)];
    const output = goingOn(cut);
    version.push(output);
    if (!isChat) send([{ column: columnOf(key), prompt: turns[index].text + cut.shown }], [output]);
    else send([{ column: columnOf(key), messages: [...earlier, { role: "assistant", content: cut.shown }] }], [output], { continue_final_message: true });
  };
  const stop = () => runs.current.forEach((run) => run.stop());
  const edit = (index) => {
    setEditing(index);
    setText(chat.turns[index].text);
    field.current.focus();
  };
  const newChat = (kind = setup.kind) => {
    stop();
    setChat({ id: Date.now(), turns: [] });
    setEditing(null);
    if (kind !== setup.kind) change({ kind });
    else setText("");
    field.current?.focus();
  };
  const open = (earlier) => {
    stop();
    setSetup(earlier.setup);
    setChat({ id: earlier.id, turns: restored(earlier.turns) });
    setEditing(null);
  };

  const act = {
    edit,
    again,
    answer,
    goOn,
    show: (index, key, version) => {
      chat.turns[index].replies.get(key).shown = version;
      setTurns([...chat.turns]);
    },
    parts: (key, parts) => change({ columns: setup.columns.map((column) => (column.key === key ? { key, parts } : column)) }),
    replace: (key, part) => act.parts(key, part ? [part] : []),
    toggle: (part) => {
      const found = setup.columns.find(({ parts }) => (part ? parts.length === 1 && parts[0].name === part.name : !parts.length));
      if (found && setup.columns.length > 1) act.remove(found.key);
      else if (!found && setup.columns.length < MAX_COLUMNS) change({ columns: [...setup.columns, { key: nextKey(setup), parts: part ? [part] : [] }] });
    },
    duplicate: (key) => {
      if (setup.columns.length >= MAX_COLUMNS) return;
      const added = nextKey(setup);
      for (const { replies } of chat.turns) if (replies.has(key)) replies.set(added, copyOf(replies.get(key)));
      const at = setup.columns.indexOf(columnOf(key)) + 1;
      change({ columns: setup.columns.toSpliced(at, 0, { key: added, parts: columnOf(key).parts }) });
    },
    move: (key, by) => {
      const at = setup.columns.indexOf(columnOf(key));
      change({ columns: setup.columns.toSpliced(at, 1).toSpliced(at + by, 0, columnOf(key)) });
    },
    share: (key) => {
      shareReplies(chat.turns, key, setup.columns.map((column) => column.key));
      setTurns([...chat.turns]);
    },
    warmer: (key) => again(chat.turns.length - 1, key, { temperature: Number(WARM) }),
    remove: (key) => change({ columns: setup.columns.filter((column) => column.key !== key) }),
    cancel: (key) => {
      const output = versionOf(chat.turns.at(-1), key)?.at(-1);
      // An output that has ended meanwhile cannot be cancelled.
      for (const run of runs.current) if (run.outputs.includes(output)) run.cancel(output).catch(() => {});
    },
  };
  // A folder that is dropped is loaded, and tried beside the others.
  useDrop(manages(me), () => {}, async (source) => {
    LoadDialog.current ??= (await import("./adapters/load.js")).LoadDialog;
    setGiven(source);
  });
  const onLoaded = ({ name, digest }) => {
    const part = { name, digest, scale: 1 };
    const earlier = setup.columns.find(({ parts }) => parts.length === 1 && parts[0].name === name);
    if (earlier) act.replace(earlier.key, part);
    else if (setup.columns.length < MAX_COLUMNS) act.toggle(part);
    else return;
    setGiven(null);
  };
  // What is drawn seldom calls the newest of them.
  const acts = useRef({});
  Object.assign(acts.current, act);
  const onKeyDown = (event) => {
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask();
    } else if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog[open], :popover-open:not(.token-card)")) {
      if (isRunning) stop();
      else if (editing !== null) {
        setEditing(null);
        setText("");
      } else board.current?.escape();
    }
  };
  // An effect of each render would come too late for who types and presses Enter at once.
  const newest = useRef(onKeyDown);
  newest.current = onKeyDown;
  const newestChat = useRef(newChat);
  newestChat.current = newChat;
  useEffect(() => {
    const listener = (event) => newest.current(event);
    addEventListener("keydown", listener);
    return () => removeEventListener("keydown", listener);
  }, []);
  useKeys(useMemo(() => new Map([["n", () => newestChat.current()]]), []));
  // Chat is what one types in first; a phone would cover half of itself with its keyboard.
  useLayoutEffect(() => {
    if (!isPhone) field.current?.focus({ preventScroll: true });
  }, []);

  const numAdapters = setup.columns.filter(({ parts }) => parts.length).length;
  const name = numAdapters ? t("playground.andAdapters", { model: model.id, n: numAdapters }) : model.id;
  const numChanged = changedFields(setup).length;
  const lastBody = () => chat.turns.at(-1)?.run?.body
    ?? bodyOf(models.length > 1 ? model.id : "", fields, setup.columns.map((column) => entryOf(column, [{ text: text || "…", replies: new Map() }])));
  const alike = useMemo(() => lookAlikes(setup.columns.flatMap(({ parts }) => parts.map(({ digest }) => digest))), [setup.columns]);
  const openPanel = (name_) => setPanel(name_);
  const tools = { setup, change, chat, view: shownView, reference: compared, numChanged, panel, isPhone, onView: setView, onReference: setReference, onPanel: openPanel };
  return html`<h1 class="hidden-text">${t("playground.title")}</h1>
    <div class="playground ${panel && isWide && INLINE.has(panel) ? "with-panel" : ""}">
      ${!isPhone && html`<${Toolbar} ...${tools} />`}
      <${Board} handle=${board} chat=${chat} setup=${setup} model=${model} view=${shownView} reference=${compared} alike=${alike} isGreedy=${temperature === 0}
        isRunning=${isRunning} runs=${runs.current} isPhone=${isPhone} act=${acts.current} menu=${isPhone && html`<${Toolbar} ...${tools} />`}
        onExample=${(example) => { setText(example); field.current.focus(); }} />
      <${Composer} field=${field} setup=${setup} text=${text} name=${name} hasChat=${model.capabilities?.chat !== false} isRunning=${isRunning}
        isEditing=${editing !== null} error=${shownErrors.get("prompt") ?? shownErrors.get("messages")} isBad=${errors.size > 0} open=${panel}
        numChanged=${isPhone ? numChanged : null} onText=${setText} onKind=${newChat} onSend=${ask} onStop=${stop}
        onEdit=${() => chat.turns.length && edit(chat.turns.length - 1)} onOpen=${openPanel} />
      ${INLINE.has(panel) && html`<${Panel} title=${t(`playground.${panel}`)} isWide=${isWide} onClose=${() => setPanel("")}>
        ${panel === "parameters" && html`<${Parameters} setup=${setup} change=${change} errors=${shownErrors} refused=${refusal.field} defaults=${model.defaults?.compare ?? {}} />`}
        ${panel === "structure" && html`<${Structure} structured=${setup.structured} error=${shownErrors.get("structured_outputs")} onChange=${(structured) => change({ structured })} />`}
        ${panel === "tools" && html`<${Tools} tools=${setup.tools} onChange=${(news) => change({ tools: news })} />`}
      <//>`}
    </div>
    ${given && html`<${LoadDialog.current} name="" given=${given} onClose=${() => setGiven(null)} onLoaded=${onLoaded} />`}
    ${panel === "chats" && html`<${Chats} onOpen=${open} onNew=${() => newChat()} onClose=${() => setPanel("")} />`}
    ${panel === "vectors" && html`<${Vectors} columns=${setup.columns} model=${model.id} text=${text || chat.turns.at(-1)?.text || ""} onClose=${() => setPanel("")} />`}
    ${panel === "code" && html`<${Code} body=${lastBody()} model=${model.id} hasTriton=${!isChat && models.length < 2} onClose=${() => setPanel("")} />`}`;
}

const INLINE = new Set(["parameters", "structure", "tools"]);
