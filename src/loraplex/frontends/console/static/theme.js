// Light or dark: the system's choice, or the reader's.
export const THEMES = ["system", "light", "dark"];
const STORED = "loraplex-theme";

export const theme = () => localStorage.getItem(STORED) ?? "system";

/** @param {string} name */
export function chooseTheme(name) {
  localStorage.setItem(STORED, name);
  applyTheme();
}

export function applyTheme() {
  document.documentElement.dataset.theme = theme();
}
