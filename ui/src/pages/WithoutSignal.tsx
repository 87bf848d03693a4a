/** How many groups have no signal, with the way to the list of them. */

import { Link } from "../router";
import { count } from "../text/format";
import { conditions, type StatsRow } from "./run_words";

interface WithoutSignalProps {
  row: StatsRow;
  /** What the row's episodes have in common, as `GET /groups` takes it; null: no condition says it. */
  query: Parameters<typeof conditions>[0] | null;
}

export function WithoutSignal({ row, query }: WithoutSignalProps) {
  const many = `${count(row.groups_without_signal)} / ${count(row.groups)}`;
  if (query === null || row.groups === 0) return <>{many}</>;
  return <Link to="/groups" query={conditions({ ...query, sort: "signal", order: "asc" })}>{many}</Link>;
}
