// A grid of many rows of which only those in view are in the page.
import { html, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../lib/html.js";
import { isTyping, useKeys } from "../lib/keys.js";

export const ROW_PX = 40;
const OVERSCAN = 5;

/**
 * @template T
 * @typedef {{name: string, title: string, cell: (row: T) => unknown, kind?: string,
 *   sort?: string}} Column kind: classes of its cells; sort: what its heading sorts by
 */

/**
 * Keys: arrows, j and k, Page Up and Down, Home, End; Enter opens the current row.
 * @template T
 * @param {{of: string, label: string, columns: Column<T>[], total: number, rowAt: (index: number) => T | undefined,
 *   onRange: (first: number, last: number) => void, onOpen: (row: T) => void, sort: string,
 *   onSort: (sort: string) => void}} props of: what is
 *   listed; another list begins at its top; rowAt: undefined for a row that is not loaded yet;
 *   sort: with a leading - from the largest to the smallest
 */
export function Table({ of, label, columns, total, rowAt, onRange, onOpen, sort, onSort }) {
  const id = useId();
  const grid = useRef(null);
  const [view, setView] = useState({ top: 0, height: 0 });
  const [current, setCurrent] = useState(0);
  const first = Math.max(0, Math.min(total, Math.floor(view.top / ROW_PX)) - OVERSCAN);
  const last = Math.min(total, Math.ceil((view.top + view.height) / ROW_PX) + OVERSCAN);

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
  act.current = { current, total, page: Math.max(1, Math.floor(view.height / ROW_PX) - 2) };
  const move = (index) => {
    const next = Math.max(0, Math.min(index, act.current.total - 1));
    setCurrent(next);
    reveal(grid.current, next);
  };
  const keys = useMemo(
    () =>
      new Map([
        ["j", () => move(act.current.current + 1)],
        ["k", () => move(act.current.current - 1)],
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

  const shown = [];
  for (let index = first; index < last; index += 1) {
    shown.push(html`<${Row}
      key=${index}
      id=${`${id}-${index}`}
      index=${index}
      row=${rowAt(index)}
      columns=${columns}
      isCurrent=${index === current}
      onOpen=${onOpen}
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
    aria-activedescendant=${total && isInView ? `${id}-${current}` : null}
    onScroll=${() => setView({ top: grid.current.scrollTop, height: grid.current.clientHeight })}
    onKeyDown=${onKey}
  >
    <div role="rowgroup" class="grid-head">
      <div role="row" class="grid-row" aria-rowindex="1">
        ${columns.map((column) => html`<${Heading} key=${column.name} ...${{ column, sort, onSort }} />`)}
      </div>
    </div>
    <div role="rowgroup" class="grid-body" style=${{ height: `${total * ROW_PX}px` }}>${shown}</div>
  </div>`;
}

/** Scroll as little as shows a row. */
function reveal(grid, index) {
  const top = index * ROW_PX;
  const height = grid.clientHeight - ROW_PX;
  if (top < grid.scrollTop) grid.scrollTop = top;
  else if (top + ROW_PX > grid.scrollTop + height) grid.scrollTop = top + ROW_PX - height;
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

function Row({ id, index, row, columns, isCurrent, onOpen }) {
  const isLoaded = row !== undefined;
  return html`<div
    role="row"
    id=${id}
    class=${`grid-row${isCurrent ? " current" : ""}`}
    aria-rowindex=${index + 2}
    aria-selected=${isCurrent}
    aria-busy=${!isLoaded}
    style=${{ top: `${index * ROW_PX}px` }}
    onClick=${() => isLoaded && onOpen(row)}
  >
    ${columns.map(
      ({ name, kind = "", cell }) => html`<div role="gridcell" class=${`cell ${kind}`} key=${name}>
        ${isLoaded ? cell(row) : name === columns[0].name ? "…" : null}
      </div>`,
    )}
  </div>`;
}
