/** Finds a text in the messages of the turns, and goes from one turn that has it to the next. */

import { useMemo, useState } from "preact/hooks";
import type { Message, TurnOutline as Turn } from "../api/looks";

interface TurnFindProps {
  turns: readonly Turn[];
  /** The index of the turn that is chosen, or -1. */
  at: number;
  onChoose: (turn: Turn) => void;
}

export function TurnFind({ turns, at, onChoose }: TurnFindProps) {
  const [typed, setTyped] = useState("");
  const [asked, setAsked] = useState("");
  const found = useMemo(() => (asked ? turns.flatMap((turn, index) => (has(turn, asked) ? [index] : [])) : []), [turns, asked]);
  const go = (event: Event): void => {
    event.preventDefault();
    setAsked(typed);
    const places = typed === asked ? found : turns.flatMap((turn, index) => (typed && has(turn, typed) ? [index] : []));
    const next = turns[places.find((place) => place > at) ?? places[0] ?? -1];
    if (next) onChoose(next);
  };
  return (
    <form class="turn-find" role="search" onSubmit={go}>
      <label>
        <span class="unseen">Find in the conversation</span>
        <input data-search type="search" placeholder="Find" value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
      </label>{" "}
      <span role="status" aria-label="Found" class="calm">
        {asked && (found.length ? `${Math.max(0, found.indexOf(at)) + 1} of ${found.length} turns` : "not found")}
      </span>
    </form>
  );
}

function has(turn: Turn, text: string): boolean {
  return messageHas(turn.reply, text) || turn.new_messages.some((message) => messageHas(message, text));
}

function messageHas({ content, reasoning, tool_calls }: Message, text: string): boolean {
  return (
    (content ?? "").includes(text) ||
    (reasoning ?? "").includes(text) ||
    tool_calls.some((call) => call.name.includes(text) || call.arguments.includes(text))
  );
}
