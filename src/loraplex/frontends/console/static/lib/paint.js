// The theme's colours for canvases, and when to draw them again.
import { useEffect, useReducer } from "./html.js";

/** Render again when an element's size or the system's theme changes. @param {{current: Element}} of */
export function useRedraw(of) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    const observer = new ResizeObserver(redraw);
    observer.observe(of.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", redraw);
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", redraw);
    };
  }, []);
}

/**
 * A function from a colour's name, such as "accent", to what a canvas takes.
 * @param {Element} element one in the theme
 */
export function paint(element) {
  const probe = element.parentElement.appendChild(document.createElement("span"));
  probe.hidden = true;
  const known = new Map();
  queueMicrotask(() => probe.remove());
  return (name) => {
    if (!known.has(name)) {
      probe.style.color = `var(--${name})`;
      known.set(name, getComputedStyle(probe).color);
    }
    return known.get(name);
  };
}
