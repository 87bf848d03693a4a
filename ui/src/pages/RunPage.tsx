/** One run, or all episodes of the server: how its rollouts go, what they earn, and where their time goes. Live. */

import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";
import type { Answer } from "../api/client";
import { type Loading, useFresh, useGet } from "../api/hooks";
import { ofDirectory } from "../base";
import { Facts } from "../components/Facts";
import { SafeLine } from "../components/SafeText";
import { StackedBar } from "../components/StackedBar";
import { Await } from "../components/Status";
import { Link, type Params } from "../router";
import { count, reward, seconds, share } from "../text/format";
import { EngineFacts } from "./EngineFacts";
import { LiveCharts } from "./LiveCharts";
import { RewardsBy, useTab } from "./RewardsBy";
import {
  conditions, endedOf, failedOf, ranked, runningOf, type StatsRow, trainedShare, waitingOf,
} from "./run_words";
import { WithoutSignal } from "./WithoutSignal";

const STATUSES = [
  "queued", "preparing", "running", "grading", "completed", "truncated", "timed_out", "failed", "cancelled",
] as const;
const PARTS: readonly (readonly [string, string])[] = [
  ["queue", "queue"], ["setup", "set-up"], ["agent", "agent"], ["model", "model"], ["tools", "tools"],
  ["grading_queue", "to be graded"], ["grading", "grading"],
];

type Report = Answer<"/stats">;

export function RunPage({ params }: { params: Params }) {
  const run = params["run"] ?? null;
  const tab = useTab();
  const stats = useGet("/stats", { query: { run_id: run, by: tab.by } });
  useFresh(stats);
  // The total is that of every tab: it stays while another one is loaded.
  const latest = useRef<Report | null>(null);
  latest.current = stats.data ?? latest.current;
  const shown = { ...stats, data: latest.current } as Loading<Report>;
  return (
    <>
      <h1>{run === null ? "All episodes" : <>Run <SafeLine text={run} /></>}</h1>
      <Await of={shown}>
        {({ by, rows, total }) => (
          <>
            <Totals run={run} total={total} />
            <RewardsBy run={run} tab={tab} rows={by[0] === tab.by ? rows : null} />
          </>
        )}
      </Await>
      {!ofDirectory && <><EngineFacts /><LiveCharts /></>}
    </>
  );
}

function Totals({ run, total }: { run: string | null; total: StatsRow }) {
  const linked = (name: string, value: string, many: number): ComponentChildren => (
    <Link to="/episodes" query={conditions({ run_id: run, [name]: value })}>{count(many)}</Link>
  );
  return (
    <>
      <Facts
        facts={[
          ["Episodes", <Link to="/episodes" query={conditions({ run_id: run })}>{count(total.episodes)}</Link>],
          ["Ended", count(endedOf(total))],
          ["Running", count(runningOf(total))],
          ["Waiting", count(waitingOf(total))],
          ["Failed", count(failedOf(total))],
          ["Turns", count(total.turns)],
        ]}
      />
      <div class="totals">
        <section aria-label="Status">
          <h2>Status</h2>
          <Facts
            facts={STATUSES.filter((status) => total.statuses[status]).map((status) => [
              status.replaceAll("_", " "),
              linked("status", status, total.statuses[status] ?? 0),
            ])}
          />
          <Counts title="Failed or stopped by" counts={total.errors} link={(name, many) => linked("error_type", name, many)} />
          <Counts title="Whose fault" counts={total.faults} link={(name, many) => linked("fault", name, many)} />
        </section>
        <section aria-label="Rewards">
          <h2>Rewards</h2>
          <Facts
            facts={[
              ["Graded", <Link to="/episodes" query={conditions({ run_id: run, graded: "true" })}>{count(total.graded)}</Link>],
              ["Mean", reward(total.reward_mean)],
              ["Deviation", reward(total.reward_std)],
              ["Solved", linked("reward_min", "1", total.solved)],
              ...total.pass_at_k.map((pass) => [
                `pass@${pass.k}`,
                <>{share(pass.value)} <span class="calm">of {count(pass.tasks)} {pass.tasks === 1 ? "task" : "tasks"}</span></>,
              ] as const),
              ["Groups without signal", <WithoutSignal row={total} query={{ run_id: run }} />],
            ]}
          />
        </section>
        <section aria-label="Tokens">
          <h2>Tokens</h2>
          <Facts
            facts={[
              ["Sampled", count(total.sampled_tokens)],
              ["Trained", count(total.trained_tokens)],
              ["Trained share", share(trainedShare(total))],
              ["Discarded", count(total.discarded_tokens)],
              ["Trained by a step", `${count(total.used)} episodes`],
              ["Left out by a step", `${count(total.left_out)} episodes`],
              ["Mean lag", total.lag_mean === null ? null : `${reward(total.lag_mean)} versions`],
              ["Oldest token trained", total.lag_max === null ? null : `${count(total.lag_max)} versions`],
              ["Beyond their bound", linked("stale", "true", total.stale)],
            ]}
          />
          <Counts title="Untrained tokens" counts={total.untrained} link={(_, many) => count(many)} />
          <Counts title="Breaks" counts={total.breaks} link={(name, many) => linked("breaks", name, many)} />
        </section>
      </div>
      <StackedBar
        label="Where time goes, summed over the episodes"
        parts={PARTS.map(([part, name]) => ({ name, value: total.seconds[part] ?? 0 }))}
        format={seconds}
      />
    </>
  );
}

interface CountsProps {
  title: string;
  counts: Readonly<Record<string, number>>;
  link: (name: string, many: number) => ComponentChildren;
}

function Counts({ title, counts, link }: CountsProps) {
  const found = ranked(counts);
  if (found.length === 0) return null;
  return (
    <>
      <h3>{title}</h3>
      <Facts facts={found.map(([name, many]) => [name.replaceAll("_", " "), link(name, many)])} />
    </>
  );
}
