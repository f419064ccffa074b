// What is around every screen: navigation, sign-in, the server's health, language and theme.
import { baseModels, chosenModel, get, hasKey, json, MeContext, ModelsContext, request, setKey, useMe } from "./lib/api.js";
import { html, render, useEffect, useId, useKeys, useMemo, usePoll, useReducer, useRef, useState } from "./lib/html.js";
import { go, linkTo, useRoute } from "./lib/route.js";
import { choose, chosen, count, LANGUAGES, load, moment, preferred, t } from "./lib/texts.js";
import { Choice, Copy, Countdown, Dialog, Icon, Loading, Name, Popover, States } from "./parts/basics.js";

const HEALTH_SECONDS = 5;

/** Screens by the first part of the hash: the key after `g`, who sees them, and their icon. */
const SCREENS = new Map([
  ["playground", { key: "p", isSeen: () => true, icon: "chat" }],
  ["adapters", { key: "a", isSeen: () => true, icon: "adapters" }],
  ["live", { key: "l", isSeen: (me) => me.operator, icon: "live" }],
  ["requests", { key: "r", isSeen: () => true, icon: "requests" }],
  ["settings", { key: "s", isSeen: (me) => me.operator, icon: "server" }],
]);
const FIRST = "playground";
const NONE = [];

function Shell() {
  const [, redraw] = useReducer((n) => n + 1, 0);
  const [session, startSession] = useReducer((n) => n + 1, 0);
  const me = usePoll((signal) => get("/v1/me", signal), 0, [session]);
  const health = usePoll(healthOf, HEALTH_SECONDS, [session]);
  const isSignedOut = me.state === "refused" && me.error.status === 401;
  const isIn = Boolean(me.data) && !isSignedOut;
  const models = usePoll(async (signal) => (isIn ? baseModels(signal) : []), 0, [session, isIn]);
  // A key that is revoked while the page is open.
  useEffect(() => {
    addEventListener("unauthenticated", me.again);
    return () => removeEventListener("unauthenticated", me.again);
  }, [me.again]);
  // The server is back: perhaps with other keys, or a newer version.
  const wasGone = useRef(false);
  useEffect(() => {
    if (health.state === "gone") wasGone.current = true;
    if (health.state !== "ready") return;
    if (wasGone.current || me.state === "gone" || me.state === "failed") me.again();
    if (wasGone.current || !models.data?.length) models.again();
    wasGone.current = false;
  }, [health.state]);

  const signIn = (key, keep) => {
    setKey(key, keep);
    startSession();
  };
  const [version, setVersion] = useState("");
  useEffect(() => {
    if (me.data && !version) setVersion(me.data.version);
  }, [me.data]);
  return html`<${Page}
    top=${html`<${Bar}
      me=${isSignedOut ? null : me.data}
      models=${models.data ?? []}
      health=${health}
      onSignOut=${() => signIn("", false)}
      onChange=${redraw}
    />`}
  >
    ${me.data &&
    version &&
    me.data.version !== version &&
    html`<p class="card row">${t("shell.newer")}
      <button class="small" onClick=${() => location.reload()}>${t("shell.reload")}</button></p>`}
    ${isSignedOut
      ? html`<${SignIn} isWrong=${hasKey()} onKey=${signIn} />`
      : html`<${States} of=${me}>
          ${(data) => html`<${MeContext.Provider} value=${data}><${ModelsContext.Provider} value=${models.data ?? NONE}>
            <${Screens} me=${data} key=${session} /><//><//>`}
        <//>`}
  <//>`;
}

function Page({ top, children }) {
  return html`<a class="skip" href="#main" onClick=${focusMain}>${t("shell.skip")}</a>${top}
    <main id="main" tabindex="-1">${children}</main>`;
}

/** @param {Event} event */
function focusMain(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

/** Why the server is not ready; empty: it is. @param {AbortSignal} signal */
async function healthOf(signal) {
  const response = await request("GET", "/health/ready", { signal, takes: [503] });
  return response.ok ? "" : ((await json(response))?.reason ?? "");
}

function Bar({ me, models, health, onSignOut, onChange }) {
  const route = useRoute();
  const [isHelp, setHelp] = useState(false);
  const actions = useMemo(() => {
    const found = new Map([["?", () => setHelp(true)]]);
    for (const [name, { key }] of SCREENS) found.set(`g ${key}`, () => go(linkTo(name)));
    found.set("/", () => /** @type {HTMLElement} */ (document.querySelector("[type=search]"))?.focus());
    return found;
  }, []);
  useKeys(actions);
  const seen = me ? [...SCREENS].filter(([, { isSeen }]) => isSeen(me)) : [];
  const shownScreen = SCREENS.has(route.screen) ? route.screen : FIRST;
  return html`<header class="bar">
    <a class="brand" href=${linkTo(FIRST)} aria-label="loraplex"><img src="icon.svg" alt="" /><span>loraplex</span></a>
    <nav class="screens" aria-label=${t("shell.screens")}>
      ${seen.map(
        ([name, { icon }]) => html`<a key=${name} href=${linkTo(name)} aria-current=${name === shownScreen ? "page" : null}
          ><${Icon} name=${icon} /><span class="long">${t(`${name}.title`)}</span><span class="short">${t(`${name}.short`)}</span></a>`,
      )}
    </nav>
    <div class="end">
      <${MeContext.Provider} value=${me}>
        <${ModelChip} model=${chosenModel(models, route.query)} models=${models} health=${health} route=${route} /><//>
      <${Popover} kind="quiet only-icon" card="menu" label=${t("shell.more")} face=${html`<${Icon} name="more" />`}>
        ${(close) => html`<${Menu} me=${me} seen=${seen} onSignOut=${onSignOut} onChange=${onChange}
          onHelp=${() => { close(); setHelp(true); }} close=${close} />`}
      <//>
    </div>
    ${isHelp && html`<${Help} onClose=${() => setHelp(false)} />`}
  </header>`;
}

function Menu({ me, seen, onSignOut, onChange, onHelp, close }) {
  return html`${seen.map(([name]) => html`<a class="more-screens" key=${name} href=${linkTo(name)} onClick=${close}>${t(`${name}.title`)}</a>`)}
    <label>${t("shell.language")}
      <${Choice} label=${t("shell.language")} value=${chosen()} options=${[...LANGUAGES]}
        onChoice=${(name) => choose(name).then(onChange)} /></label>
    <label>${t("shell.theme")}
      <${Choice} label=${t("shell.theme")} value=${theme()}
        options=${THEMES.map((name) => [name, t(`shell.${name}`)])}
        onChoice=${(name) => { chooseTheme(name); onChange(); }} /></label>
    <button onClick=${onHelp}>${t("shell.keys")} <kbd>?</kbd></button>
    ${me?.has_keys && html`<p class="second">${t("shell.tenant")} <${Name} of=${me.tenant} /></p>
      <button onClick=${() => { close(); onSignOut(); }}>${t("shell.signOut")}</button>`}`;
}

function Help({ onClose }) {
  const rows = [...SCREENS].map(([name, { key }]) => [`g ${key}`, t(`${name}.title`)]);
  rows.push(
    ["/", t("shell.keySearch")],
    ["Enter", t("shell.keyRun")],
    ["n", t("shell.keyNew")],
    ["Esc", t("shell.keyStop")],
    ["j k", t("shell.keyRows")],
    ["?", t("shell.keys")],
  );
  return html`<${Dialog} title=${t("shell.keys")} onClose=${onClose}>
    <dl class="keys">
      ${rows.map(([key, text]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${text}</dd></div>`)}
    </dl>
    <div class="row end"><button onClick=${onClose}>${t("shell.close")}</button></div>
  <//>`;
}

/** The screen of the route. Its code is loaded when it is first shown. */
function Screens({ me }) {
  const route = useRoute();
  const name = SCREENS.get(route.screen)?.isSeen(me) ? route.screen : FIRST;
  const [loaded, setLoaded] = useState({ name: "", Screen: null });
  useEffect(() => {
    let isCurrent = true;
    document.title = `${t(`${name}.title`)} · loraplex`;
    import(`./screens/${name}.js`).then(({ Screen }) => isCurrent && setLoaded({ name, Screen }));
    return () => {
      isCurrent = false;
    };
  }, [name]);
  if (loaded.name !== name) return html`<${Loading} />`;
  return html`<${loaded.Screen} route=${route} />`;
}

// The chip in the header that names the model and its state, and the card that it opens.

/**
 * @param {{model: import("./lib/api.js").Model | null, models: import("./lib/api.js").Model[],
 *   health: import("./lib/html.js").Polled<string>, route: import("./lib/route.js").Route}} props
 */
function ModelChip({ model, models, health, route }) {
  const state = useServerState(health);
  const face = html`<span class="what"><bdi>${model?.id ?? ""}</bdi>${model?.device && html`<span class="rest"> · ${chipText(model)}</span>`}</span>
    <span class="health ${state.kind}"><span aria-hidden="true">${state.sign}</span> ${state.text}</span>
    <${Icon} name="chevron" />`;
  // A button's contents are its name: changes are announced beside it.
  return html`<span class="hidden-text" role="status">${state.word}</span><${Popover} kind="chip" card="model-card" face=${face} title=${state.reason || t("shell.aboutModel")}>
    ${(close) => html`<${Card} model=${model} models=${models} state=${state} route=${route} close=${close} />`}
  <//>`;
}

/** Device and type in two words, such as "CPU bf16". */
const chipText = ({ device, dtype, quantization }) =>
  [device.toUpperCase(), quantization || shortType(dtype)].filter(Boolean).join(" ");

const shortType = (dtype = "") => dtype.replace("bfloat", "bf").replace("float", "f");

/** How the server is: a sign, a word and a colour. What was ready once is restarting. */
function useServerState(health) {
  const wasReady = useRef(false);
  const { state, data, retryAt } = health;
  if (state === "ready" && data === "") {
    wasReady.current = true;
    return stateOf("good", "●", t("shell.ready"));
  }
  if (state === "ready") {
    const word = /drain/.test(data) ? "draining" : wasReady.current ? "restarting" : "starting";
    return stateOf("warn", "◐", t(`shell.state_${word}`), data);
  }
  if (state === "gone") {
    const text = html`${t("shell.noAnswer")} <${Countdown} to=${retryAt} />`;
    return { ...stateOf("bad", "○", t("shell.gone"), t("shell.gone")), text };
  }
  return stateOf("second", "◐", t("shell.unknown"));
}

const stateOf = (kind, sign, word, reason = "") => ({ kind, sign, word, text: word, reason });

function Card({ model, models, state, route, close }) {
  const me = useMe();
  const choose = (id) => {
    close();
    go(linkTo(route.screen || "playground", route.rest, { ...Object.fromEntries(route.query), model: id }));
  };
  const facts = model ? factsOf(model, me) : [];
  return html`${models.length > 1 &&
    html`<div class="models" role="group" aria-label=${t("shell.models")}>
      ${models.map(({ id }) => html`<button key=${id} aria-pressed=${id === model?.id ? "true" : "false"}
        onClick=${() => choose(id)}><${Name} of=${id} /></button>`)}
    </div>`}
    <dl class="facts-list">
      ${facts.map(([name, value]) => html`<dt key=${name}>${t(`shell.model_${name}`)}</dt><dd>${value}</dd>`)}
      <dt>${t("shell.model_state")}</dt>
      <dd class=${state.kind}>${state.sign} ${state.text} ${state.reason && html`<span class="second">${state.reason}</span>`}</dd>
      <dt>${t("shell.model_address")}</dt>
      <dd class="row"><code>${location.origin}/v1</code> <${Copy} label=${t("shell.copy")} text=${() => `${location.origin}/v1`} /></dd>
    </dl>
    ${me?.operator && html`<a href=${linkTo("settings")} onClick=${close}>${t("settings.title")}</a>`}`;
}

function factsOf(model, me) {
  const { id, device, device_name: deviceName, dtype, quantization, max_model_len: length, created } = model;
  return [
    ["name", html`<${Name} of=${id} />`],
    ["device", device && (deviceName ? `${device} · ${deviceName}` : device)],
    ["dtype", dtype],
    ["quantization", dtype && (quantization || t("shell.none"))],
    ["context", t("shell.tokens", { n: count(length) })],
    ["version", me?.version],
    ["since", moment(created)],
  ].filter(([, value]) => value);
}

// Signing in with an API key.

/** @param {{isWrong: boolean, onKey: (key: string, keep: boolean) => void}} props */
function SignIn({ isWrong, onKey }) {
  const [key, setKey] = useState("");
  const [keep, setKeep] = useState(false);
  const field = useId();
  const submit = (event) => {
    event.preventDefault();
    if (key.trim()) onKey(key.trim(), keep);
  };
  return html`<form class="card narrow" onSubmit=${submit}>
    <h1>${t("signIn.title")}</h1>
    <label for=${field}>${t("signIn.key")}</label>
    <input id=${field} type="password" autocomplete="current-password" spellcheck=${false} required
      value=${key} aria-invalid=${isWrong} onInput=${(event) => setKey(event.target.value)} />
    ${isWrong && html`<p class="bad" role="alert">${t("signIn.wrong")}</p>`}
    <label class="check">
      <input type="checkbox" checked=${keep} onChange=${(event) => setKeep(event.target.checked)} />
      ${t("signIn.keep")}
    </label>
    <p class="second">${t("signIn.where")}</p>
    <div class="row end"><button class="primary">${t("signIn.enter")}</button></div>
  </form>`;
}

// Light or dark: the system's choice, or the reader's.

const THEMES = ["system", "light", "dark"];
const STORED = "loraplex-theme";

export const theme = () => localStorage.getItem(STORED) ?? "system";

/** @param {string} name */
function chooseTheme(name) {
  localStorage.setItem(STORED, name);
  applyTheme();
}

function applyTheme() {
  document.documentElement.dataset.theme = theme();
}

// Start of the page.

applyTheme();
await load(preferred());
const app = document.getElementById("app");
app.replaceChildren();
render(html`<${Shell} />`, app);
