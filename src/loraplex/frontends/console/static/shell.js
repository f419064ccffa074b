// What is around every screen: navigation, sign-in, the server's health, language and theme.
import { get, hasKey, json, request, setKey } from "./lib/api.js";
import { html, useEffect, useMemo, useReducer, useRef, useState } from "./lib/html.js";
import { useKeys } from "./lib/keys.js";
import { MeContext } from "./lib/me.js";
import { usePoll } from "./lib/poll.js";
import { go, linkTo, useRoute } from "./lib/route.js";
import { LANGUAGES, choose, chosen, t } from "./lib/texts.js";
import { Choice } from "./parts/choice.js";
import { Dialog } from "./parts/dialog.js";
import { Name } from "./parts/name.js";
import { Loading, States } from "./parts/states.js";
import { SignIn } from "./sign-in.js";
import { THEMES, chooseTheme, theme } from "./theme.js";

const HEALTH_SECONDS = 5;

/** Screens by the first part of the hash: the key after `g`, and who sees them. */
const SCREENS = new Map([
  ["playground", { key: "p", isSeen: () => true }],
  ["adapters", { key: "a", isSeen: () => true }],
  ["live", { key: "l", isSeen: (me) => me.operator }],
  ["requests", { key: "r", isSeen: () => true }],
  ["settings", { key: "s", isSeen: (me) => me.operator }],
]);
const FIRST = "playground";

export function Shell() {
  const [, redraw] = useReducer((n) => n + 1, 0);
  const [session, startSession] = useReducer((n) => n + 1, 0);
  const me = usePoll((signal) => get("/v1/me", signal), 0, [session]);
  const health = usePoll(healthOf, HEALTH_SECONDS, [session]);
  const isSignedOut = me.state === "refused" && me.error.status === 401;
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
          ${(data) => html`<${MeContext.Provider} value=${data}><${Screens} me=${data} key=${session} /><//>`}
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

function Bar({ me, health, onSignOut, onChange }) {
  const { screen } = useRoute();
  const [isHelp, setHelp] = useState(false);
  const actions = useMemo(() => {
    const found = new Map([["?", () => setHelp(true)]]);
    for (const [name, { key }] of SCREENS) found.set(`g ${key}`, () => go(linkTo(name)));
    found.set("/", () => /** @type {HTMLElement} */ (document.querySelector("[type=search]"))?.focus());
    return found;
  }, []);
  useKeys(actions);
  const seen = me ? [...SCREENS].filter(([, { isSeen }]) => isSeen(me)) : [];
  const shownScreen = SCREENS.has(screen) ? screen : FIRST;
  return html`<header class="bar">
    <a class="brand" href=${linkTo(FIRST)}>loraplex</a>
    <nav aria-label=${t("shell.screens")}>
      ${seen.map(
        ([name]) => html`<a
          key=${name}
          href=${linkTo(name)}
          aria-current=${name === shownScreen ? "page" : null}
          >${t(`${name}.title`)}</a
        >`,
      )}
    </nav>
    <div class="row end">
      <${Health} of=${health} />
      <${Choice} small label=${t("shell.language")} value=${chosen()} options=${[...LANGUAGES]}
        onChoice=${(name) => choose(name).then(onChange)} />
      <${Choice} small label=${t("shell.theme")} value=${theme()}
        options=${THEMES.map((name) => [name, t(`shell.${name}`)])}
        onChoice=${(name) => { chooseTheme(name); onChange(); }} />
      <button class="small" aria-label=${t("shell.keys")} onClick=${() => setHelp(true)}>?</button>
      ${me?.has_keys &&
      html`<span class="tenant"><${Name} of=${me.tenant} /></span>
        <button class="small" onClick=${onSignOut}>${t("shell.signOut")}</button>`}
    </div>
    ${isHelp && html`<${Help} onClose=${() => setHelp(false)} />`}
  </header>`;
}

function Health({ of }) {
  const [kind, text] =
    of.state === "ready"
      ? of.data === ""
        ? ["good", t("shell.ready")]
        : ["warn", of.data]
      : of.state === "gone"
        ? ["bad", t("shell.gone")]
        : ["warn", t("shell.unknown")];
  return html`<span class="health ${kind}" role="status">${text}</span>`;
}

function Help({ onClose }) {
  const rows = [...SCREENS].map(([name, { key }]) => [`g ${key}`, t(`${name}.title`)]);
  rows.push(
    ["/", t("shell.keySearch")],
    ["Ctrl+Enter", t("shell.keyRun")],
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
