/** The conditions of `GET /episodes`, as fields whose values are in the address under the API's own names. */

import { useState } from "preact/hooks";
import { Badge } from "../components/Badge";
import { Fold } from "../components/Fold";
import { visibleLine } from "../text/visible";
import { type Field, FieldView, YES_NO } from "./FilterField";

const FIRST: readonly Field[] = [
  {
    name: "status",
    label: "Status",
    kind: "choice",
    values: [
      ["queued"], ["preparing"], ["running"], ["grading"], ["completed"], ["failed"], ["cancelled"],
      ["timed_out", "timed out"], ["truncated"],
    ],
  },
  { name: "run_id", label: "Run", kind: "text" },
  { name: "task", label: "Task", kind: "text" },
  { name: "group_id", label: "Group", kind: "text" },
  { name: "reward_min", label: "Reward from", kind: "number" },
  { name: "reward_max", label: "Reward to", kind: "number" },
];

const FURTHER: readonly Field[] = [
  { name: "train_step", label: "Step", kind: "number" },
  { name: "tag", label: "Tag", kind: "text" },
  { name: "agent", label: "Agent", kind: "text" },
  { name: "version", label: "Weight version", kind: "text" },
  { name: "error_type", label: "Error", kind: "text" },
  {
    name: "fault",
    label: "Fault",
    kind: "choice",
    values: [["infrastructure"], ["agent"], ["task"], ["caller"], ["setup"]],
  },
  { name: "graded", label: "Graded", kind: "choice", values: YES_NO },
  {
    name: "breaks",
    label: "Breaks",
    kind: "choice",
    values: [
      ["any"], ["new_conversation", "new conversation"], ["system_changed", "system changed"],
      ["history_edited", "history edited"], ["reply_edited", "reply edited"],
      ["history_truncated", "history truncated"], ["tools_changed", "tools changed"],
      ["thinking_stripped", "thinking stripped"], ["renderer_cannot_continue", "renderer cannot continue"],
    ],
  },
  { name: "stale", label: "Stale", kind: "choice", values: YES_NO },
  { name: "min_turns", label: "Turns from", kind: "number" },
  { name: "created_after", label: "Created from", kind: "time" },
  { name: "created_before", label: "Created to", kind: "time" },
];

const REPEATED = "metadata";
const TEXT = "text";

/** The names of all conditions, as the API has them. */
export const CONDITIONS: readonly string[] = [TEXT, ...[...FIRST, ...FURTHER].map(({ name }) => name), REPEATED];

interface EpisodeFiltersProps {
  query: URLSearchParams;
  /** The whole query as it is to be. */
  onChange: (next: URLSearchParams) => void;
}

export function EpisodeFilters({ query, onChange }: EpisodeFiltersProps) {
  const set = (name: string, value: string): void => {
    const next = new URLSearchParams(query);
    if (value) next.set(name, value);
    else next.delete(name);
    onChange(next);
  };
  const setMetadata = (values: readonly string[]): void => {
    const next = new URLSearchParams(query);
    next.delete(REPEATED);
    for (const value of new Set(values)) next.append(REPEATED, value);
    onChange(next);
  };
  const clear = (): void => {
    const next = new URLSearchParams(query);
    for (const name of CONDITIONS) next.delete(name);
    onChange(next);
  };
  const metadata = [...new Set(query.getAll(REPEATED))];
  const hidden = FURTHER.filter(({ name }) => query.has(name)).length + metadata.length;
  const [open] = useState(hidden > 0); // from then on it is the reader's
  return (
    <form class="episode-filters" role="search" onSubmit={(event) => event.preventDefault()}>
      <div class="filters">
        <label>
          Text
          <input
            data-search
            type="search"
            placeholder="id, run, task, title, group, agent, error"
            size={34}
            maxLength={200}
            value={query.get(TEXT) ?? ""}
            onChange={(event) => set(TEXT, event.currentTarget.value.trim())}
          />
        </label>
        {FIRST.map((field) => <FieldView key={field.name} field={field} query={query} set={set} />)}
        {CONDITIONS.some((name) => query.has(name)) && (
          <button type="button" onClick={clear}>Clear filters</button>
        )}
      </div>
      <Fold
        summary={<>More filters {hidden > 0 && <Badge tone="busy">{`${hidden} in use`}</Badge>}</>}
        open={open}
      >
        {() => (
          <div class="filters">
            {FURTHER.map((field) => <FieldView key={field.name} field={field} query={query} set={set} />)}
            <label>
              Metadata
              <input
                type="text"
                placeholder="KEY=VALUE"
                value=""
                onChange={(event) => {
                  const given = event.currentTarget.value.trim();
                  event.currentTarget.value = "";
                  if (given) setMetadata([...metadata, given]);
                }}
              />
            </label>
            {metadata.map((each) => (
              <button
                type="button"
                key={each}
                aria-label={`Without the condition ${visibleLine(each, 60)}`}
                onClick={() => setMetadata(metadata.filter((other) => other !== each))}
              >
                {visibleLine(each, 60)} <span aria-hidden="true">✕</span>
              </button>
            ))}
          </div>
        )}
      </Fold>
    </form>
  );
}
