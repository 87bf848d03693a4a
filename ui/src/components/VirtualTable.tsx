/** A table of any number of rows: it asks for the rows that are seen, by offset and limit, and draws only those.
 *
 * Keyboard: the table takes the focus; arrows, Page Up and Down, Home and End move the current row; Enter opens it. */

import type { ComponentChildren } from "preact";
import { useEffect, useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { ApiError } from "../api/client";
import { asApiError } from "../api/hooks";
import { keepPlace, keptPlace } from "../scroll";
import { count } from "../text/format";
import { ErrorBox } from "./Status";

export interface Column<Row> {
  readonly id: string;
  readonly title: string;
  readonly cell: (row: Row) => ComponentChildren;
  /** In rem, at least. */
  readonly width: number;
  /** Its share of the width that is left; none: it keeps its own. */
  readonly grow?: number;
  readonly numeric?: boolean;
  readonly sortable?: boolean;
}

export interface RowWindow<Row> {
  readonly rows: readonly Row[];
  /** All rows, as far as is known: it may grow. */
  readonly total: number;
}

export interface Sort {
  readonly by: string;
  readonly order: "asc" | "desc";
}

interface VirtualTableProps<Row> {
  /** What the table holds, for screen readers. */
  label: string;
  columns: readonly Column<Row>[];
  rowKey: (row: Row) => string;
  /** Rows ``[offset, offset + limit)``. A new function empties the table: keep it with ``useMemo``. */
  load: (offset: number, limit: number, signal: AbortSignal) => Promise<RowWindow<Row>>;
  onOpen?: (row: Row) => void;
  sort?: Sort;
  onSort?: (sort: Sort) => void;
  /** CSS pixels of every row. */
  rowHeight?: number;
  /** CSS length of the whole table; rows beyond it are scrolled to. */
  height?: string;
  /** Said where there is no row. */
  empty?: ComponentChildren;
}

const WINDOW = 100;
const OVERSCAN = 6;
/** Windows that are kept; the farthest from what is seen go first. */
const KEPT = 50;

export function VirtualTable<Row>(props: VirtualTableProps<Row>) {
  const { columns, load, rowKey, onOpen, rowHeight = 34 } = props;
  const box = useRef<HTMLDivElement>(null);
  const id = useId();
  const place = `table ${props.label}`;
  const returning = useRef(keptPlace(place));
  const [top, setTop] = useState(returning.current);
  const [seen, setSeen] = useState(600);
  const [current, setCurrent] = useState<number | null>(null);
  const { rowAt, total, error, retry } = useWindows(load, Math.floor(top / rowHeight), Math.ceil(seen / rowHeight));

  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const watch = new ResizeObserver(() => setSeen(element.clientHeight));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  const before = useRef(load);
  useEffect(() => {
    if (before.current === load) return; // the first, which may come back to its place
    before.current = load;
    setCurrent(null);
    box.current?.scrollTo({ top: 0 });
  }, [load]);
  useLayoutEffect(() => {
    if (total === null || returning.current === 0) return;
    box.current?.scrollTo({ top: returning.current });
    returning.current = 0;
  }, [total]);

  const first = Math.max(0, Math.floor(top / rowHeight) - OVERSCAN);
  const last = Math.min(total ?? 0, Math.ceil((top + seen) / rowHeight) + OVERSCAN);
  const page = Math.max(1, Math.floor(seen / rowHeight) - 2);

  const move = (to: number): void => {
    const element = box.current;
    if (!element || !total) return;
    const row = Math.min(total - 1, Math.max(0, to));
    setCurrent(row);
    const [above, below] = [row * rowHeight, (row + 2) * rowHeight]; // the head of the table covers one row
    if (above < element.scrollTop) element.scrollTop = above;
    else if (below > element.scrollTop + element.clientHeight) element.scrollTop = below - element.clientHeight;
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.target !== box.current || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = current ?? -1;
    const steps: Record<string, number> = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: (total ?? 1) - 1,
    };
    const to = steps[event.key];
    if (to !== undefined) move(to);
    else if (event.key === "Enter" && current !== null) {
      const row = rowAt(current);
      if (row !== undefined) onOpen?.(row);
    } else return;
    event.preventDefault();
  };

  const tracks = {
    gridTemplateColumns: columns
      .map(({ width, grow }) => (grow ? `minmax(${width}rem, ${grow}fr)` : `${width}rem`))
      .join(" "),
  };
  const least = { minWidth: `${columns.reduce((sum, { width }) => sum + width, 0)}rem` }; // the same for head and rows
  const shown = Array.from({ length: Math.max(0, last - first) }, (_, index) => first + index);
  return (
    <div class="table-frame">
      {error && <ErrorBox error={error} retry={retry} />}
      <div
        ref={box}
        class="table"
        role="grid"
        aria-label={props.label}
        aria-rowcount={total === null ? -1 : total + 1}
        aria-colcount={columns.length}
        aria-activedescendant={current !== null && current >= first && current < last ? `${id}-${current}` : undefined}
        tabIndex={0}
        style={{ height: props.height ?? "70vh" }}
        onScroll={(event) => {
          setTop(event.currentTarget.scrollTop);
          keepPlace(place, event.currentTarget.scrollTop);
        }}
        onKeyDown={onKeyDown}
      >
        <div role="rowgroup" class="table-head" style={least}>
          <div role="row" aria-rowindex={1} class="table-row" style={{ ...tracks, height: `${rowHeight}px` }}>
            {columns.map((column) => (
              <Head key={column.id} column={column} sort={props.sort} onSort={props.onSort} />
            ))}
          </div>
        </div>
        <div role="rowgroup" class="table-body" style={{ ...least, height: `${(total ?? 0) * rowHeight}px` }}>
          {shown.map((index) => {
            const row = rowAt(index);
            const at = { ...tracks, height: `${rowHeight}px`, transform: `translateY(${index * rowHeight}px)` };
            return (
              <div
                key={`${index} ${row === undefined ? "" : rowKey(row)}`} // while rows move, one may be in two windows
                id={`${id}-${index}`}
                role="row"
                aria-rowindex={index + 2}
                aria-selected={index === current}
                class={index === current ? "table-row current" : "table-row"}
                style={at}
                onClick={() => setCurrent(index)}
                onDblClick={() => row !== undefined && onOpen?.(row)}
              >
                {columns.map((column) => (
                  <div key={column.id} role="gridcell" class={column.numeric ? "cell numeric" : "cell"}>
                    {row === undefined ? <span class="calm">…</span> : column.cell(row)}
                  </div>
                ))}
              </div>
            );
          })}
        </div>
      </div>
      <p class="calm" role="status">
        {total === null ? (error ? "" : "Loading…") : total === 0 ? (props.empty ?? "No rows.") : `${count(total)} rows`}
      </p>
    </div>
  );
}

interface HeadProps<Row> {
  column: Column<Row>;
  sort: Sort | undefined;
  onSort: ((sort: Sort) => void) | undefined;
}

function Head<Row>({ column, sort, onSort }: HeadProps<Row>) {
  const sorted = sort?.by === column.id ? sort.order : null;
  const kind = column.numeric ? "cell numeric" : "cell";
  if (!column.sortable || !onSort) return <div role="columnheader" class={kind}>{column.title}</div>;
  const next = sorted === "desc" ? "asc" : "desc";
  return (
    <div role="columnheader" class={kind} aria-sort={sorted === null ? "none" : sorted === "asc" ? "ascending" : "descending"}>
      <button type="button" class="sort" onClick={() => onSort({ by: column.id, order: next })}>
        {column.title} <span aria-hidden="true">{sorted === null ? "" : sorted === "asc" ? "▲" : "▼"}</span>
      </button>
    </div>
  );
}

interface Windows<Row> {
  rowAt: (index: number) => Row | undefined;
  total: number | null;
  error: ApiError | null;
  retry: () => void;
}

/** Keeps the windows of rows around ``[first, first + shown)`` loaded. */
function useWindows<Row>(load: VirtualTableProps<Row>["load"], first: number, shown: number): Windows<Row> {
  const held = useRef<{ load: typeof load; rows: Map<number, readonly Row[]>; asked: Set<number>; abort: AbortController } | null>(null);
  const [total, setTotal] = useState<number | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [, redraw] = useState(0);

  if (held.current?.load !== load) {
    held.current?.abort.abort();
    held.current = { load, rows: new Map(), asked: new Set(), abort: new AbortController() };
  }
  const of = held.current;
  useEffect(() => {
    setTotal(null);
    setError(null);
  }, [load]);
  useEffect(() => () => held.current?.abort.abort(), []);

  const from = Math.floor(Math.max(0, first - OVERSCAN) / WINDOW);
  const to = Math.floor((first + shown + OVERSCAN) / WINDOW);
  useEffect(() => {
    for (let index = from; index <= to; index++) {
      if (of.rows.has(index) || of.asked.has(index) || (total !== null && index * WINDOW >= total && index > 0)) continue;
      of.asked.add(index);
      of.load(index * WINDOW, WINDOW, of.abort.signal).then(
        (found) => {
          if (of !== held.current) return;
          of.rows.set(index, found.rows);
          of.asked.delete(index);
          for (const far of farthest(of.rows, index)) of.rows.delete(far);
          setError(null);
          setTotal(found.total);
          redraw((before) => before + 1);
        },
        (reason: unknown) => {
          if (of === held.current && !of.abort.signal.aborted) setError(asApiError(reason)); // asked again by retry
        },
      );
    }
  }, [of, from, to, total, error]);

  return {
    rowAt: (index) => of.rows.get(Math.floor(index / WINDOW))?.[index % WINDOW],
    total,
    error,
    retry: () => {
      of.asked.clear();
      setError(null);
    },
  };
}

function farthest(rows: ReadonlyMap<number, unknown>, from: number): number[] {
  const order = [...rows.keys()].sort((a, b) => Math.abs(a - from) - Math.abs(b - from));
  return order.slice(KEPT);
}
