// English. The same keys in every language; {words} in braces are replaced.
export const texts = {
  shell: {
    screens: "Screens",
    skip: "Skip to content",
    ready: "ready",
    gone: "The server cannot be reached.",
    unknown: "health unknown",
    loading: "Loading …",
    again: "Try again",
    age: "{seconds} s old",
    cancel: "Cancel",
    close: "Close",
    copied: "Copied",
    invisible: "Invisible character",
    language: "Language",
    theme: "Theme",
    system: "System",
    light: "Light",
    dark: "Dark",
    keys: "Keyboard",
    keySearch: "Search",
    keyRun: "Run",
    keyStop: "Stop",
    keyRows: "Next and previous row",
    signOut: "Sign out",
    newer: "The server has a newer console.",
    reload: "Reload",
  },
  signIn: {
    title: "Sign in",
    key: "API key",
    wrong: "The server does not know this key.",
    keep: "Keep it until this tab is closed",
    where: "The key stays in this tab. It is sent to this server only.",
    enter: "Sign in",
  },
  playground: {
    title: "Playground",
  },
  adapters: {
    title: "Adapters",
  },
  upload: {
    title: "Upload",
  },
  live: {
    title: "Live",
  },
  requests: {
    title: "Requests",
  },
  settings: {
    title: "Settings",
  },
};
