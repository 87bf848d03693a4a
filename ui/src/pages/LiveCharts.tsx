/** What the whole server did lately: rates from its counters, and gauges, of the samples of `GET /live`. */

import { useMemo, useRef } from "preact/hooks";
import { type Answer, get } from "../api/client";
import { useFresh, useLoaded } from "../api/hooks";
import { Chart } from "../components/Chart";
import { Facts } from "../components/Facts";
import { Await } from "../components/Status";
import { count, reward as decimals } from "../text/format";

type Sample = Answer<"/live">["samples"][number];
type Counter = "sampled_tokens" | "turns";

/** As many as are drawn; a server that keeps more is asked for all by a notebook. */
const MOST_SAMPLES = 1800;

export function LiveCharts() {
  const kept = useRef<readonly Sample[]>([]);
  const live = useLoaded(async (signal) => {
    const since = kept.current.at(-1)?.at ?? 0;
    const { samples } = await get("/live", { query: { since } }, signal);
    if (!signal.aborted && samples.length > 0) kept.current = [...kept.current, ...samples].slice(-MOST_SAMPLES);
    return kept.current;
  }, []);
  useFresh(live);
  return (
    <section aria-label="This server, lately">
      <h2>This server, lately</h2>
      <Await of={live}>{(samples) => <Drawn samples={samples} />}</Await>
    </section>
  );
}

function Drawn({ samples }: { samples: readonly Sample[] }) {
  const { x, tokens, turns, calls, episodes, sandboxes } = useMemo(() => {
    const gauge = (label: string, of: (sample: Sample) => number | null) => ({ label, values: samples.map(of) });
    return {
      x: { label: "Time", values: samples.map((sample) => sample.at), time: true },
      tokens: [{ label: "tokens/s", values: rates(samples, "sampled_tokens") }],
      turns: [{ label: "turns/s", values: rates(samples, "turns") }],
      calls: [
        gauge("in flight", (sample) => sample.calls_in_flight),
        gauge("wait for a worker", (sample) => sample.engine_waiting),
      ],
      episodes: ["queued", "preparing", "running", "grading"].map((status) =>
        gauge(status, (sample) => sample.episodes[status] ?? 0),
      ),
      sandboxes: [
        gauge("in use", (sample) => sample.sandboxes_in_use),
        gauge("warm", (sample) => sample.sandboxes_warm),
      ],
    };
  }, [samples]);
  const now = samples.at(-1);
  if (now === undefined) return null;
  return (
    <>
      <Facts
        facts={[
          ["Tokens/s", decimals(tokens[0]?.values.at(-1))],
          ["Turns/s", decimals(turns[0]?.values.at(-1))],
          ["Calls in flight", count(now.calls_in_flight)],
          ["Calls that wait for a worker", now.engine_waiting === null ? null : count(now.engine_waiting)],
          ["Sandboxes in use", now.sandboxes_in_use === null ? null : count(now.sandboxes_in_use)],
          ["Sandboxes warm", now.sandboxes_warm === null ? null : count(now.sandboxes_warm)],
          ["Bytes that wait for the disk", count(now.journal_queued_bytes)],
        ]}
      />
      <div class="charts">
        <Chart title="Tokens per second" x={x} series={tokens} format={decimals} height={160} />
        <Chart title="Turns per second" x={x} series={turns} format={decimals} height={160} />
        <Chart title="Model calls" x={x} series={calls} format={decimals} height={160} />
        <Chart title="Open episodes" x={x} series={episodes} format={decimals} height={160} />
        <Chart title="Sandboxes" x={x} series={sandboxes} format={decimals} height={160} />
      </div>
    </>
  );
}

/** The growth per second up to each sample; null at the first, and where the server was started again. */
function rates(samples: readonly Sample[], counter: Counter): (number | null)[] {
  return samples.map((sample, index) => {
    const before = samples[index - 1];
    if (before === undefined || sample.at <= before.at || sample[counter] < before[counter]) return null;
    return (sample[counter] - before[counter]) / (sample.at - before.at);
  });
}
