/** What of a path is trained: how much, where as a strip, and the way from one trained turn to the next. */

import type { TokenWindow } from "../api/token_pages";
import { count, share } from "../text/format";

type WindowTurn = TokenWindow["turns"][number];

/** The turns of the path that are trained, in its order. */
export function trainedOf(window: TokenWindow): readonly WindowTurn[] {
  return window.turns.filter((turn) => turn.trained_tokens > 0);
}

interface TrainedTurnsProps {
  window: TokenWindow;
  /** The token that is chosen. */
  at: number | null;
  /** The tokens that are seen. */
  range: readonly [number, number];
  onOpen: (position: number) => void;
}

export function TrainedTurns({ window, at, range, onOpen }: TrainedTurnsProps) {
  const { total, turns } = window;
  const trained = trainedOf(window);
  const tokens = trained.reduce((sum, turn) => sum + turn.trained_tokens, 0);
  const here = at ?? -1;
  const next = trained.find((turn) => turn.start > here);
  const previous = trained.findLast((turn) => turn.end <= here || (turn.start < here && here < turn.end));
  const place = (from: number, to: number): Record<string, string> => ({
    left: `${(100 * from) / Math.max(1, total)}%`,
    width: `${(100 * (to - from)) / Math.max(1, total)}%`,
  });
  return (
    <section class="trained-turns" aria-label="Trained">
      <p>
        {count(tokens)} of {count(total)} tokens trained ({share(total ? tokens / total : null)}), in {count(trained.length)} of{" "}
        {count(turns.length)} {turns.length === 1 ? "turn" : "turns"}{" "}
        <button type="button" disabled={!previous} onClick={() => previous && onOpen(previous.start)}>Previous trained</button>{" "}
        <button type="button" disabled={!next} onClick={() => next && onOpen(next.start)}>Next trained</button>
      </p>
      <div
        class="mask-strip"
        role="img"
        aria-label={`The mask: ${trained.map((turn) => `${turn.start} to ${turn.end}`).join(", ") || "nothing is trained"}`}
        onClick={(event) => {
          const { left, width } = event.currentTarget.getBoundingClientRect();
          onOpen(Math.max(0, Math.min(total - 1, Math.floor(((event.clientX - left) / Math.max(1, width)) * total))));
        }}
      >
        {turns.map((turn) => (
          <span key={turn.turn_id} class={turn.trained_tokens ? "trained" : "left-out"} style={place(turn.start, turn.end)} />
        ))}
        <span class="seen" style={place(Math.min(range[0], total), Math.min(range[1], total))} />
      </div>
    </section>
  );
}
