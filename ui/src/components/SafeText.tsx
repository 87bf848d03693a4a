/** Text of strangers: shown as text nodes only, with what would not be seen written as escapes, and bounded. */

import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { count } from "../text/format";
import { visible, visibleLine } from "../text/visible";

const SHORT = 8_000;
/** Characters of one page of a long text: what a browser lays out without a pause. */
const PAGE = 100_000;

interface SafeTextProps {
  text: string;
  /** Characters that are shown at first. */
  limit?: number;
  /** Wraps in one line: line feeds are escapes too. */
  inline?: boolean;
}

/** A block of text in its lines, or with ``inline`` a part of a sentence. */
export function SafeText({ text, limit = SHORT, inline = false }: SafeTextProps) {
  const [start, setStart] = useState<number | null>(null);
  if (inline) return <bdi class="safe">{marked(text.slice(0, limit), false)}{text.length > limit ? "…" : ""}</bdi>;
  if (text.length <= limit) return <TextPage text={text} />;
  if (start === null) {
    return (
      <div>
        <TextPage text={text.slice(0, limit)} />
        <p class="more">
          <button type="button" onClick={() => setStart(0)}>
            Show all {count(text.length)} characters
          </button>
        </p>
      </div>
    );
  }
  const end = Math.min(start + PAGE, text.length);
  return (
    <div>
      <p class="more">
        <button type="button" onClick={() => setStart(null)}>Show less</button>
        {text.length > PAGE && (
          <>
            <button type="button" disabled={start === 0} onClick={() => setStart(Math.max(0, start - PAGE))}>
              Earlier
            </button>
            <button type="button" disabled={end === text.length} onClick={() => setStart(end)}>
              Later
            </button>
            <span role="status">
              characters {count(start)} to {count(end)} of {count(text.length)}
            </span>
          </>
        )}
      </p>
      <TextPage text={text.slice(start, end)} />
    </div>
  );
}

function TextPage({ text }: { text: string }) {
  const shown = useMemo(() => marked(text, true), [text]);
  return <pre class="safe">{shown}</pre>;
}

function marked(text: string, lines: boolean): ComponentChildren[] {
  return visible(text, lines).map((piece, index) =>
    piece.escaped ? <span class="escape" key={index}>{piece.text}</span> : piece.text,
  );
}

/** A short text of strangers in one line, cut with an ellipsis. */
export function SafeLine({ text, longest = 120 }: { text: string; longest?: number }) {
  return <bdi class="safe">{visibleLine(text, longest)}</bdi>;
}
