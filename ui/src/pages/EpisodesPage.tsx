/** Many episodes: filtered and sorted by the server, shown in windows; two of them can be compared. */

import { useMemo } from "preact/hooks";
import { type EpisodesQuery, type EpisodeSummary, getSummaries } from "../api/looks";
import { StatusBadge } from "../components/Badge";
import { IdLink } from "../components/IdLink";
import { SafeLine } from "../components/SafeText";
import { type Column, type RowWindow, type Sort, VirtualTable } from "../components/VirtualTable";
import { Link, navigate, pathOf, useLocation } from "../router";
import { count, reward, seconds, share, time } from "../text/format";
import { visibleLine } from "../text/visible";
import { ShowChanges, useChanges } from "./Changes";
import { CONDITIONS, EpisodeFilters } from "./EpisodeFilters";
import { TaskName } from "./TaskName";

type Load = (offset: number, limit: number, signal: AbortSignal) => Promise<RowWindow<EpisodeSummary>>;

const NEWEST: Sort = { by: "created", order: "desc" };
const PICKED = "pick";
/** Longer than any episode's id that the server makes. */
const LONGEST_ID = 60;

/** What can be sorted by is named as `sort` of the API is. */
const COLUMNS: readonly Column<EpisodeSummary>[] = [
  {
    id: "episode",
    title: "Episode",
    width: 11,
    cell: (row) => <IdLink id={row.episode_id} to={pathOf("episodes", row.episode_id)} />,
  },
  { id: "status", title: "Status", width: 8, sortable: true, cell: (row) => <StatusBadge status={row.status} /> },
  { id: "reward", title: "Reward", width: 5.5, numeric: true, sortable: true, cell: (row) => reward(row.reward) },
  { id: "why", title: "Why", width: 20, grow: 3, cell: (row) => <SafeLine text={row.why} longest={300} /> },
  {
    id: "task",
    title: "Task",
    width: 10,
    grow: 1,
    sortable: true,
    cell: (row) => <TaskName of={row} />,
  },
  { id: "agent", title: "Agent", width: 7, sortable: true, cell: (row) => <SafeLine text={row.agent} /> },
  {
    id: "group",
    title: "Group",
    width: 8,
    sortable: true,
    cell: (row) => row.group_id && <Link to={pathOf("groups", row.group_id)}><SafeLine text={row.group_id} /></Link>,
  },
  { id: "run", title: "Run", width: 7, cell: (row) => <SafeLine text={row.run_id ?? ""} /> },
  { id: "step", title: "Step", width: 4.5, numeric: true, sortable: true, cell: (row) => count(row.train_step) },
  {
    id: "version",
    title: "Version",
    width: 6,
    sortable: true,
    cell: (row) => <><SafeLine text={row.weight_version ?? ""} />{row.weight_versions > 1 && ` +${row.weight_versions - 1}`}</>,
  },
  { id: "turns", title: "Turns", width: 5, numeric: true, sortable: true, cell: (row) => count(row.turns) },
  { id: "tokens", title: "Tokens", width: 5.5, numeric: true, sortable: true, cell: (row) => count(row.sampled_tokens) },
  {
    id: "trained",
    title: "Trained",
    width: 6,
    numeric: true,
    sortable: true,
    cell: (row) => share(row.sampled_tokens ? row.trained_tokens / row.sampled_tokens : null),
  },
  {
    id: "breaks",
    title: "Breaks",
    width: 5.5,
    numeric: true,
    sortable: true,
    cell: (row) => count(Object.values(row.breaks).reduce((sum, each) => sum + each, 0)),
  },
  { id: "seconds", title: "Took", width: 7, numeric: true, sortable: true, cell: (row) => seconds(row.ended_s) },
  { id: "created", title: "Created", width: 11.5, sortable: true, cell: (row) => time(row.created_at) },
];

export function EpisodesPage() {
  const { query } = useLocation();
  const changes = useChanges();
  const sort: Sort = {
    by: query.get("sort") ?? NEWEST.by,
    order: query.get("order") === "asc" ? "asc" : "desc",
  };
  const asked = JSON.stringify([sort, CONDITIONS.map((name) => [name, query.getAll(name)])]);
  const load = useMemo(() => loadRows(conditionsOf(query), sort), [asked, changes.version]);
  const picked = query.getAll(PICKED);
  const pick = (ids: readonly string[]): void => {
    const next = new URLSearchParams(query);
    next.delete(PICKED);
    for (const id of ids) next.append(PICKED, id);
    navigate("/episodes", next, { replace: true });
  };
  const columns = useMemo(() => [pickColumn(picked, pick), ...COLUMNS], [query]);
  const onSort = ({ by, order }: Sort): void => {
    const next = new URLSearchParams(query);
    next.set("sort", by);
    next.set("order", order);
    navigate("/episodes", next, { replace: true });
  };
  // Kept, so that an event that comes in does not undo what is being typed.
  const filters = useMemo(
    () => <EpisodeFilters query={query} onChange={(next) => navigate("/episodes", next, { replace: true })} />,
    [query],
  );
  return (
    <>
      <h1>Episodes</h1>
      {filters}
      <div class="table-tools">
        <Picked ids={picked} clear={() => pick([])} />
        <ShowChanges of={changes} />
      </div>
      <VirtualTable
        label="Episodes"
        columns={columns}
        rowKey={(row) => row.episode_id}
        load={load}
        sort={sort}
        onSort={onSort}
        onOpen={(row) => navigate(pathOf("episodes", row.episode_id))}
        empty="No episode fits."
      />
    </>
  );
}

function conditionsOf(query: URLSearchParams): EpisodesQuery {
  return Object.fromEntries(CONDITIONS.map((name) => [name, query.getAll(name)]));
}

/** Rows by offset. The newest first are those up to the newest when the list was begun: episodes that are made later
 * would move all others down, and some would be seen twice. */
function loadRows(conditions: EpisodesQuery, sort: Sort): Load {
  let newest: number | null = null;
  const pinned = sort.by === NEWEST.by && sort.order === NEWEST.order;
  return async (offset, limit, signal) => {
    if (pinned && newest === null && offset > 0) { // a table that comes back to its place begins in its middle
      const first = await getSummaries({ ...conditions, offset: 0, limit: 1 }, signal);
      newest = first.summaries[0]?.created_at ?? null;
    }
    const bound = newest === null ? {} : { created_before: newest };
    const asked = { ...conditions, ...bound, sort: sort.by, order: sort.order, offset, limit };
    const { summaries, total } = await getSummaries(asked, signal);
    if (pinned && offset === 0) newest ??= summaries[0]?.created_at ?? null;
    return { rows: summaries, total: total ?? summaries.length };
  };
}

function pickColumn(picked: readonly string[], pick: (ids: readonly string[]) => void): Column<EpisodeSummary> {
  return {
    id: PICKED,
    title: "Pick",
    width: 4,
    cell: ({ episode_id }) => (
      <input
        type="checkbox"
        aria-label={`Compare ${visibleLine(episode_id)}`}
        checked={picked.includes(episode_id)}
        onClick={(event) => event.stopPropagation()} // the row would be drawn again before it has changed
        onChange={(event) => {
          const others = picked.filter((each) => each !== episode_id);
          pick(event.currentTarget.checked ? [...others.slice(-1), episode_id] : others);
        }}
      />
    ),
  };
}

function Picked({ ids, clear }: { ids: readonly string[]; clear: () => void }) {
  const [first, second] = ids;
  if (first === undefined) return <span class="calm">Pick two episodes to compare them.</span>;
  return (
    <>
      <span><SafeLine text={ids.join(", ")} longest={2 * LONGEST_ID} /></span>
      {second === undefined ? (
        <span class="calm">Pick another one.</span>
      ) : (
        <Link to={pathOf("compare", first, second)}>Compare the two</Link>
      )}
      <button type="button" onClick={clear}>Pick none</button>
    </>
  );
}
