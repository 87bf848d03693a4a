/** The conversations of an episode and their branches, each a path that can be picked. */

import { useState } from "preact/hooks";
import type { TurnOutline as Turn } from "../api/looks";
import { SafeLine } from "../components/SafeText";
import { Link, useLocation } from "../router";
import { count } from "../text/format";
import { type Branch, nameOfBranch, type TurnTree } from "../text/turn_tree";

const AT_ONCE = 100;
const DEEPEST = 6;

interface BranchListProps {
  tree: TurnTree;
  shown: Branch | null;
  chosen: Turn | null;
  queryOf: (changes: Readonly<Record<string, string | null>>) => URLSearchParams;
}

export function BranchList({ tree, shown, chosen, queryOf }: BranchListProps) {
  const { path } = useLocation();
  const [most, setMost] = useState(AT_ONCE);
  const { branches } = tree;
  const here = (each: Branch | null): { "aria-current"?: "true" } => (each === shown ? { "aria-current": "true" } : {});
  return (
    <nav class="branches" aria-label="Paths">
      <ul>
        <li><Link to={path} query={queryOf({ path: null })} replace {...here(null)}>All turns</Link></li>
        {branches.slice(0, most).map((branch) => {
          const [first, last] = [branch.first.seq, branch.turns.at(-1)?.seq ?? branch.first.seq];
          const inside = chosen !== null && tree.branchOf.get(chosen.turn_id) === branch;
          const query = queryOf({ path: String(first), turn: inside ? String(chosen.seq) : null });
          return (
            <li key={branch.first.turn_id} style={{ marginLeft: `${Math.min(branch.depth, DEEPEST) * 0.8}rem` }}>
              <Link to={path} query={query} replace {...here(branch)}>
                <SafeLine text={nameOfBranch(branch, tree)} longest={60} />
              </Link>{" "}
              <small>
                {first === last ? `turn ${first}` : `turns ${first}–${last}`}
                {last - first + 1 !== branch.turns.length && ` (${count(branch.turns.length)})`}
                <Cause branch={branch} tree={tree} />
              </small>
            </li>
          );
        })}
      </ul>
      {branches.length > most && (
        <button type="button" onClick={() => setMost(most + 5 * AT_ONCE)}>{count(branches.length - most)} more</button>
      )}
    </nav>
  );
}

const CAUSES: Readonly<Record<string, string>> = { call: "called in", summary: "goes on from", thread: "below" };

function Cause({ branch: { root }, tree }: { branch: Branch; tree: TurnTree }) {
  const turn = root?.caused_by ? tree.byId.get(root.caused_by.turn_id) : undefined;
  return turn && root?.caused_by ? <>, {CAUSES[root.caused_by.by] ?? "from"} turn {turn.seq}</> : null;
}
