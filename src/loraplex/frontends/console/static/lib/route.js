// Where the reader is: `#/adapters/NAME?search=x`. A screen, the rest of the path, and its query.
import { useEffect, useState } from "./html.js";

/** @typedef {{screen: string, rest: string, query: URLSearchParams}} Route */

/** @returns {Route} */
export function current() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [screen, ...rest] = path.split("/");
  return { screen, rest: decoded(rest.join("/")), query: new URLSearchParams(query) };
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** @param {string} screen @param {string} rest @param {Record<string, string>} query */
export function linkTo(screen, rest = "", query = {}) {
  const set = Object.entries(query).filter(([, value]) => value !== "");
  const asked = set.length ? `?${new URLSearchParams(set)}` : "";
  return `#/${screen}${rest ? `/${encodeURIComponent(rest)}` : ""}${asked}`;
}

/**
 * The playground with these outputs.
 * @param {(string | null | {digest: string})[]} entries of `adapters` of POST /v1/compare
 */
export const columnsLink = (entries) => linkTo("playground", "", { columns: JSON.stringify(entries) });

/** @param {string} link @param {{replace?: boolean}} options */
export function go(link, { replace = false } = {}) {
  if (replace) {
    history.replaceState(null, "", link);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = link;
  }
}

export function useRoute() {
  const [route, setRoute] = useState(current);
  useEffect(() => {
    const onChange = () => setRoute(current());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return route;
}
