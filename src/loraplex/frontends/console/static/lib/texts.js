// The interface's language.

export const LANGUAGES = new Map([
  ["en", "English"],
  ["zh", "简体中文"],
  ["ja", "日本語"],
]);
const STORED = "loraplex-language";

let texts = {};
let language = "en";

/** The chosen language, or the first of the browser's that there is. */
export function preferred() {
  const wanted = [localStorage.getItem(STORED), ...navigator.languages];
  for (const tag of wanted) {
    const found = (tag ?? "").slice(0, 2).toLowerCase();
    if (LANGUAGES.has(found)) return found;
  }
  return "en";
}

/** @param {string} name */
export async function load(name) {
  texts = (await import(`../texts/${name}.js`)).texts;
  language = name;
  document.documentElement.lang = name === "zh" ? "zh-Hans" : name;
}

/** @param {string} name */
export async function choose(name) {
  localStorage.setItem(STORED, name);
  await load(name);
}

export const chosen = () => language;

/**
 * A text, such as t("shell.age", { seconds: 3 }); `{seconds}` in it is replaced. Numbers are written as the
 * language does.
 * @param {string} name @param {Record<string, string | number>} values
 */
export function t(name, values = {}) {
  const [section, word] = name.split(".");
  const text = texts[section]?.[word];
  if (text === undefined) throw new Error(`there is no text ${name}`);
  return text.replace(/\{(\w+)\}/g, (_, key) => {
    const value = values[key];
    return typeof value === "number" ? count(value) : String(value ?? "");
  });
}

/** @param {number} value @param {Intl.NumberFormatOptions} options */
export function count(value, options = {}) {
  return new Intl.NumberFormat(language, options).format(value);
}

/** As the command line writes them: "0 B", "1.5 MiB". @param {number} value */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  const shown = value / 1024 ** power;
  return `${count(shown, { maximumFractionDigits: power && shown < 10 ? 1 : 0 })} ${units[power]}`;
}

/** A time in milliseconds with a fitting unit. @param {number | null | undefined} value */
export function duration(value) {
  if (value === null || value === undefined) return "–";
  const [unit, shown] = value < 1000 ? ["millisecond", value] : ["second", value / 1000];
  return new Intl.NumberFormat(language, {
    style: "unit",
    unit,
    unitDisplay: "narrow",
    maximumFractionDigits: shown < 10 ? 1 : 0,
  }).format(shown);
}

/** A moment of Unix seconds: its time, and its day if that is not today. @param {number} seconds */
export function moment(seconds) {
  const at = new Date(seconds * 1000);
  const isToday = at.toDateString() === new Date().toDateString();
  return new Intl.DateTimeFormat(language, {
    timeStyle: "medium",
    ...(isToday ? {} : { dateStyle: "short" }),
  }).format(at);
}

const HOUR = 3600;

/**
 * A moment of Unix seconds as a list shows it: how long ago within an hour, then the clock, then the
 * day.
 * @param {number} seconds @param {number} now
 */
export function ago(seconds, now = Date.now() / 1000) {
  const passed = Math.max(0, now - seconds);
  if (passed < HOUR) {
    const [value, unit] = passed < 60 ? [Math.floor(passed), "second"] : [Math.floor(passed / 60), "minute"];
    return new Intl.RelativeTimeFormat(language, { style: "short" }).format(-value, unit);
  }
  const at = new Date(seconds * 1000);
  const isToday = at.toDateString() === new Date(now * 1000).toDateString();
  return new Intl.DateTimeFormat(language, isToday ? { timeStyle: "short" } : { dateStyle: "short" }).format(at);
}

/** A share of one as a percentage: 0.4 %, 12 %. @param {number} value */
export function percent(value) {
  return count(value, { style: "percent", maximumFractionDigits: value < 0.1 ? 1 : 0 });
}
