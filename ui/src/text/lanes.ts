/** The spans of an episode as lanes to draw: of spans that have parts, the parts. */

import type { Span, TurnOutline } from "../api/looks";
import type { LaneSpan } from "../components/Swimlane";
import type { TurnTree } from "./turn_tree";

/** In the order of their colours. */
export const KINDS = ["wait", "set-up", "agent", "render", "decode", "tool", "grading", "other"] as const;
const LANES = ["set-up", "agent", "model", "tools", "other", "grading"] as const;

const KIND_OF: Readonly<Record<string, string>> = {
  queue: "wait",
  grading_queue: "wait",
  wait: "wait",
  setup: "set-up",
  world: "set-up",
  sandbox: "set-up",
  files: "set-up",
  own_tools: "set-up",
  agent: "agent",
  render: "render",
  decode: "decode",
  tool: "tool",
  grading: "grading",
  grader: "grading",
};
/** What a span of this kind is a part of, or stands for by itself. */
const LANE_OF: Readonly<Record<string, string>> = {
  queue: "set-up",
  setup: "set-up",
  agent: "agent",
  model: "model",
  tool: "tools",
  grading: "grading",
};

export function laneSpans(spans: readonly Span[]): { drawn: LaneSpan[]; lanes: string[] } {
  const byId = new Map(spans.map((span) => [span.span_id, span]));
  // What an agent did while it ran is below it, and is no part of it.
  const divided = new Set(
    spans.flatMap((span) => (span.parent_id && byId.get(span.parent_id)?.kind !== "agent" ? [span.parent_id] : [])),
  );
  const drawn: LaneSpan[] = [];
  for (const span of spans) {
    if (divided.has(span.span_id)) continue;
    const top = topOf(span, byId);
    const lane = LANE_OF[top.kind] ?? "other";
    const own = KIND_OF[span.kind] ?? "other";
    const kind = lane === "grading" && own !== "wait" ? "grading" : own;
    drawn.push({
      id: span.span_id,
      lane,
      kind,
      label: labelOf(span, top),
      start: span.start_s,
      end: span.end_s ?? null,
      ok: span.ok ?? true,
      detail: detailOf(span),
    });
  }
  const used = new Set(drawn.map((span) => span.lane));
  return { drawn, lanes: LANES.filter((lane) => used.has(lane)) };
}

/** The outermost span that it is a part of; an agent has no parts. */
function topOf(span: Span, byId: ReadonlyMap<string, Span>): Span {
  let top = span;
  for (let above = parentOf(top, byId); above && above.kind !== "agent"; above = parentOf(top, byId)) top = above;
  return top;
}

function parentOf(span: Span, byId: ReadonlyMap<string, Span>): Span | undefined {
  return span.parent_id ? byId.get(span.parent_id) : undefined;
}

function labelOf(span: Span, top: Span): string {
  const name = span.name || span.kind.replaceAll("_", " ");
  if (top === span) return span.kind === "tool" ? name : `${span.kind.replaceAll("_", " ")} ${span.name ?? ""}`.trim();
  const seq = top.attributes?.seq;
  return `${name}, of ${top.kind}${seq === undefined ? "" : ` call of turn ${seq}`}`;
}

function detailOf(span: Span): string {
  const all = Object.entries(span.attributes ?? {}).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  if (span.error) all.unshift(span.error.replaceAll("_", " "));
  return all.join(", ");
}

/** The ids of what is drawn of a turn: the parts of its model call. */
export function spansOfTurn(spans: readonly Span[], turn: TurnOutline): string[] {
  const call = spans.find((span) => span.kind === "model" && span.turn_id === turn.turn_id);
  if (!call) return [];
  const parts = spans.filter((span) => span.parent_id === call.span_id).map((span) => span.span_id);
  return parts.length ? parts : [call.span_id];
}

/** The turn of a model call or of one of its parts, and the turn that asked for a call of a tool; null: it has none, or
 * it is not known. Spans of tools name the turn before them, which is another one where sub-agents work side by side:
 * so a turn is looked for that calls a tool of this name. */
export function turnOfSpan(spans: readonly Span[], span_id: string, tree: TurnTree): TurnOutline | null {
  const byId = new Map(spans.map((span) => [span.span_id, span]));
  const span = byId.get(span_id);
  if (!span) return null;
  const top = topOf(span, byId);
  const named = top.turn_id ? (tree.byId.get(top.turn_id) ?? null) : null;
  if (top.kind !== "tool" || !named || calls(named, top.name ?? "")) return named;
  const ended = new Map(spans.flatMap((each) => (each.kind === "model" && each.turn_id ? [[each.turn_id, each.end_s]] : [])));
  const before = tree.turns.filter((turn) => (ended.get(turn.turn_id) ?? Infinity) <= top.start_s);
  return before.findLast((turn) => calls(turn, top.name ?? "")) ?? (tree.branches.length === 1 ? named : null);
}

/** Agents prefix the names of the server's tools, each in its way. */
function calls(turn: TurnOutline, tool: string): boolean {
  return turn.reply.tool_calls.some((call) => call.name === tool || call.name.endsWith(`_${tool}`));
}
