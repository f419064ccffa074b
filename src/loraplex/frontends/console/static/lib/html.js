// Preact's parts, and `html` for templates of nodes. Texts in them are text nodes, never HTML.
import { h } from "../vendor/preact.mjs";
import htm from "../vendor/htm.mjs";

export { Component, Fragment, createContext, render } from "../vendor/preact.mjs";
export {
  useCallback,
  useContext,
  useEffect,
  useId,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "../vendor/hooks.mjs";

export const html = htm.bind(h);
