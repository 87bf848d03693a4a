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
import { Link, navigate, type Params, useLocation } from "../router";
import { count, reward, seconds, share } from "../text/format";
import { EngineFacts } from "./EngineFacts";
import { type Field, FieldView } from "./FilterField";
import { LiveCharts } from "./LiveCharts";
import { RewardsBy, useTab } from "./RewardsBy";
import {
  conditions, endedOf, ranked, runningOf, type StatsRow, statusOf, trainedShare, waitingOf,
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
  const [given, setSolvedAt] = useSolvedAt();
  const stats = useGet("/stats", { query: { run_id: run, by: tab.by, solved_at: given } });
  useFresh(stats);
  // The total is that of every tab: it stays while another one is loaded.
  const latest = useRef<Report | null>(null);
  latest.current = stats.data ?? latest.current;
  const shown = { ...stats, data: latest.current } as Loading<Report>;
  return (
    <>
      <h1>{run === null ? "All episodes" : <>Run <SafeLine text={run} /></>}</h1>
      <Await of={shown}>
        {({ by, rows, total, solved_at }) => (
          <>
            <Totals run={run} total={total} solved_at={solved_at} setSolvedAt={setSolvedAt} />
            <RewardsBy run={run} tab={tab} rows={by[0] === tab.by ? rows : null} total={total} />
          </>
        )}
      </Await>
      {!ofDirectory && <><EngineFacts /><LiveCharts /></>}
    </>
  );
}

interface TotalsProps {
  run: string | null;
  total: StatsRow;
  solved_at: number;
  setSolvedAt: (name: string, value: string) => void;
}

/** By which the least reward that counts as solved is changed. */
const SOLVED_AT: Field = { name: "solved_at", label: "Solved from a reward of", kind: "number" };

function Totals({ run, total, solved_at, setSolvedAt }: TotalsProps) {
  const taken = total.used + total.left_out > 0; // else the trainer tells no steps
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
          ["Failed", linked("status", "failed", statusOf(total, "failed"))],
          ["Timed out", linked("status", "timed_out", statusOf(total, "timed_out"))],
          ["Cancelled", linked("status", "cancelled", statusOf(total, "cancelled"))],
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
              ["Standard error of the mean", total.reward_error === null ? null : reward(total.reward_error)],
              ["Deviation", reward(total.reward_std)],
              ["Solved", linked("reward_min", String(solved_at), total.solved)],
              ...total.pass_at_k.map((pass) => [`pass@${pass.k}`, <>{share(pass.value)} <span class="calm">{setsOf(pass)}</span></>] as const),
              ["Groups without signal", <WithoutSignal row={total} query={{ run_id: run }} />],
            ]}
          />
          <FieldView field={SOLVED_AT} query={conditions({ solved_at })} set={setSolvedAt} />
        </section>
        <section aria-label="Tokens">
          <h2>Tokens</h2>
          <Facts
            facts={[
              ["Sampled", count(total.sampled_tokens)],
              ["Trained", count(total.trained_tokens)],
              ["Trained share", share(trainedShare(total))],
              ["Discarded", count(total.discarded_tokens)],
              ["Trained by a step", taken ? `${count(total.used)} episodes` : null],
              ["Left out by a step", taken ? `${count(total.left_out)} episodes` : null],
              ["Mean lag", total.lag_mean === null ? null : `${reward(total.lag_mean)} versions`],
              ["Oldest token trained", total.lag_max === null ? null : `${count(total.lag_max)} versions`],
              ["Beyond their bound", linked("stale", "true", total.stale)],
            ]}
          />
          <Counts title="Untrained tokens" counts={total.untrained} link={(_, many) => count(many)} />
          <Facts facts={[["Further conversations", linked("breaks", "new_conversation", total.new_conversations)]]} />
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

/** What a pass@k is the mean over: the rollouts of a task by one agent on one weight version are a set. */
function setsOf({ sets, tasks }: StatsRow["pass_at_k"][number]): string {
  const of = `${count(tasks)} ${tasks === 1 ? "task" : "tasks"}`;
  return sets === tasks ? `of ${of}` : `of ${count(sets)} task × agent × weights of ${of}`;
}

/** The least reward that counts as solved, where the address has one, and how it is put there. */
function useSolvedAt(): [number | null, (name: string, value: string) => void] {
  const { path, query } = useLocation();
  const given = query.get("solved_at");
  const at = given !== null && given.trim() !== "" && Number.isFinite(Number(given)) ? Number(given) : null;
  const set = (name: string, value: string): void => {
    const next = new URLSearchParams(query);
    if (value) next.set(name, value);
    else next.delete(name);
    navigate(path, next, { replace: true });
  };
  return [at, set];
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
