/** One episode: what became of it, its conversation beside its time, its grade, its breaks and its work. The address
 * says what is shown (`show`), the turn (`turn`) and the path (`path`). */

import { useEffect, useMemo, useRef } from "preact/hooks";
import type { Answer } from "../api/client";
import { changedEpisode } from "../api/events";
import { useFresh, useGet, useLoaded } from "../api/hooks";
import { getOutlines, type TurnOutline, type TurnOutlines } from "../api/looks";
import { SafeLine } from "../components/SafeText";
import { Await } from "../components/Status";
import { Link, navigate, type Params, useLocation } from "../router";
import { count, reward } from "../text/format";
import { namedBranch, namedTurn, pathOfBranch, treeOf } from "../text/turn_tree";
import { BreaksView, NEW_CONVERSATION } from "./BreaksView";
import { Conversation } from "./Conversation";
import { EpisodeDetails, EpisodeHead } from "./EpisodeFacts";
import { GradeView } from "./GradeView";
import { Timeline } from "./Timeline";
import { WorkView } from "./WorkView";

type Episode = Answer<"/episodes/{episode_id}">;

const SHOWS = ["conversation", "grade", "work", "breaks", "details"] as const;
type Show = (typeof SHOWS)[number];

export function EpisodePage({ params }: { params: Params }) {
  return <EpisodeOf key={params.id} episode_id={params.id ?? ""} />;
}

function EpisodeOf({ episode_id }: { episode_id: string }) {
  const episode = useGet("/episodes/{episode_id}", { path: { episode_id } });
  const outlines = useLoaded((signal) => getOutlines(episode_id, signal), [episode_id]);
  const spans = useGet("/episodes/{episode_id}/spans", { path: { episode_id } });
  const kept = useKept(outlines.data);
  const tree = useMemo(() => (kept ? treeOf(kept) : null), [kept]);
  const { path, query } = useLocation();
  const show = SHOWS.find((one) => one === query.get("show")) ?? "conversation";
  const running = episode.data !== null && typeof episode.data.timings.ended_s !== "number";
  const parts = [episode, outlines, spans];
  useFresh(
    {
      state: parts.some((part) => part.state === "loading") ? "loading" : "ok",
      reload: () => {
        for (const part of parts) part.reload();
      },
    },
    { concerns: (event) => changedEpisode(event) === episode_id, poll: running },
  );
  useEffect(() => document.getElementById("main")?.focus({ preventScroll: true }), []);
  const chosen = tree ? namedTurn(tree, query.get("turn")) : null;
  const branch = tree ? namedBranch(tree, query.get("path")) : null;
  const choose = (turn: TurnOutline): void => {
    const elsewhere = tree && branch && !pathOfBranch(tree, branch).includes(turn);
    navigate(path, changed({ turn: String(turn.seq), show: null, ...(elsewhere ? { path: null } : {}) }), { replace: true });
  };
  return (
    <>
      <h1><SafeLine text={episode_id} /></h1>
      <Await of={episode}>
        {(found) => (
          <>
            <EpisodeHead episode={found} tree={tree} />
            <Tabs episode={found} show={show} turns={tree?.turns.length} />
            {show === "grade" && <GradeView episode={found} tree={tree} queryOf={changed} />}
            {show === "work" && <WorkView episode={found} />}
            {show === "breaks" && <BreaksView episode_id={episode_id} total={breaksOf(found)} tree={tree} />}
            {show === "details" && <EpisodeDetails episode={found} />}
          </>
        )}
      </Await>
      {show === "conversation" && (
        <>
          <Await of={spans}>
            {(report) => (
              <Timeline report={report} tree={tree} chosen={chosen} running={running} onChoose={choose} />
            )}
          </Await>
          <section aria-labelledby="conversation">
            <h2 id="conversation">Conversation</h2>
            <Await of={outlines}>
              {() =>
                tree && (
                  <Conversation tree={tree} branch={branch} chosen={chosen} onChoose={choose} queryOf={changed} />
                )
              }
            </Await>
          </section>
        </>
      )}
    </>
  );
}

/** The address of now with some of its values changed; null takes one away. */
function changed(changes: Readonly<Record<string, string | null>>): URLSearchParams {
  const next = new URLSearchParams(window.location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) next.delete(name);
    else next.set(name, value);
  }
  return next;
}

/** The turns as they came first: what is known of a turn already is the same object, and is not drawn again. */
function useKept(given: TurnOutlines | null): TurnOutlines | null {
  const known = useRef(new Map<string, TurnOutline>());
  return useMemo(() => {
    if (!given) return null;
    const turns = given.turns.map((turn) => {
      const before = known.current.get(turn.turn_id);
      if (before && before.untrained_reason === turn.untrained_reason) return before;
      known.current.set(turn.turn_id, turn);
      return turn;
    });
    return { ...given, turns };
  }, [given]);
}

/** A further conversation, of a sub-agent or a side call, is none. */
function breaksOf(episode: Episode): number {
  return Object.entries(episode.stats?.breaks ?? {}).reduce((sum, [reason, times]) => sum + (reason === NEW_CONVERSATION ? 0 : times), 0);
}

function Tabs({ episode, show, turns }: { episode: Episode; show: Show; turns: number | undefined }) {
  const { path } = useLocation();
  const titles: Readonly<Record<Show, string>> = {
    conversation: turns === undefined ? "Conversation" : `Conversation (${count(turns)})`,
    grade: typeof episode.reward === "number" ? `Grade: reward ${reward(episode.reward)}` : "Grade",
    work: "Work",
    breaks: `Breaks (${count(breaksOf(episode))})`,
    details: "Details",
  };
  return (
    <nav class="tabs" aria-label="Parts of the episode">
      {SHOWS.map((one) => (
        <Link
          key={one}
          to={path}
          query={changed({ show: one === "conversation" ? null : one })}
          replace
          {...(one === show ? { "aria-current": "page" as const } : {})}
        >
          {titles[one]}
        </Link>
      ))}
    </nav>
  );
}
