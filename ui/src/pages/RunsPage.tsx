/** All runs of the server: one row of each, and one for what belongs to none. */

import { useMemo } from "preact/hooks";
import { useFresh, useGet } from "../api/hooks";
import { ofDirectory } from "../base";
import { SafeLine } from "../components/SafeText";
import { Await } from "../components/Status";
import { type Column, VirtualTable } from "../components/VirtualTable";
import { Link, navigate, pathOf } from "../router";
import { count, reward, share } from "../text/format";
import {
  conditions, endedOf, failedOf, runningOf, type StatsRow, trainedShare, waitingOf,
} from "./run_words";

const BY_RUN = { query: { by: "run" } };
const ROW_PX = 34;
const HEAD_PX = 50;
const TALLEST_PX = 640;

const COLUMNS: readonly Column<StatsRow>[] = [
  { id: "run", title: "Run", width: 12, grow: 2, cell: (row) => <RunName run={runOf(row)} /> },
  { id: "episodes", title: "Episodes", width: 7, numeric: true, cell: (row) => <Episodes row={row} /> },
  { id: "ended", title: "Ended", width: 6, numeric: true, cell: (row) => count(endedOf(row)) },
  { id: "running", title: "Running", width: 6, numeric: true, cell: (row) => count(runningOf(row)) },
  { id: "waiting", title: "Waiting", width: 6, numeric: true, cell: (row) => count(waitingOf(row)) },
  { id: "failed", title: "Failed", width: 6, numeric: true, cell: (row) => count(failedOf(row)) },
  { id: "reward", title: "Reward", width: 6, numeric: true, cell: (row) => reward(row.reward_mean) },
  { id: "solved", title: "Solved", width: 7, numeric: true, cell: (row) => `${count(row.solved)} / ${count(row.graded)}` },
  { id: "signal", title: "No signal", width: 7, numeric: true, cell: (row) => `${count(row.groups_without_signal)} / ${count(row.groups)}` },
  { id: "sampled", title: "Sampled", width: 7, numeric: true, cell: (row) => count(row.sampled_tokens) },
  { id: "trained", title: "Trained", width: 6, numeric: true, cell: (row) => share(trainedShare(row)) },
];

function runOf(row: StatsRow): string | null {
  const run = row.key["run"];
  return run === null || run === undefined ? null : String(run);
}

function RunName({ run }: { run: string | null }) {
  if (run === null) return <span class="calm">without a run</span>;
  return <Link to={pathOf("runs", run)}><SafeLine text={run} /></Link>;
}

function Episodes({ row }: { row: StatsRow }) {
  const run_id = runOf(row);
  if (run_id === null) return <>{count(row.episodes)}</>;
  return <Link to="/episodes" query={conditions({ run_id })}>{count(row.episodes)}</Link>;
}

export function RunsPage() {
  const stats = useGet("/stats", BY_RUN);
  useFresh(stats.reload);
  const rows = stats.data?.rows ?? [];
  // The same numbers are no new table: the place and the row that is chosen stay.
  const same = JSON.stringify(rows);
  const load = useMemo(
    () => async (offset: number, limit: number) => ({ rows: rows.slice(offset, offset + limit), total: rows.length }),
    [same],
  );
  return (
    <>
      <h1>Runs</h1>
      <Await of={stats}>
        {({ total }) => (
          <>
            <p>
              <Link to="/runs/-/all">All {count(total.episodes)} episodes {ofDirectory ? "of this folder" : "of this server"}</Link>
            </p>
            <VirtualTable
              label="Runs"
              columns={COLUMNS}
              rowKey={(row) => runOf(row) ?? ""}
              load={load}
              height={`${Math.min(TALLEST_PX, Math.max(3, rows.length) * ROW_PX + HEAD_PX)}px`}
              onOpen={(row) => {
                const run = runOf(row);
                if (run !== null) navigate(pathOf("runs", run));
              }}
              empty="No episode yet."
            />
          </>
        )}
      </Await>
    </>
  );
}
