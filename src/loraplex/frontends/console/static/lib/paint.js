// The theme's colours for canvases.

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
