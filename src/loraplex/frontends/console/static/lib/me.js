// Who is signed in, and what they may do: GET /v1/me.
import { createContext, useContext } from "./html.js";

/**
 * @typedef {{tenant: string, has_keys: boolean, operator: boolean, version: string,
 *   rights: {use: string[], list: string[], manage: string[], models: string[]},
 *   limits: Record<string, number | null>,
 *   uploads: {max_bytes: number, files: string[]} | null}} Me
 */

export const MeContext = createContext(null);

/** @returns {Me} */
export const useMe = () => useContext(MeContext);

/** Whether any adapter may be changed. @param {Me} me */
export const manages = (me) => me.rights.manage.length > 0;

/**
 * Whether an own adapter of this name may be changed. Patterns are a shell's.
 * @param {Me} me @param {string} name
 */
export function mayManage(me, name) {
  return me.rights.manage.some((pattern) => expressionOf(pattern).test(name));
}

/** @param {string} pattern */
function expressionOf(pattern) {
  const text = pattern.replace(/[.+^${}()|\\[\]]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  return new RegExp(`^${text}$`, "su");
}
