/** One episode: its facts, its grade, and its conversation. */

import { useEffect } from "preact/hooks";
import type { Answer } from "../api/client";
import { changedEpisode } from "../api/events";
import { useEvents, useGet, useLoaded } from "../api/hooks";
import { getOutlines } from "../api/looks";
import { StatusBadge } from "../components/Badge";
import { Facts } from "../components/Facts";
import { Fold } from "../components/Fold";
import { JsonView } from "../components/JsonView";
import { SafeLine, SafeText } from "../components/SafeText";
import { type BarPart, StackedBar } from "../components/StackedBar";
import { Await } from "../components/Status";
import { Link, type Params, pathOf } from "../router";
import { count, reward, seconds, share, time } from "../text/format";
import { Conversation } from "./Conversation";

type Episode = Answer<"/episodes/{episode_id}">;

export function EpisodePage({ params }: { params: Params }) {
  const episode_id = params.id ?? "";
  const episode = useGet("/episodes/{episode_id}", { path: { episode_id } });
  const turns = useLoaded((signal) => getOutlines(episode_id, signal), [episode_id]);
  const reload = (): void => {
    episode.reload();
    turns.reload();
  };
  useEvents((event) => {
    if (changedEpisode(event) === episode_id) reload();
  }, reload);
  useEffect(() => document.getElementById("main")?.focus({ preventScroll: true }), []);
  return (
    <>
      <h1><SafeLine text={episode_id} /></h1>
      <Await of={episode}>{(found) => <Overview episode={found} />}</Await>
      <section aria-labelledby="conversation">
        <h2 id="conversation">Conversation</h2>
        <Await of={turns}>{(found) => <Conversation turns={found.turns} />}</Await>
      </section>
    </>
  );
}

function Overview({ episode }: { episode: Episode }) {
  const stats = episode.stats;
  const instruction = episode.instruction ?? episode.task.instruction;
  return (
    <>
      {episode.why && <p class="why"><SafeLine text={episode.why} longest={400} /></p>}
      <Facts
        facts={[
          ["Status", <StatusBadge status={episode.status} />],
          ["Reward", reward(episode.reward)],
          ["Task", episode.task.id ? <SafeLine text={episode.task.id} /> : null],
          ["Agent", <SafeLine text={episode.agent} />],
          ["Group", episode.group_id ? <GroupLink group={episode.group_id} /> : null],
          ["Attempt", episode.attempt ? count(episode.attempt) : null],
          ["Turns", count(stats?.turns)],
          ["Sampled tokens", count(stats?.sampled_tokens)],
          ["Trained", trainedShare(episode)],
          ["Created", time(episode.timings.created_at)],
          ["Took", seconds(episode.timings.ended_s)],
          ["Exit code", episode.agent_exit_code],
        ]}
      />
      {episode.error && (
        <section class="error" aria-labelledby="error">
          <h2 id="error">Error: <SafeLine text={episode.error.type} /></h2>
          <p class="calm">{episode.error.fault ? `Fault: ${episode.error.fault}` : null}</p>
          <SafeText text={episode.error.message} />
          {episode.error.detail != null && <JsonView value={episode.error.detail} />}
        </section>
      )}
      <StackedBar label="Time" parts={timesOf(episode)} format={seconds} />
      {instruction && (
        <Fold summary="Instruction" open>{() => <SafeText text={instruction} limit={2_000} />}</Fold>
      )}
      <section aria-labelledby="grade">
        <h2 id="grade">Grade</h2>
        {Object.keys(episode.grading ?? {}).length ? (
          <JsonView value={episode.grading} />
        ) : (
          <p class="calm">No grade.</p>
        )}
      </section>
      {episode.agent_output && (
        <Fold summary="The end of the agent's output">{() => <SafeText text={episode.agent_output ?? ""} />}</Fold>
      )}
      <Fold summary="The whole record">{() => <JsonView value={episode} />}</Fold>
    </>
  );
}

function GroupLink({ group }: { group: string }) {
  return <Link to={pathOf("groups", group)}><SafeLine text={group} /></Link>;
}

function trainedShare(episode: Episode): string {
  const sampled = episode.stats?.sampled_tokens ?? 0;
  const trained = episode.stats?.trained_tokens ?? 0;
  return sampled ? `${count(trained)} (${share(trained / sampled)})` : count(trained);
}

function timesOf(episode: Episode): BarPart[] {
  const { created_at, preparing_s, running_s, grading_s, ended_s } = episode.timings;
  const marks: readonly (readonly [string, number | null | undefined])[] = [
    ["queue", 0],
    ["set-up", preparing_s ?? running_s],
    ["agent", running_s],
    ["grading", grading_s],
    ["end", ended_s ?? Date.now() / 1000 - created_at],
  ];
  const reached = marks.filter((mark): mark is readonly [string, number] => typeof mark[1] === "number");
  return reached.slice(0, -1).map(([name, from], index) => ({ name, value: (reached[index + 1]?.[1] ?? from) - from }));
}
