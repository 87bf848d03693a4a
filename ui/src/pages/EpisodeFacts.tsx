/** What an episode is and what became of it: the head of its page, and all else of its record. */

import { useState } from "preact/hooks";
import type { Answer } from "../api/client";
import { useLoaded } from "../api/hooks";
import { type EpisodeSummary, getSummaries } from "../api/looks";
import { StatusBadge } from "../components/Badge";
import { Facts } from "../components/Facts";
import { Fold } from "../components/Fold";
import { JsonView } from "../components/JsonView";
import { SafeLine, SafeText } from "../components/SafeText";
import { type BarPart, StackedBar } from "../components/StackedBar";
import { Await } from "../components/Status";
import { Link, pathOf } from "../router";
import { count, reward, seconds, share, time } from "../text/format";
import type { TurnTree } from "../text/turn_tree";

type Episode = Answer<"/episodes/{episode_id}">;

export function EpisodeHead({ episode, tree }: { episode: Episode; tree: TurnTree | null }) {
  const { stats, forked_from, group_id, run_id, rollout_id, episode_id } = episode;
  const instruction = episode.instruction ?? episode.task.instruction;
  const end = tree?.branches[0]?.turns.at(-1);
  return (
    <>
      {episode.why && <p class="why"><SafeLine text={episode.why} longest={400} /></p>}
      <Facts
        facts={[
          ["Status", <StatusBadge status={episode.status} />],
          ["Reward", reward(episode.reward)],
          ["Task", episode.task.id ? <SafeLine text={episode.task.id} /> : null],
          ["Agent", <SafeLine text={episode.agent} />],
          ["Run", run_id ? <Link to={pathOf("runs", run_id)}><SafeLine text={run_id} /></Link> : null],
          ["Step", episode.train_step ?? null],
          ["Lag", stepLag(episode)],
          ["Group", group_id ? <Link to={pathOf("groups", group_id)}><SafeLine text={group_id} /></Link> : null],
          ["Attempt", episode.attempt ? count(episode.attempt) : null],
          ["Forked from", forked_from ? <Origin {...forked_from} turn_id={forked_from.turn_id ?? null} /> : null],
          ["Hosted model", episode.upstream ? <SafeLine text={episode.upstream} /> : null],
          ["Turns", count(stats?.turns)],
          ["Trained", trainedOf(episode)],
          ["Took", seconds(episode.timings.ended_s)],
          ["Tokens", end && !episode.upstream ? <Link to={pathOf("episodes", episode_id, "tokens", end.turn_id)}>of the first path</Link> : null],
          ["Work folder", episode.replay ? <Link to={pathOf("episodes", episode_id, "replay")}>turn by turn</Link> : null],
        ]}
      />
      {episode.error && (
        <section class="error" aria-labelledby="error">
          <h2 id="error">Error: <SafeLine text={episode.error.type} /></h2>
          <p class="calm">{episode.error.fault ? `Fault: ${episode.error.fault}` : null}</p>
          <SafeText text={episode.error.message} />
          {episode.error.detail != null && <JsonView value={episode.error.detail} depth={0} />}
        </section>
      )}
      {instruction && <Fold summary="Instruction">{() => <SafeText text={instruction} limit={4_000} />}</Fold>}
      {group_id && (
        <Fold summary="Compare with another rollout of its group">
          {() => <Siblings episode_id={episode_id} group_id={group_id} rollout_id={rollout_id} />}
        </Fold>
      )}
    </>
  );
}

function Origin({ episode_id, turn_id }: { episode_id: string; turn_id: string | null }) {
  const query = new URLSearchParams(turn_id === null ? {} : { turn: turn_id });
  return (
    <Link to={pathOf("episodes", episode_id)} query={query}>
      <SafeLine text={episode_id} />{turn_id === null ? "" : ", after a turn"}
    </Link>
  );
}

const AT_ONCE = 50;

interface SiblingsProps {
  episode_id: string;
  group_id: string;
  rollout_id: string;
}

/** The other episodes of a group; earlier and later attempts at the same rollout say so. */
function Siblings({ episode_id, group_id, rollout_id }: SiblingsProps) {
  const [limit, setLimit] = useState(AT_ONCE);
  const page = useLoaded((signal) => getSummaries({ group_id, offset: 0, limit }, signal), [group_id, limit]);
  const said = (each: EpisodeSummary): string =>
    each.rollout_id === rollout_id ? `attempt ${count(each.attempt)} at the same rollout` : `reward ${reward(each.reward)}`;
  return (
    <Await of={page}>
      {({ summaries, total }) => (
        <>
          <ul class="siblings">
            {summaries.filter((each) => each.episode_id !== episode_id).map((each) => (
              <li key={each.episode_id}>
                <Link to={pathOf("compare", episode_id, each.episode_id)}><SafeLine text={each.episode_id} /></Link>{" "}
                <StatusBadge status={each.status} /> <small>{said(each)}</small>
              </li>
            ))}
          </ul>
          {summaries.length <= 1 && <p class="calm">There is no other.</p>}
          {(total ?? 0) > summaries.length && (
            <button type="button" onClick={() => setLimit(limit + 4 * AT_ONCE)}>{count((total ?? 0) - summaries.length)} more</button>
          )}
        </>
      )}
    </Await>
  );
}

/** All of the record that the head does not have. */
export function EpisodeDetails({ episode }: { episode: Episode }) {
  const { stats, limits, seconds: parts } = episode;
  const counts = (of: Readonly<Record<string, number>> | undefined): string | null => {
    const all = Object.entries(of ?? {}).map(([name, times]) => `${name.replaceAll("_", " ")}: ${count(times)}`);
    return all.join(", ") || null;
  };
  return (
    <>
      {parts && <StackedBar label="Where the time went" parts={partsOf(parts)} format={seconds} />}
      <Facts
        facts={[
          ["Created", time(episode.timings.created_at)],
          ["Rollout", <SafeLine text={episode.rollout_id} />],
          ["Tags", episode.tags?.length ? <SafeLine text={episode.tags.join(", ")} /> : null],
          ["Seed", episode.seed ?? null],
          ["Exit code", episode.agent_exit_code ?? null],
          ["Ended by", episode.ended_by ?? null],
          ["Sampled tokens", count(stats?.sampled_tokens)],
          ["By the hosted model's server", counts(stats?.upstream)],
          ["Not trained, tokens", counts(stats?.untrained)],
          ["Thrown away, tokens", counts(stats?.discarded)],
          ["Rendered again, tokens", count(stats?.rerendered_tokens)],
          ["Roots", count(stats?.roots)],
          ["Branches", count(stats?.branches)],
          ["Cosmetic differences", counts(stats?.cosmetic)],
          ["Calls not as they should be", counts(stats?.parse)],
          ["Tokens by weight version", counts(stats?.weight_versions)],
          ["Most turns", limits.max_turns === null ? null : count(limits.max_turns)],
        ]}
      />
      {episode.agent_output && (
        <Fold summary="The end of the agent's output" open>{() => <SafeText text={episode.agent_output ?? ""} />}</Fold>
      )}
      <Fold summary="The whole record">{() => <JsonView value={episode} />}</Fold>
    </>
  );
}

function trainedOf(episode: Episode): string {
  if (episode.upstream) return "nothing: a hosted model has no tokens here";
  const sampled = episode.stats?.sampled_tokens ?? 0;
  const trained = episode.stats?.trained_tokens ?? 0;
  return sampled ? `${count(trained)} of ${count(sampled)} tokens (${share(trained / sampled)})` : "–";
}

/** The age of its tokens when a training step took it. */
function stepLag({ trained }: Episode): string | null {
  if (!trained) return null;
  if (!trained.used) return `left out by step ${trained.step}`;
  return trained.lag === null ? null : `${reward(trained.lag)} versions at step ${trained.step}`;
}

function partsOf(of: NonNullable<Episode["seconds"]>): BarPart[] {
  return Object.entries(of).map(([name, value]) => ({ name, value: value ?? 0 }));
}
