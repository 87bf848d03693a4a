/** The turns of an episode as what they are: conversations, and branches of them. Everything in one pass. */

import type { Message, RootOutline, TurnOutline, TurnOutlines } from "../api/looks";

/** Turns that follow each other without parting: from a root, or from a turn that another one has continued already,
 * to an end. */
export interface Branch {
  readonly first: TurnOutline;
  readonly turns: TurnOutline[];
  /** The branch that it parts from, or in which it was caused; null: it is the outermost, or that is not known. */
  readonly above: Branch | null;
  readonly depth: number;
  /** What begins with its first turn; null: it parts from a turn. */
  readonly root: RootOutline | null;
}

export interface TurnTree {
  readonly turns: readonly TurnOutline[];
  readonly byId: ReadonlyMap<string, TurnOutline>;
  /** In the order of a tree: each below the one that it parts from. */
  readonly branches: readonly Branch[];
  readonly branchOf: ReadonlyMap<string, Branch>;
  /** The first turn that continues a turn, by the id of that one. */
  readonly nextOf: ReadonlyMap<string, TurnOutline>;
}

export function treeOf({ turns, roots = [] }: TurnOutlines): TurnTree {
  const byId = new Map(turns.map((turn) => [turn.turn_id, turn]));
  const rootOf = new Map(roots.map((root) => [root.turn_id, root]));
  const branchOf = new Map<string, Branch>();
  const nextOf = new Map<string, TurnOutline>();
  const begun: Branch[] = [];
  for (const turn of turns) {
    const parent = turn.parent_id === null ? undefined : byId.get(turn.parent_id);
    const goesOn = parent && !nextOf.has(parent.turn_id) ? branchOf.get(parent.turn_id) : undefined;
    if (parent && !nextOf.has(parent.turn_id)) nextOf.set(parent.turn_id, turn);
    if (goesOn) {
      goesOn.turns.push(turn);
      branchOf.set(turn.turn_id, goesOn);
      continue;
    }
    const root = rootOf.get(turn.turn_id) ?? null;
    const from = parent?.turn_id ?? root?.caused_by?.turn_id;
    const above = (from === undefined ? undefined : branchOf.get(from)) ?? null;
    const branch = { first: turn, turns: [turn], above, depth: above ? above.depth + 1 : 0, root };
    begun.push(branch);
    branchOf.set(turn.turn_id, branch);
  }
  return { turns, byId, branches: nested(begun), branchOf, nextOf };
}

function nested(begun: readonly Branch[]): Branch[] {
  const below = new Map<Branch | null, Branch[]>();
  for (const branch of begun) {
    const beside = below.get(branch.above);
    if (beside) beside.push(branch);
    else below.set(branch.above, [branch]);
  }
  const found: Branch[] = [];
  const left = (below.get(null) ?? []).reverse();
  for (let branch = left.pop(); branch; branch = left.pop()) {
    found.push(branch);
    left.push(...(below.get(branch) ?? []).reverse());
  }
  return found;
}

/** The turns from the root to the end of a branch. */
export function pathOfBranch(tree: TurnTree, branch: Branch): TurnOutline[] {
  const found: TurnOutline[] = [];
  for (let turn = branch.turns.at(-1); turn; turn = turn.parent_id === null ? undefined : tree.byId.get(turn.parent_id)) {
    found.push(turn);
  }
  return found.reverse();
}

/** The branch that an address names by the number of its first turn. */
export function namedBranch(tree: TurnTree, name: string | null): Branch | null {
  return tree.branches.find((each) => String(each.first.seq) === name) ?? null;
}

/** The turn that an address names, by its number or its id. */
export function namedTurn(tree: TurnTree, name: string | null): TurnOutline | null {
  if (name === null) return null;
  return tree.byId.get(name) ?? (/^\d{1,9}$/.test(name) ? tree.turns.find((turn) => turn.seq === Number(name)) : null) ?? null;
}

/** Of messages that follow an assistant's, the results of its tool calls, by the ids of the calls. */
export function resultsFor(assistant: Message, following: readonly Message[]): Map<string, Message> {
  const asked = new Set(assistant.tool_calls.flatMap((call) => call.id ?? []));
  const found = new Map<string, Message>();
  if (asked.size === 0) return found;
  for (const message of following) {
    const id = message.tool_call_id;
    if (message.role === "tool" && id && asked.has(id) && !found.has(id)) found.set(id, message);
  }
  return found;
}

/** How a branch is called: what it is, and since when. */
export function nameOfBranch({ first, root }: Branch, tree: TurnTree): string {
  const reason = first.break?.reason.replaceAll("_", " ");
  if (root === null) {
    const parent = first.parent_id === null ? undefined : tree.byId.get(first.parent_id);
    if (!parent) return "goes on from another episode";
    return `from turn ${parent.seq}${reason ? `: ${reason}` : ""}`;
  }
  const kinds: Readonly<Record<string, string>> = { subagent: "sub-agent", auxiliary: "side call" };
  const kind = kinds[root.kind] ?? root.kind;
  const again = reason && first.break?.reason !== "new_conversation" ? ` again: ${reason}` : "";
  return `${kind}${first.thread?.name ? ` ${first.thread.name}` : ""}${again}`;
}
