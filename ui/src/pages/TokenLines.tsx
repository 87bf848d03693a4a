/** The tokens of a path in lines of a fixed number of tokens; only the lines that are seen exist. */

import { Component } from "preact";
import { useEffect, useRef } from "preact/hooks";
import type { Token } from "../api/token_pages";
import { count } from "../text/format";
import { visibleLine } from "../text/visible";

export const IN_LINE = 16;
const HEIGHT = 28;
const OVERSCAN = 8;

/** How one token is drawn; a line is drawn again only when one of these or its tokens change. */
export interface Look {
  readonly key: string;
  readonly step: (token: Token) => number | null;
  readonly words: (token: Token) => string;
}

interface TokenLinesProps {
  total: number;
  tokenAt: (position: number) => Token | null;
  look: Look;
  at: number | null;
  found: { start: number; end: number } | null;
  range: readonly [number, number];
  onRange: (first: number, last: number) => void;
  onSelect: (position: number) => void;
  onHover: (position: number | null) => void;
}

export function TokenLines(props: TokenLinesProps) {
  const { total, tokenAt, look, at, found, range, onRange, onSelect, onHover } = props;
  const box = useRef<HTMLDivElement>(null);
  const lines = Math.ceil(total / IN_LINE);
  const see = (): void => {
    const element = box.current;
    if (!element) return;
    const first = Math.max(0, Math.floor(element.scrollTop / HEIGHT) - OVERSCAN);
    const last = Math.min(lines, Math.ceil((element.scrollTop + element.clientHeight) / HEIGHT) + OVERSCAN);
    if (first * IN_LINE !== range[0] || last * IN_LINE !== range[1]) onRange(first * IN_LINE, last * IN_LINE);
  };
  useEffect(() => {
    see();
    window.addEventListener("resize", see);
    return () => window.removeEventListener("resize", see);
  }, [total]);
  useEffect(() => {
    const element = box.current;
    if (!element || at === null) return;
    const top = Math.floor(at / IN_LINE) * HEIGHT;
    if (top < element.scrollTop || top + 2 * HEIGHT > element.scrollTop + element.clientHeight) {
      element.scrollTop = Math.max(0, top - element.clientHeight / 2);
    }
    see();
  }, [at, total]);

  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const now = at ?? range[0] - 1;
    const page = IN_LINE * Math.max(1, Math.floor((box.current?.clientHeight ?? 0) / HEIGHT) - 2);
    const steps: Readonly<Record<string, number>> = {
      ArrowRight: now + 1,
      ArrowLeft: now - 1,
      ArrowDown: now + IN_LINE,
      ArrowUp: now - IN_LINE,
      PageDown: now + page,
      PageUp: now - page,
      Home: 0,
      End: total - 1,
    };
    const to = steps[event.key];
    if (to === undefined) return;
    event.preventDefault();
    onSelect(Math.min(total - 1, Math.max(0, to)));
  };
  const positionOf = (event: Event): number | null => {
    const token = (event.target as Element).closest?.("[data-at]");
    return token ? Number(token.getAttribute("data-at")) : null;
  };
  const from = range[0] / IN_LINE;
  const to = Math.min(lines, range[1] / IN_LINE);
  return (
    <div
      ref={box}
      class="token-lines"
      role="listbox"
      aria-label="Tokens"
      aria-activedescendant={at !== null && at >= range[0] && at < range[1] ? `token-${at}` : undefined}
      tabIndex={0}
      onScroll={see}
      onKeyDown={onKeyDown}
      onClick={(event) => {
        const position = positionOf(event);
        if (position !== null) onSelect(position);
      }}
      onMouseOver={(event) => onHover(positionOf(event))}
      onMouseLeave={() => onHover(null)}
    >
      <div role="presentation" class="token-space" style={{ height: `${lines * HEIGHT}px` }}>
        {Array.from({ length: Math.max(0, to - from) }, (_, index) => from + index).map((line) => {
          const start = line * IN_LINE;
          const end = Math.min(total, start + IN_LINE);
          const [foundFrom, foundTo] = found ? [Math.max(found.start, start), Math.min(found.end, end)] : [0, 0];
          return (
            <Line
              key={line}
              start={start}
              end={end}
              ready={tokenAt(start) !== null && tokenAt(end - 1) !== null}
              tokenAt={tokenAt}
              look={look}
              at={at !== null && at >= start && at < end ? at : null}
              foundFrom={foundFrom < foundTo ? foundFrom : 0}
              foundTo={foundFrom < foundTo ? foundTo : 0}
            />
          );
        })}
      </div>
    </div>
  );
}

interface LineProps {
  start: number;
  end: number;
  ready: boolean;
  tokenAt: (position: number) => Token | null;
  look: Look;
  at: number | null;
  foundFrom: number;
  foundTo: number;
}

class Line extends Component<LineProps> {
  override shouldComponentUpdate(next: LineProps): boolean {
    const now = this.props;
    return (
      now.ready !== next.ready ||
      now.end !== next.end ||
      now.look.key !== next.look.key ||
      now.at !== next.at ||
      now.foundFrom !== next.foundFrom ||
      now.foundTo !== next.foundTo
    );
  }

  override render() {
    const { start, end, tokenAt, look, at, foundFrom, foundTo } = this.props;
    const tokens = Array.from({ length: end - start }, (_, index) => tokenAt(start + index));
    return (
      <div role="presentation" class="token-line" style={{ transform: `translateY(${(start / IN_LINE) * HEIGHT}px)` }}>
        <span class="token-position" aria-hidden="true">{count(start)}</span>
        {tokens.map((token, index) => {
          if (!token) return <span key={index} class="token calm" aria-hidden="true">…</span>;
          const step = look.step(token);
          const marks = [
            "token",
            step === null ? "token-none" : `token-${step}`,
            token.special ? "token-special" : "",
            token.position === at ? "token-at" : "",
            token.position >= foundFrom && token.position < foundTo ? "token-found" : "",
          ];
          return (
            <span
              key={index}
              id={`token-${token.position}`}
              role="option"
              aria-selected={token.position === at}
              aria-label={look.words(token)}
              data-at={token.position}
              class={marks.join(" ")}
            >
              {shownText(token.text)}
            </span>
          );
        })}
      </div>
    );
  }
}

/** Spaces and ends of lines as signs; what else would not be seen as its escape. */
export function shownText(text: string): string {
  if (text === "") return "∅";
  const signs = text.replaceAll(" ", "·");
  const parts = signs.slice(0, 80).split(/([\n\t])/);
  return parts.map((part) => (part === "\n" ? "↵" : part === "\t" ? "⇥" : visibleLine(part))).join("");
}
