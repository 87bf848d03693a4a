/** The turns of an episode as messages: all of them as they ended, or one path from its root to its end. */

import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { TurnOutline as Turn } from "../api/looks";
import { LazyList } from "../components/LazyList";
import { count } from "../text/format";
import { type Branch, nameOfBranch, pathOfBranch, type TurnTree } from "../text/turn_tree";
import { BranchList } from "./BranchList";
import { TurnFind } from "./TurnFind";
import { TurnView } from "./TurnView";

interface ConversationProps {
  tree: TurnTree;
  /** The branch of which the path is shown; null: all turns. */
  branch: Branch | null;
  chosen: Turn | null;
  onChoose: (turn: Turn) => void;
  /** The address of a turn, or of a path. */
  queryOf: (changes: Readonly<Record<string, string | null>>) => URLSearchParams;
}

export function Conversation({ tree, branch, chosen, onChoose, queryOf }: ConversationProps) {
  const turns = useMemo(() => (branch ? pathOfBranch(tree, branch) : tree.turns), [tree, branch]);
  const at = chosen ? turns.indexOf(chosen) : -1;
  useKeys(turns, at, onChoose);
  useShown(chosen && at >= 0 ? chosen.turn_id : null);
  if (tree.turns.length === 0) return <p class="calm">No model call yet.</p>;
  const step = (index: number): void => {
    const next = turns[index];
    if (next) onChoose(next);
  };
  const many = tree.branches.length > 1;
  return (
    <div class={many ? "conversation branched" : "conversation"}>
      {many && <BranchList tree={tree} shown={branch} chosen={chosen} queryOf={queryOf} />}
      <div class="conversation-turns">
        <p class="table-tools">
          <TurnFind turns={turns} at={at} onChoose={onChoose} />
          <button type="button" disabled={at === 0} onClick={() => step(at - 1)}>Turn before</button>
          <button type="button" disabled={at === turns.length - 1} onClick={() => step(at + 1)}>Next turn</button>
          <span class="calm">
            {branch ? `${count(turns.length)} of ${count(tree.turns.length)} turns` : `${count(turns.length)} turns`}
          </span>
        </p>
        <LazyList class="turns" items={turns} keyOf={(turn) => `turn-${turn.turn_id}`} height={heightOf}>
          {(turn, index) => {
            const parent = turn.parent_id === null ? undefined : tree.byId.get(turn.parent_id);
            const own = tree.branchOf.get(turn.turn_id);
            return (
              <TurnView
                turn={turn}
                parent={parent}
                next={branch ? turns[index + 1] : tree.nextOf.get(turn.turn_id)}
                joined={branch !== null || (parent !== undefined && tree.nextOf.get(parent.turn_id) === turn)}
                follows={parent !== undefined && turns[index - 1] === parent}
                chosen={turn === chosen}
                branch={many && own ? nameOfBranch(own, tree) : null}
                queryOf={(other) => queryOf({ turn: String(other.seq) })}
              />
            );
          }}
        </LazyList>
      </div>
    </div>
  );
}

/** A guess: lists that are not made yet have some length to scroll. */
function heightOf(turn: Turn): number {
  const lines = Math.min(40, (turn.reply.content?.length ?? 0) / 110);
  return 90 + 24 * (lines + turn.reply.tool_calls.length * 2 + turn.new_messages.length);
}

/** Brings a turn into view when another one is chosen, and again while what is above it gets its height. */
function useShown(turn_id: string | null): void {
  useLayoutEffect(() => {
    if (turn_id === null) return undefined;
    const element = document.getElementById(`turn-${turn_id}`);
    if (!element) return undefined;
    let frames = 12;
    let frame = 0;
    const show = (): void => {
      element.scrollIntoView({ block: "start" });
      if (frames-- > 0) frame = requestAnimationFrame(show);
    };
    const stop = (): void => cancelAnimationFrame(frame);
    const box = element.getBoundingClientRect();
    const seen = box.top >= 0 && box.top < window.innerHeight * 0.6;
    if (!seen) show();
    for (const name of ["wheel", "pointerdown", "keydown"]) window.addEventListener(name, stop, { once: true });
    return () => {
      stop();
      for (const name of ["wheel", "pointerdown", "keydown"]) window.removeEventListener(name, stop);
    };
  }, [turn_id]);
}

/** `j` and `k` go to the next turn and to the one before. */
function useKeys(turns: readonly Turn[], at: number, onChoose: (turn: Turn) => void): void {
  const now = useRef({ turns, at, onChoose });
  now.current = { turns, at, onChoose };
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => {
      if (event.ctrlKey || event.metaKey || event.altKey || (event.key !== "j" && event.key !== "k")) return;
      if (event.target instanceof HTMLElement && event.target.matches("input, textarea, select")) return;
      const { turns: all, at: from, onChoose: choose } = now.current;
      const next = all[event.key === "j" ? from + 1 : Math.max(0, from - 1)];
      if (!next) return;
      event.preventDefault();
      choose(next);
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, []);
}
