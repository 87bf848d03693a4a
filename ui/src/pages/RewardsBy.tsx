/** Rewards and tokens of a run by step, task, tag or version. Which of them is in the address. */

import { useMemo } from "preact/hooks";
import { Chart } from "../components/Chart";
import { Gauge } from "../components/Gauge";
import { SafeLine } from "../components/SafeText";
import { Link, useLocation } from "../router";
import { count, reward, share } from "../text/format";
import { conditions, type StatsRow, trainedShare } from "./run_words";
import { WithoutSignal } from "./WithoutSignal";

interface Tab {
  /** As `GET /stats?by=` names it. */
  readonly by: "step" | "task" | "tag" | "agent" | "version";
  readonly title: string;
  /** As `GET /episodes` names it. */
  readonly condition: string;
}

const TABS: readonly [Tab, ...Tab[]] = [
  { by: "step", title: "Train step", condition: "train_step" },
  { by: "task", title: "Task", condition: "task" },
  { by: "tag", title: "Tag", condition: "tag" },
  { by: "agent", title: "Agent", condition: "agent" },
  { by: "version", title: "Weight version", condition: "version" },
];
const MOST_ROWS = 500;

/** By what the address says. */
export function useTab(): Tab {
  const { query } = useLocation();
  return TABS.find((each) => each.by === query.get("by")) ?? TABS[0];
}

interface RewardsByProps {
  run: string | null;
  tab: Tab;
  /** Null while they are loaded. */
  rows: readonly StatsRow[] | null;
  /** Of all of them: its rewards are the scale of every bar. */
  total: StatsRow;
}

export function RewardsBy({ run, tab, rows, total }: RewardsByProps) {
  const { path, query } = useLocation();
  return (
    <section aria-label="By">
      <h2>By {tab.title.toLowerCase()}</h2>
      <nav class="tabs" aria-label="Rewards by">
        {TABS.map((each) => (
          <Link
            key={each.by}
            to={path}
            query={conditions({ by: each.by, solved_at: query.get("solved_at") })}
            {...(each === tab ? { "aria-current": "page" as const } : {})}
          >
            {each.title}
          </Link>
        ))}
      </nav>
      {rows === null ? (
        <p role="status">Loading…</p>
      ) : (
        <>
          {tab.by === "step" && <StepCharts rows={rows} />}
          <Rows run={run} tab={tab} rows={rows} total={total} />
        </>
      )}
    </section>
  );
}

function StepCharts({ rows }: { rows: readonly StatsRow[] }) {
  const drawn = rows.filter((row) => typeof row.key["step"] === "number");
  const same = JSON.stringify(drawn);
  const { x, rewards, shares, lags } = useMemo(
    () => ({
      x: { label: "Train step", values: drawn.map((row) => Number(row.key["step"])) },
      rewards: [
        { label: "mean reward", values: drawn.map((row) => row.reward_mean) },
        { label: "deviation of the rewards", values: drawn.map((row) => row.reward_std) },
      ],
      shares: [
        { label: "solved", values: drawn.map((row) => (row.graded ? row.solved / row.graded : null)) },
        { label: "trained tokens", values: drawn.map(trainedShare) },
        {
          label: "groups without signal",
          values: drawn.map((row) => (row.groups ? row.groups_without_signal / row.groups : null)),
        },
      ],
      lags: [
        { label: "mean lag", values: drawn.map((row) => row.lag_mean) },
        { label: "oldest token", values: drawn.map((row) => row.lag_max) },
      ],
    }),
    [same],
  );
  if (drawn.length === 0) return null;
  return (
    <div class="charts">
      <Chart title="Reward" x={x} series={rewards} format={reward} />
      <Chart title="Shares" x={x} series={shares} format={share} />
      {drawn.some((row) => row.lag_mean !== null) && (
        <Chart title="Age of trained tokens in weight versions" x={x} series={lags} format={reward} />
      )}
    </div>
  );
}

function Rows({ run, tab, rows, total }: { run: string | null; tab: Tab; rows: readonly StatsRow[]; total: StatsRow }) {
  const scale = { least: Math.min(0, total.reward_min ?? 0), most: Math.max(1, total.reward_max ?? 1) };
  if (rows.length === 0) return <p>No episode yet.</p>;
  const shown = tab.by === "step" ? rows.slice(-MOST_ROWS) : rows.slice(0, MOST_ROWS);
  const label = `By ${tab.title.toLowerCase()}`;
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label={label}>
        <table class="numbers by">
          <thead>
            <tr>
              <th scope="col">{tab.title}</th>
              {["Episodes", "Graded", "Mean reward", "Deviation", "Solved", "No signal", "Sampled", "Trained", "Lag"].map(
                (title) => <th scope="col" class="numeric" key={title}>{title}</th>,
              )}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => {
              const value = row.key[tab.by];
              const none = value === null || value === undefined;
              return (
                <tr key={String(value)}>
                  <th scope="row">{none ? <span class="calm">none</span> : <SafeLine text={String(value)} />}</th>
                  <td class="numeric">
                    {none ? count(row.episodes) : (
                      <Link to="/episodes" query={conditions({ run_id: run, [tab.condition]: value })}>
                        {count(row.episodes)}
                      </Link>
                    )}
                  </td>
                  <td class="numeric">{count(row.graded)}</td>
                  <td class="numeric">
                    {row.reward_mean !== null && <Gauge value={row.reward_mean} {...scale} />}{" "}
                    {reward(row.reward_mean)}
                  </td>
                  <td class="numeric">{reward(row.reward_std)}</td>
                  <td class="numeric">{share(row.graded ? row.solved / row.graded : null)}</td>
                  <td class="numeric">
                    <WithoutSignal row={row} query={none ? null : { run_id: run, [tab.condition]: value }} />
                  </td>
                  <td class="numeric">{count(row.sampled_tokens)}</td>
                  <td class="numeric">{share(trainedShare(row))}</td>
                  <td class="numeric">{reward(row.lag_mean)}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {rows.length > shown.length && <p class="calm">{count(shown.length)} of {count(rows.length)} rows are shown.</p>}
    </>
  );
}
