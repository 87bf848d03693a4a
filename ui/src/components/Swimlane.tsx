/** Spans of time in lanes. The wheel with Ctrl and the keys + and − zoom, dragging the scroll bar moves; arrows go from
 * span to span, Enter opens one. What is chosen is said in words below. */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { seconds } from "../text/format";
import { visibleLine } from "../text/visible";

export interface LaneSpan {
  readonly id: string;
  readonly lane: string;
  /** What it is called in the legend and coloured by. */
  readonly kind: string;
  readonly label: string;
  readonly start: number;
  /** Seconds; null: it goes on. */
  readonly end: number | null;
  readonly ok: boolean;
  /** One more line about it. */
  readonly detail?: string;
}

interface SwimlaneProps {
  label: string;
  /** Lanes from top to bottom. */
  lanes: readonly string[];
  /** Kinds in the order of their colours. */
  kinds: readonly string[];
  spans: readonly LaneSpan[];
  /** Where the axis ends, in seconds. */
  end: number;
  /** Ids of the spans that the page has selected; what is pointed at is another thing. */
  selected?: readonly string[];
  onOpen?: (span: LaneSpan) => void;
}

const NOTHING: readonly string[] = [];
const ROW = 18;
const GAP = 8;
const NARROWEST = 1.5;
const MOST_ZOOM = 10_000;

interface Placed {
  readonly span: LaneSpan;
  readonly row: number;
}

export function Swimlane({ label, lanes, kinds, spans, end, selected = NOTHING, onOpen }: SwimlaneProps) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(800);
  const [zoom, setZoom] = useState(1);
  const [left, setLeft] = useState(0);
  const [chosen, setChosen] = useState<string | null>(null);
  const order = useMemo(() => [...spans].sort((a, b) => a.start - b.start), [spans]);
  const { placed, tops, height } = useMemo(() => place(lanes, order, end), [lanes, order, end]);
  const total = Math.max(end, 1e-6);
  const scale = (width * zoom) / total;

  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const watch = new ResizeObserver(() => setWidth(Math.max(200, element.clientWidth)));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);

  const zoomAt = (factor: number, x: number): void => {
    const element = box.current;
    if (!element) return;
    const next = Math.min(MOST_ZOOM, Math.max(1, zoom * factor));
    const at = (element.scrollLeft + x) / zoom;
    setZoom(next);
    requestAnimationFrame(() => (element.scrollLeft = at * next - x));
  };
  useEffect(() => {
    const element = box.current;
    const wheel = (event: WheelEvent): void => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoomAt(event.deltaY < 0 ? 1.3 : 1 / 1.3, event.clientX - (element?.getBoundingClientRect().left ?? 0));
    };
    element?.addEventListener("wheel", wheel, { passive: false });
    return () => element?.removeEventListener("wheel", wheel);
  });

  const marked = useMemo(() => new Set(selected), [selected]);
  const at = order.findIndex((span) => span.id === chosen);
  const span = order[at];
  const see = (next: LaneSpan): void => {
    const element = box.current;
    const x = next.start * scale;
    if (element && (x < element.scrollLeft || x > element.scrollLeft + width - 40)) element.scrollLeft = x - 40;
  };
  const choose = (index: number): void => {
    const next = order[Math.min(order.length - 1, Math.max(0, index))];
    if (!next) return;
    setChosen(next.id);
    see(next);
  };
  useEffect(() => {
    const first = order.find((one) => marked.has(one.id));
    if (!first || (chosen !== null && marked.has(chosen))) return;
    setChosen(first.id);
    see(first);
  }, [marked]);
  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts: Record<string, () => void> = {
      ArrowRight: () => choose(at + 1),
      ArrowLeft: () => choose(at - 1),
      Home: () => choose(0),
      End: () => choose(order.length - 1),
      "+": () => zoomAt(1.5, width / 2),
      "-": () => zoomAt(1 / 1.5, width / 2),
      "0": () => setZoom(1),
      Enter: () => span && onOpen?.(span),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };

  // What lies outside of the window is not drawn, and of spans within a pixel of each other only the longest.
  const drawn = useMemo(() => {
    const [from, to] = [(left - width) / scale, (left + 2 * width) / scale];
    const seen = placed.filter(({ span: one }) => (one.end ?? end) >= from && one.start <= to);
    const longest = new Map<string, LaneSpan>();
    const lengthOf = (one: LaneSpan): number => (one.end ?? end) - one.start;
    const pixelOf = ({ span: one, row }: Placed): string => `${one.lane}/${row}/${Math.floor((one.start * scale) / NARROWEST)}`;
    for (const each of seen) {
      const before = longest.get(pixelOf(each));
      if (!before || lengthOf(before) < lengthOf(each.span)) longest.set(pixelOf(each), each.span);
    }
    return seen.filter((each) => {
      const { span: one } = each;
      const always = !one.ok || one.id === chosen || marked.has(one.id) || lengthOf(one) * scale >= NARROWEST;
      return always || longest.get(pixelOf(each)) === one;
    });
  }, [placed, scale, left, width, end, chosen, marked]);

  return (
    <figure class="swimlane">
      <div class="swim-tools">
        <button type="button" onClick={() => zoomAt(1.5, width / 2)} aria-label="Zoom in">+</button>
        <button type="button" onClick={() => zoomAt(1 / 1.5, width / 2)} aria-label="Zoom out">−</button>
        <button type="button" onClick={() => setZoom(1)}>All</button>
        <ul class="legend">
          {kinds.map((kind, index) => (
            <li key={kind}>
              <span class={`swatch c${index % 8}`} aria-hidden="true" />
              {kind}
            </li>
          ))}
        </ul>
      </div>
      <div class="swim-lanes">
        <div class="swim-names" aria-hidden="true">
          {lanes.map((lane) => (
            <div key={lane} style={{ top: `${(tops.get(lane) ?? 0) + 20}px` }}>{visibleLine(lane, 24)}</div>
          ))}
        </div>
        <div
          ref={box}
          class="swim-box"
          role="application"
          aria-roledescription="timeline"
          aria-label={`${label}: ${spans.length} spans in ${seconds(end)}. Arrows choose a span, plus and minus zoom.`}
          tabIndex={0}
          onKeyDown={onKeyDown}
          onScroll={(event) => setLeft(event.currentTarget.scrollLeft)}
        >
          <svg width={width * zoom} height={height + 20} aria-hidden="true">
            {ticks(total, zoom * (width / 120), left / scale, (left + width) / scale).map((tick) => (
              <g key={tick}>
                <line class="tick" x1={tick * scale} x2={tick * scale} y1={14} y2={height + 20} />
                <text class="tick" x={tick * scale + 3} y={11}>{seconds(tick)}</text>
              </g>
            ))}
            {drawn.map(({ span: one, row }) => (
              <rect
                key={one.id}
                class={`span c${Math.max(0, kinds.indexOf(one.kind)) % 8}${one.ok ? "" : " failed"}${one.end === null ? " open" : ""}${one.id === chosen ? " chosen" : ""}${marked.has(one.id) ? " selected" : ""}`}
                x={one.start * scale}
                y={(tops.get(one.lane) ?? 0) + 20 + row * ROW}
                width={Math.max(NARROWEST, ((one.end ?? end) - one.start) * scale)}
                height={ROW - 3}
                onPointerEnter={() => setChosen(one.id)}
                onClick={() => onOpen?.(one)}
              />
            ))}
          </svg>
        </div>
      </div>
      <p role="status" class="swim-said">
        {span ? said(span) : "Choose a span to read about it."}
      </p>
    </figure>
  );
}

function said(span: LaneSpan): string {
  const long = span.end === null ? "still running" : seconds(span.end - span.start);
  const detail = span.detail ? `. ${visibleLine(span.detail, 300)}` : "";
  return `${visibleLine(span.label)} (${span.kind}): ${long}, from ${seconds(span.start)}${span.ok ? "" : ", failed"}${detail}`;
}

/** Spans of a lane that overlap lie in rows below each other. */
function place(lanes: readonly string[], spans: readonly LaneSpan[], end: number) {
  const placed: Placed[] = [];
  const tops = new Map<string, number>();
  let height = 0;
  for (const lane of lanes) {
    const ends: number[] = [];
    for (const span of spans) {
      if (span.lane !== lane) continue;
      let row = ends.findIndex((until) => until <= span.start);
      if (row < 0) row = ends.length;
      ends[row] = span.end ?? end;
      placed.push({ span, row });
    }
    tops.set(lane, height);
    height += Math.max(1, ends.length) * ROW + GAP;
  }
  return { placed, tops, height };
}

/** Round times between ``from`` and ``to``, some ``about`` of them on the whole axis. */
function ticks(total: number, about: number, from: number, to: number): number[] {
  const rough = total / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 5, 10].find((each) => each * power >= rough) ?? 10) * power;
  const found: number[] = [];
  for (let at = Math.max(0, Math.floor(from / step)) * step; at <= Math.min(total, to + step); at += step) found.push(at);
  return found;
}
