/** Episodes, newest first. */

import { useMemo, useState } from "preact/hooks";
import { type Answer, get } from "../api/client";
import { cursorRows } from "../api/cursor_rows";
import { useEvents } from "../api/hooks";
import { StatusBadge } from "../components/Badge";
import { SafeLine } from "../components/SafeText";
import { type Column, VirtualTable } from "../components/VirtualTable";
import { Link, navigate, pathOf, useLocation } from "../router";
import { count, reward, seconds, time } from "../text/format";

type Episode = Answer<"/episodes/{episode_id}">;

const PAGE = 200;
const STATUSES = [
  "queued", "preparing", "running", "grading", "completed", "failed", "cancelled", "timed_out", "truncated",
] as const;

const COLUMNS: readonly Column<Episode>[] = [
  {
    id: "episode",
    title: "Episode",
    width: 22,
    cell: (episode) => <Link to={pathOf("episodes", episode.episode_id)}>{episode.episode_id}</Link>,
  },
  { id: "status", title: "Status", width: 8.5, cell: (episode) => <StatusBadge status={episode.status} /> },
  { id: "task", title: "Task", width: 10, grow: 2, cell: (episode) => <SafeLine text={taskOf(episode)} /> },
  { id: "agent", title: "Agent", width: 8, cell: (episode) => <SafeLine text={episode.agent} /> },
  { id: "group", title: "Group", width: 8, cell: (episode) => <SafeLine text={episode.group_id ?? ""} /> },
  { id: "reward", title: "Reward", width: 6, numeric: true, cell: (episode) => reward(episode.reward) },
  { id: "turns", title: "Turns", width: 5, numeric: true, cell: (episode) => count(episode.stats?.turns) },
  {
    id: "trained",
    title: "Trained",
    width: 6,
    numeric: true,
    cell: (episode) => count(episode.stats?.trained_tokens),
  },
  { id: "took", title: "Took", width: 6, numeric: true, cell: (episode) => seconds(episode.timings.ended_s) },
  { id: "created", title: "Created", width: 12, cell: (episode) => time(episode.timings.created_at) },
];

function taskOf(episode: Episode): string {
  return episode.task.id ?? episode.task.instruction?.split("\n", 1)[0] ?? "";
}

export function EpisodesPage() {
  const { query } = useLocation();
  const status = STATUSES.find((each) => each === query.get("status")) ?? null;
  const group = query.get("group_id") ?? "";
  const [version, setVersion] = useState(0);
  const [changes, setChanges] = useState(0);
  useEvents(
    (event) => event.type === "episode" && setChanges((before) => before + 1),
    () => setChanges((before) => before + 1),
  );
  const load = useMemo(
    () => cursorRows<Episode>(async (cursor, signal) => {
      const asked = { status, group_id: group || null, cursor, limit: PAGE };
      const page = await get("/episodes", { query: asked }, signal);
      if (!("episodes" in page)) throw new Error("the server answered with rows");
      return { rows: page.episodes, cursor: page.cursor ?? null };
    }),
    [status, group, version],
  );
  const filter = (name: string, value: string): void => {
    const next = new URLSearchParams(query);
    if (value) next.set(name, value);
    else next.delete(name);
    navigate("/episodes", next, { replace: true });
  };
  const again = (): void => {
    setChanges(0);
    setVersion((before) => before + 1);
  };
  return (
    <>
      <h1>Episodes</h1>
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <label>
          Group
          <input
            data-search
            type="search"
            value={group}
            onChange={(event) => filter("group_id", event.currentTarget.value.trim())}
          />
        </label>
        <label>
          Status
          <select value={status ?? ""} onChange={(event) => filter("status", event.currentTarget.value)}>
            <option value="">all</option>
            {STATUSES.map((each) => <option key={each} value={each}>{each.replaceAll("_", " ")}</option>)}
          </select>
        </label>
        {changes > 0 && (
          <button type="button" onClick={again}>Show {count(changes)} {changes === 1 ? "change" : "changes"}</button>
        )}
      </form>
      <VirtualTable
        label="Episodes"
        columns={COLUMNS}
        rowKey={(episode) => episode.episode_id}
        load={load}
        onOpen={(episode) => navigate(pathOf("episodes", episode.episode_id))}
        empty="No episode fits."
      />
    </>
  );
}
