/** The start: all runs of the server, the latest first, with one row for what belongs to none; below them the engine
 * and the server as they are now. */

import type { ComponentChildren } from "preact";
import { useFresh, useGet } from "../api/hooks";
import { ofDirectory } from "../base";
import { SafeLine } from "../components/SafeText";
import { Await } from "../components/Status";
import { Link, pathOf } from "../router";
import { count, reward, share, time } from "../text/format";
import { EngineFacts } from "./EngineFacts";
import { LiveCharts } from "./LiveCharts";
import {
  conditions, endedOf, runningOf, statusOf, type StatsRow, trainedShare, waitingOf,
} from "./run_words";
import { WithoutSignal } from "./WithoutSignal";

const BY_RUN = { query: { by: "run" } };
const MOST_ROWS = 500;

interface Column {
  readonly id: string;
  readonly title: string;
  readonly numeric?: boolean;
  readonly cell: (row: StatsRow) => ComponentChildren;
}

/** Beside the name of the run. */
const COLUMNS: readonly Column[] = [
  { id: "episodes", title: "Episodes", numeric: true, cell: (row) => <Episodes row={row} /> },
  { id: "ended", title: "Ended", numeric: true, cell: (row) => count(endedOf(row)) },
  { id: "running", title: "Running", numeric: true, cell: (row) => count(runningOf(row)) },
  { id: "waiting", title: "Waiting", numeric: true, cell: (row) => count(waitingOf(row)) },
  { id: "failed", title: "Failed", numeric: true, cell: (row) => count(statusOf(row, "failed")) },
  { id: "timed_out", title: "Timed out", numeric: true, cell: (row) => count(statusOf(row, "timed_out")) },
  { id: "cancelled", title: "Cancelled", numeric: true, cell: (row) => count(statusOf(row, "cancelled")) },
  { id: "reward", title: "Reward", numeric: true, cell: (row) => reward(row.reward_mean) },
  { id: "solved", title: "Solved", numeric: true, cell: (row) => `${count(row.solved)} / ${count(row.graded)}` },
  { id: "signal", title: "No signal", numeric: true, cell: (row) => <WithoutSignal row={row} query={runOf(row) === null ? null : { run_id: runOf(row) }} /> },
  { id: "sampled", title: "Sampled", numeric: true, cell: (row) => count(row.sampled_tokens) },
  { id: "trained", title: "Trained", numeric: true, cell: (row) => share(trainedShare(row)) },
  { id: "newest", title: "Newest episode", cell: (row) => time(row.newest_at) },
];

function runOf(row: StatsRow): string | null {
  const run = row.key["run"];
  return run === null || run === undefined ? null : String(run);
}

/** The latest run first, and what belongs to none last. */
function rankOf(row: StatsRow): number {
  return runOf(row) === null ? -1 : (row.newest_at ?? 0);
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
  useFresh(stats);
  return (
    <>
      <h1>Runs</h1>
      <Await of={stats}>
        {({ rows, total }) => (
          <>
            <p>
              <Link to="/runs/-/all">All {count(total.episodes)} episodes {ofDirectory ? "of this folder" : "of this server"}</Link>
            </p>
            <Runs rows={rows.toSorted((a, b) => rankOf(b) - rankOf(a))} />
          </>
        )}
      </Await>
      {!ofDirectory && <><EngineFacts /><LiveCharts /></>}
    </>
  );
}

/** Not a VirtualTable: its numbers change while it is looked at, and its rows stay where they are. */
function Runs({ rows }: { rows: readonly StatsRow[] }) {
  if (rows.length === 0) return <p>No episode yet.</p>;
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table: Runs">
        <table class="numbers runs">
          <caption class="unseen">Runs</caption>
          <thead>
            <tr>
              <th scope="col">Run</th>
              {COLUMNS.map(({ id, title, numeric }) => (
                <th scope="col" key={id} class={numeric ? "numeric" : ""}>{title}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, MOST_ROWS).map((row) => (
              <tr key={runOf(row)}>
                <th scope="row"><RunName run={runOf(row)} /></th>
                {COLUMNS.map(({ id, numeric, cell }) => (
                  <td key={id} class={numeric ? "numeric" : ""}>{cell(row)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > MOST_ROWS && <p class="calm">{count(MOST_ROWS)} of {count(rows.length)} runs are shown.</p>}
    </>
  );
}
