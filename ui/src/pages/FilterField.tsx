/** One condition of a list, as a field whose value is in the address under the API's own name. */

import type { TargetedEvent } from "preact";
import { visibleLine } from "../text/visible";

export interface Field {
  readonly name: string;
  readonly label: string;
  readonly kind: "text" | "number" | "time" | "choice";
  /** Of a choice: the API's value and what is said for it, where that is another word. */
  readonly values?: readonly (readonly [string, string?])[];
}

export const YES_NO = [["true", "yes"], ["false", "no"]] as const;

interface FieldViewProps {
  field: Field;
  query: URLSearchParams;
  set: (name: string, value: string) => void;
  /** What `/` goes to. */
  first?: boolean;
}

export function FieldView({ field: { name, label, kind, values = [] }, query, set, first = false }: FieldViewProps) {
  const value = query.get(name) ?? "";
  if (kind === "choice") {
    return (
      <label>
        {label}
        <select value={value} onChange={(event) => set(name, event.currentTarget.value)}>
          <option value="">all</option>
          {values.map(([each, said]) => <option key={each} value={each}>{said ?? each}</option>)}
          {value && !values.some(([each]) => each === value) && <option value={value}>{visibleLine(value, 40)}</option>}
        </select>
      </label>
    );
  }
  if (kind === "time") {
    return (
      <label>
        {label}
        <input
          type="datetime-local"
          step={1}
          value={localTime(value)}
          onChange={(event) => set(name, unixTime(event.currentTarget.value))}
        />
      </label>
    );
  }
  const shared = {
    value,
    onChange: (event: TargetedEvent<HTMLInputElement>) => set(name, event.currentTarget.value.trim()),
  };
  return (
    <label>
      {label}
      {kind === "number" ? (
        <input type="number" step="any" class="short" {...shared} />
      ) : (
        <input type="text" size={14} data-search={first || undefined} {...shared} />
      )}
    </label>
  );
}

/** Unix seconds of a local date and time; empty for none. */
function unixTime(local: string): string {
  const ms = new Date(local).getTime();
  return Number.isNaN(ms) ? "" : String(ms / 1000);
}

function localTime(unix: string): string {
  const ms = Number(unix) * 1000;
  const at = new Date(ms - new Date(ms).getTimezoneOffset() * 60_000);
  return unix === "" || Number.isNaN(at.getTime()) ? "" : at.toISOString().slice(0, 19);
}
