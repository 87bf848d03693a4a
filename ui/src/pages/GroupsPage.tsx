/** The groups of a run, or of the server: their rewards, and which of them give no signal. */

import { useMemo } from "preact/hooks";
import { type Answer, get } from "../api/client";
import { Badge } from "../components/Badge";
import { SafeLine } from "../components/SafeText";
import { type Column, type Sort, VirtualTable } from "../components/VirtualTable";
import { Link, navigate, pathOf, useLocation } from "../router";
import { count, reward, time } from "../text/format";
import { ShowChanges, useChanges } from "./Changes";
import { type Field, FieldView, YES_NO } from "./FilterField";
import { TaskName } from "./TaskName";

type GroupRow = Answer<"/groups">["groups"][number];

const PATH = "/groups";
const FIELDS: readonly Field[] = [
  { name: "run_id", label: "Run", kind: "text" },
  { name: "task", label: "Task", kind: "text" },
  { name: "train_step", label: "Step", kind: "number" },
  { name: "tag", label: "Tag", kind: "text" },
  { name: "signal", label: "Signal", kind: "choice", values: YES_NO },
];

/** What can be sorted by is named as `sort` of the API is. */
const COLUMNS: readonly Column<GroupRow>[] = [
  {
    id: "group",
    title: "Group",
    width: 8.5,
    grow: 1,
    sortable: true,
    cell: (row) => <Link to={pathOf("groups", row.group_id)}><SafeLine text={row.group_id} /></Link>,
  },
  { id: "task", title: "Task", width: 9.5, grow: 3, sortable: true, cell: (row) => <TaskName of={row} /> },
  { id: "signal", title: "Signal", width: 6.5, sortable: true, cell: (row) => <Signal row={row} /> },
  { id: "reward", title: "Mean reward", width: 8.2, numeric: true, sortable: true, cell: (row) => reward(row.reward_mean) },
  { id: "spread", title: "Deviation", width: 6.8, numeric: true, sortable: true, cell: (row) => reward(row.reward_std) },
  {
    id: "range",
    title: "Range",
    width: 5.5,
    numeric: true,
    cell: (row) => `${reward(row.reward_min)} … ${reward(row.reward_max)}`,
  },
  { id: "graded", title: "Graded", width: 5.6, numeric: true, sortable: true, cell: (row) => count(row.graded) },
  {
    id: "rollouts",
    title: "Rollouts",
    width: 6.6,
    numeric: true,
    sortable: true,
    cell: (row) => `${count(row.rollouts)}${row.ended < row.rollouts ? `, ${count(row.rollouts - row.ended)} run` : ""}`,
  },
  { id: "run", title: "Run", width: 6.5, grow: 1, cell: (row) => <SafeLine text={row.run_id ?? ""} /> },
  { id: "step", title: "Step", width: 4, numeric: true, sortable: true, cell: (row) => count(row.train_step) },
  { id: "created", title: "Newest rollout", width: 11.6, sortable: true, cell: (row) => time(row.created_at) },
];

export function GroupsPage() {
  const { query } = useLocation();
  const changes = useChanges();
  const sort: Sort = { by: query.get("sort") ?? "created", order: query.get("order") === "asc" ? "asc" : "desc" };
  const conditions = FIELDS.map(({ name }) => [name, query.get(name)] as const);
  const load = useMemo(
    () => async (offset: number, limit: number, signal: AbortSignal) => {
      const asked = { ...Object.fromEntries(conditions), sort: sort.by, order: sort.order, offset, limit };
      const { groups, total } = await get(PATH, { query: asked }, signal);
      return { rows: groups, total };
    },
    [JSON.stringify([sort, conditions]), changes.version],
  );
  const set = (values: Readonly<Record<string, string>>): void => {
    const next = new URLSearchParams(query);
    for (const [name, value] of Object.entries(values)) {
      if (value) next.set(name, value);
      else next.delete(name);
    }
    navigate(PATH, next, { replace: true });
  };
  // Kept, so that an event that comes in does not undo what is being typed.
  const filters = useMemo(
    () => (
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        {FIELDS.map((field, index) => (
          <FieldView key={field.name} field={field} query={query} set={(name, value) => set({ [name]: value })} first={index === 0} />
        ))}
      </form>
    ),
    [query],
  );
  return (
    <>
      <h1>Groups</h1>
      {filters}
      <div class="table-tools">
        <span class="calm">A group without signal has at least two rewards, all of them equal: it gives no gradient.</span>
        <ShowChanges of={changes} />
      </div>
      <VirtualTable
        label="Groups"
        columns={COLUMNS}
        rowKey={(row) => row.group_id}
        load={load}
        sort={sort}
        onSort={({ by, order }) => set({ sort: by, order })}
        onOpen={(row) => navigate(pathOf("groups", row.group_id))}
        empty="No group fits."
      />
    </>
  );
}

function Signal({ row: { signal, graded } }: { row: GroupRow }) {
  if (signal === null) return <span class="calm">{graded === 1 ? "one reward" : "no reward"}</span>;
  return <Badge tone={signal ? "good" : "warn"}>{signal ? "yes" : "none"}</Badge>;
}
