/** Two episodes side by side: their facts, why they ended so, where their conversations part, where their time went. */

import type { ComponentChildren } from "preact";
import { type Answer, get } from "../api/client";
import { useLoaded } from "../api/hooks";
import { type Episode, getOutlines, type TurnOutline } from "../api/looks";
import { StatusBadge } from "../components/Badge";
import { TextDiff } from "../components/Diff";
import { SafeLine } from "../components/SafeText";
import { Await } from "../components/Status";
import { Link, type Params, pathOf } from "../router";
import { count, reward, seconds, share, time } from "../text/format";
import { partingOf, textOf } from "../text/parting";
import { NEW_CONVERSATION } from "./BreaksView";

type Spans = Answer<"/episodes/{episode_id}/spans">;

interface Side {
  readonly episode: Episode;
  readonly turns: readonly TurnOutline[];
  readonly spans: Spans;
}

type Pair<Value> = readonly [Value, Value];

/** A row of a comparison: what is compared, its values as text, and how they are shown where that is not the text. */
interface Row {
  readonly name: string;
  readonly values: Pair<string>;
  readonly shown?: Pair<ComponentChildren>;
  readonly numeric?: boolean;
}

export function ComparePage({ params }: { params: Params }) {
  const ids: Pair<string> = [params.first ?? "", params.second ?? ""];
  const sides = useLoaded((signal) => Promise.all(ids.map((id) => loadSide(id, signal))), [...ids]);
  return (
    <>
      <h1>Two episodes</h1>
      <p class="table-tools">
        <Link to={pathOf("compare", ids[1], ids[0])}>Change sides</Link>
      </p>
      <Await of={sides}>
        {([first, second]) => first && second && <Compared first={first} second={second} />}
      </Await>
    </>
  );
}

async function loadSide(episode_id: string, signal: AbortSignal): Promise<Side> {
  const options = { path: { episode_id } };
  const [episode, { turns }, spans] = await Promise.all([
    get("/episodes/{episode_id}", options, signal),
    getOutlines(episode_id, signal),
    get("/episodes/{episode_id}/spans", options, signal),
  ]);
  return { episode, turns, spans };
}

function Compared({ first, second }: { first: Side; second: Side }) {
  const episodes: Pair<Episode> = [first.episode, second.episode];
  const heads: Pair<string> = [first.episode.episode_id, second.episode.episode_id];
  return (
    <>
      <Comparison label="Facts" heads={heads} rows={factsOf(episodes)} />
      <Comparison label="Rewards" heads={heads} rows={rewardsOf(episodes)} />
      <Parted first={first} second={second} />
      <Comparison label="Where the time went" heads={heads} rows={timesOf([first.spans, second.spans])} />
    </>
  );
}

function Comparison({ label, heads, rows }: { label: string; heads: Pair<string>; rows: readonly Row[] }) {
  return (
    <section aria-label={label}>
      <h2>{label}</h2>
      <div class="scroll-x" tabIndex={0} role="region" aria-label={`Table: ${label}`}>
        <table class="compare pair">
          <thead>
            <tr>
              <td />
              {heads.map((id, index) => (
                <th scope="col" key={index}>
                  {index === 0 ? "A" : "B"} <Link to={pathOf("episodes", id)}><SafeLine text={id} /></Link>
                </th>
              ))}
              <th scope="col">Differs</th>
            </tr>
          </thead>
          <tbody>
            {rows.map(({ name, values, shown, numeric }) => (
              <tr key={name}>
                <th scope="row"><SafeLine text={name} /></th>
                {values.map((value, index) => (
                  <td key={index} class={numeric ? "numeric" : ""}>
                    {shown?.[index] ?? <SafeLine text={value} longest={400} />}
                  </td>
                ))}
                <td>{values[0] === values[1] ? <span class="calm">=</span> : "≠"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function factsOf(pair: Pair<Episode>): Row[] {
  const text = (name: string, of: (episode: Episode) => string | null | undefined): Row => ({
    name,
    values: [of(pair[0]) ?? "–", of(pair[1]) ?? "–"],
  });
  const number = (name: string, of: (episode: Episode) => string): Row => ({ ...text(name, of), numeric: true });
  const versions = (episode: Episode): string => Object.keys(episode.stats?.weight_versions ?? {}).join(", ") || "–";
  const breaks = (episode: Episode): string =>
    Object.entries(episode.stats?.breaks ?? {}).filter(([reason]) => reason !== NEW_CONVERSATION).map(([reason, times]) => `${reason.replaceAll("_", " ")}: ${times}`).join(", ") || "none";
  const trained = ({ stats }: Episode): string =>
    stats?.sampled_tokens ? `${count(stats.trained_tokens)} (${share(stats.trained_tokens / stats.sampled_tokens)})` : "–";
  return [
    {
      ...text("Status", (each) => each.status),
      shown: [<StatusBadge status={pair[0].status} />, <StatusBadge status={pair[1].status} />],
    },
    text("Why", (each) => each.why),
    text("Error", (each) => each.error?.type),
    text("Task", (each) => each.task.id ?? each.task.instruction?.split("\n", 1)[0]),
    text("Agent", (each) => each.agent),
    text("Group", (each) => each.group_id),
    text("Run", (each) => each.run_id),
    number("Step", (each) => count(each.train_step)),
    text("Weight versions", versions),
    number("Turns", (each) => count(each.stats?.turns)),
    number("Roots", (each) => count(each.stats?.roots)),
    number("Branches", (each) => count(each.stats?.branches)),
    number("Sampled tokens", (each) => count(each.stats?.sampled_tokens)),
    number("Trained tokens", trained),
    text("Breaks", breaks),
    number("Further conversations", (each) => count(each.stats?.breaks?.[NEW_CONVERSATION] ?? 0)),
    number("Took", (each) => seconds(each.timings.ended_s)),
    text("Created", (each) => time(each.timings.created_at)),
  ];
}

function rewardsOf(pair: Pair<Episode>): Row[] {
  const [a, b] = [pair[0].reward_components ?? {}, pair[1].reward_components ?? {}];
  const names = [...new Set([...Object.keys(a), ...Object.keys(b)])];
  return [
    { name: "Reward", values: [reward(pair[0].reward), reward(pair[1].reward)], numeric: true },
    ...names.map((name): Row => ({ name: `Part: ${name}`, values: [reward(a[name]), reward(b[name])], numeric: true })),
  ];
}

/** Sums of the spans by kind. Spans of one kind may lie in one another or run at once. */
function timesOf(pair: Pair<Spans>): Row[] {
  const sums = pair.map((report) => {
    const found = new Map<string, { times: number; seconds: number }>();
    for (const span of report.spans) {
      const before = found.get(span.kind) ?? { times: 0, seconds: 0 };
      const lasted = (span.end_s ?? span.start_s) - span.start_s;
      found.set(span.kind, { times: before.times + 1, seconds: before.seconds + lasted });
    }
    return found;
  });
  const kinds = [...new Set(sums.flatMap((each) => [...each.keys()]))];
  const said = (kind: string, side: number): string => {
    const sum = sums[side]?.get(kind);
    return sum ? `${seconds(sum.seconds)} in ${count(sum.times)}` : "–";
  };
  return kinds.map((kind) => ({ name: kind.replaceAll("_", " "), values: [said(kind, 0), said(kind, 1)], numeric: true }));
}

function Parted({ first, second }: { first: Side; second: Side }) {
  const parting = partingOf(first.turns, second.turns);
  const turns = (n: number): string => `${count(n)} ${n === 1 ? "turn" : "turns"}`;
  return (
    <section aria-labelledby="parting">
      <h2 id="parting">Where they part</h2>
      {parting.first === null && parting.second === null ? (
        <p>All {turns(parting.equal)} have the same messages.</p>
      ) : (
        <>
          <p>
            {parting.equal ? `The first ${turns(parting.equal)} have the same messages. ` : "They differ from the first turn on. "}
            {parting.first === null && "A ends there, and B goes on. "}
            {parting.second === null && "B ends there, and A goes on. "}
            Then, from A (−) to B (+):
          </p>
          <TextDiff
            before={parting.first ? textOf(parting.first) : ""}
            after={parting.second ? textOf(parting.second) : ""}
            label={`Turn ${parting.equal}: from A to B`}
          />
        </>
      )}
    </section>
  );
}
