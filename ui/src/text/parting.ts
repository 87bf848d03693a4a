/** Where two conversations part: the first turn of which the messages differ, in the order in which turns ended. */

import type { Message, TurnOutline } from "../api/looks";

export interface Parting {
  /** How many turns are equal before it. */
  readonly equal: number;
  /** The first turn that differs on each side; null: the side has ended. Both null: they are equal. */
  readonly first: TurnOutline | null;
  readonly second: TurnOutline | null;
}

/** Messages are compared as they are shown: ids of calls, which the server makes, differ in every episode. */
export function partingOf(first: readonly TurnOutline[], second: readonly TurnOutline[]): Parting {
  let equal = 0;
  for (; equal < first.length && equal < second.length; equal++) {
    const [a, b] = [first[equal], second[equal]];
    if (!a || !b || textOf(a) !== textOf(b)) break;
  }
  return { equal, first: first[equal] ?? null, second: second[equal] ?? null };
}

/** All of a turn's messages as lines: what was new to the model, then what it replied. */
export function textOf(turn: TurnOutline): string {
  return [...turn.new_messages.map((each) => linesOf(each)), linesOf(turn.reply, "assistant, sampled")].join("\n");
}

/** A message as lines. */
export function linesOf(message: Message, role: string = message.role): string {
  const lines = [`[${role}${message.name ? ` ${message.name}` : ""}]`];
  if (message.reasoning) lines.push("(reasoning)", message.reasoning, "(end of reasoning)");
  if (message.content) lines.push(message.content);
  for (const call of message.tool_calls) lines.push(`calls ${call.name} ${call.arguments}`);
  return lines.join("\n");
}
