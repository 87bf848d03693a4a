/** Any JSON as a tree that opens level by level. */

import { useState } from "preact/hooks";
import { count } from "../text/format";
import { Fold } from "./Fold";
import { SafeLine, SafeText } from "./SafeText";

const AT_ONCE = 100;

/** ``depth``: how many levels are open at first. */
export function JsonView({ value, depth = 1 }: { value: unknown; depth?: number }) {
  if (typeof value === "string") return <SafeText text={value} />;
  if (value === null || typeof value !== "object") return <code class="json">{String(value)}</code>;
  const entries = Array.isArray(value) ? value.map((item, index) => [String(index), item] as const) : Object.entries(value);
  if (entries.length === 0) return <code class="json">{Array.isArray(value) ? "[]" : "{}"}</code>;
  return <Entries entries={entries} depth={depth} />;
}

function Entries({ entries, depth }: { entries: readonly (readonly [string, unknown])[]; depth: number }) {
  const [shown, setShown] = useState(AT_ONCE);
  return (
    <ul class="json">
      {entries.slice(0, shown).map(([name, item]) => (
        <li key={name}>
          <Entry name={name} value={item} depth={depth} />
        </li>
      ))}
      {entries.length > shown && (
        <li>
          <button type="button" onClick={() => setShown(shown + 10 * AT_ONCE)}>
            {count(entries.length - shown)} more
          </button>
        </li>
      )}
    </ul>
  );
}

function Entry({ name, value, depth }: { name: string; value: unknown; depth: number }) {
  const label = <span class="json-name"><SafeLine text={name} /></span>;
  const nested = value !== null && typeof value === "object" && Object.keys(value).length > 0;
  const long = typeof value === "string" && (value.length > 80 || value.includes("\n"));
  if (!nested && !long) {
    return <>{label}: {typeof value === "string" ? <SafeText inline text={value} /> : <JsonView value={value} />}</>;
  }
  const size = typeof value === "string" ? `${count(value.length)} characters` : `${count(Object.keys(value as object).length)} entries`;
  return (
    <Fold summary={<>{label} <small>{size}</small></>} open={depth > 1 || (depth > 0 && long)}>
      {() => <JsonView value={value} depth={depth - 1} />}
    </Fold>
  );
}
