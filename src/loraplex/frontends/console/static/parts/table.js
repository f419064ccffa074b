// A grid of many rows of which only those in view are in the page.
import { html, isTyping, useEffect, useId, useKeys, useLayoutEffect, useMemo, useRef, useState } from "../lib/html.js";

const ROW_PX = 40;
/** Where a row has two lines; its styles begin at the same width. */
const NARROW = "(max-width: 900px)";
const NARROW_ROW_PX = 56;
const OVERSCAN = 5;

/**
 * @template T
 * @typedef {{name: string, title: unknown, cell: (row: T, index: number) => unknown, kind?: string,
 *   sort?: string}} Column kind: classes of its cells; sort: what its heading sorts by
 */

/**
 * Keys: arrows, j and k, Page Up and Down, Home, End; Enter opens the current row, x selects it and m
 * opens its menu. The current row is marked while the grid has the focus.
 * @template T
 * @param {{of: string, label: string, columns: Column<T>[], total: number, rowAt: (index: number) => T | undefined,
 *   onRange: (first: number, last: number) => void, onOpen: (row: T) => void, sort: string,
 *   onSort: (sort: string) => void, isPicked: (row: T) => boolean,
 *   onPick: (index: number, isRange: boolean) => void}} props of: what is
 *   listed; another list begins at its top; rowAt: undefined for a row that is not loaded yet;
 *   sort: with a leading - from the largest to the smallest
 */
export function Table({ of, label, columns, total, rowAt, onRange, onOpen, sort, onSort, isPicked, onPick }) {
  const id = useId();
  const grid = useRef(null);
  const rowPx = useRowPx();
  const [view, setView] = useState({ top: 0, height: 0 });
  const [current, setCurrent] = useState(0);
  const first = Math.max(0, Math.min(total, Math.floor(view.top / rowPx)) - OVERSCAN);
  const last = Math.min(total, Math.ceil((view.top + view.height) / rowPx) + OVERSCAN);

  useLayoutEffect(() => {
    const measure = () =>
      setView({ top: grid.current.scrollTop, height: grid.current.clientHeight });
    const observer = new ResizeObserver(measure);
    observer.observe(grid.current);
    measure();
    return () => observer.disconnect();
  }, []);
  useEffect(() => onRange(first, last), [first, last, of]);
  const listed = useRef(of);
  useLayoutEffect(() => {
    if (listed.current === of) return;
    listed.current = of;
    grid.current.scrollTop = 0;
    setCurrent(0);
  }, [of]);
  useEffect(() => setCurrent((old) => Math.max(0, Math.min(old, total - 1))), [total]);

  const act = useRef(null);
  act.current = { current, total, rowPx, onPick, page: Math.max(1, Math.floor(view.height / rowPx) - 2) };
  const move = (index) => {
    const next = Math.max(0, Math.min(index, act.current.total - 1));
    setCurrent(next);
    reveal(grid.current, next, act.current.rowPx);
  };
  const openMenu = () => document.getElementById(`${id}-${act.current.current}`)?.querySelector(".row-menu")?.click();
  const keys = useMemo(
    () =>
      new Map([
        ["j", () => move(act.current.current + 1)],
        ["k", () => move(act.current.current - 1)],
        ["x", () => act.current.onPick(act.current.current, false)],
        ["m", openMenu],
      ]),
    [],
  );
  useKeys(keys);
  const onKey = (event) => {
    if (isTyping(event) || event.target.closest("[role=columnheader]")) return;
    const { page } = act.current;
    const index = new Map([
      ["ArrowDown", current + 1],
      ["ArrowUp", current - 1],
      ["PageDown", current + page],
      ["PageUp", current - page],
      ["Home", 0],
      ["End", total - 1],
    ]).get(event.key);
    if (event.key === "Enter" && rowAt(current) !== undefined) onOpen(rowAt(current));
    else if (index !== undefined) move(index);
    else return;
    event.preventDefault();
  };
  const onClick = (event, index) => {
    if (!event.shiftKey) return onOpen(rowAt(index));
    // A link would open a window.
    event.preventDefault();
    return onPick(index, true);
  };

  const shown = [];
  for (let index = first; index < last; index += 1) {
    const row = rowAt(index);
    shown.push(html`<${Row}
      key=${index}
      id=${`${id}-${index}`}
      index=${index}
      top=${index * rowPx}
      row=${row}
      columns=${columns}
      isCurrent=${index === current}
      isPicked=${row !== undefined && isPicked(row)}
      onClick=${onClick}
    />`);
  }
  const isInView = current >= first && current < last;
  return html`<div
    class="grid"
    role="grid"
    tabindex="0"
    ref=${grid}
    aria-label=${label}
    aria-rowcount=${total + 1}
    aria-multiselectable="true"
    aria-activedescendant=${total && isInView ? `${id}-${current}` : null}
    onScroll=${() => setView({ top: grid.current.scrollTop, height: grid.current.clientHeight })}
    onKeyDown=${onKey}
  >
    <div role="rowgroup" class="grid-head">
      <div role="row" class="grid-row" aria-rowindex="1">
        ${columns.map((column) => html`<${Heading} key=${column.name} ...${{ column, sort, onSort }} />`)}
      </div>
    </div>
    <div role="rowgroup" class="grid-body" style=${{ height: `${total * rowPx}px` }}>${shown}</div>
  </div>`;
}

/** The height of a row, which depends on the width of the page. */
function useRowPx() {
  const narrow = useMemo(() => matchMedia(NARROW), []);
  const [isNarrow, setNarrow] = useState(narrow.matches);
  useEffect(() => {
    const onChange = () => setNarrow(narrow.matches);
    narrow.addEventListener("change", onChange);
    return () => narrow.removeEventListener("change", onChange);
  }, []);
  return isNarrow ? NARROW_ROW_PX : ROW_PX;
}

/** Scroll as little as shows a row. */
function reveal(grid, index, rowPx) {
  const top = index * rowPx;
  const height = grid.clientHeight - grid.querySelector(".grid-head").offsetHeight;
  if (top < grid.scrollTop) grid.scrollTop = top;
  else if (top + rowPx > grid.scrollTop + height) grid.scrollTop = top + rowPx - height;
}

function Heading({ column, sort, onSort }) {
  const { kind = "", title } = column;
  if (!column.sort) return html`<div role="columnheader" class=${`cell ${kind}`}>${title}</div>`;
  const isUp = sort === column.sort;
  const isDown = sort === `-${column.sort}`;
  const next = isDown || (!isUp && column.sort === "name") ? column.sort : `-${column.sort}`;
  return html`<div
    role="columnheader"
    class=${`cell ${kind}`}
    aria-sort=${isUp ? "ascending" : isDown ? "descending" : "none"}
  >
    <button class="small quiet" onClick=${() => onSort(next)}>
      ${title}<span aria-hidden="true">${isUp ? " ↑" : isDown ? " ↓" : ""}</span>
    </button>
  </div>`;
}

function Row({ id, index, top, row, columns, isCurrent, isPicked, onClick }) {
  const isLoaded = row !== undefined;
  return html`<div
    role="row"
    id=${id}
    class=${`grid-row${isCurrent ? " current" : ""}`}
    aria-rowindex=${index + 2}
    aria-selected=${isPicked}
    aria-busy=${!isLoaded}
    style=${{ top: `${top}px` }}
    onClick=${(event) => isLoaded && onClick(event, index)}
  >
    ${columns.map(
      ({ name, kind = "", cell }) => html`<div role="gridcell" class=${`cell ${kind}`} key=${name}>
        ${isLoaded ? cell(row, index) : name === "name" ? "…" : null}
      </div>`,
    )}
  </div>`;
}
