/** A status as a word with a sign: never by colour alone. */

export type Tone = "good" | "bad" | "warn" | "busy" | "calm";

const SIGNS: Readonly<Record<Tone, string>> = { good: "✓", bad: "✗", warn: "!", busy: "…", calm: "·" };

const STATUS: Readonly<Record<string, Tone>> = {
  queued: "calm",
  preparing: "busy",
  running: "busy",
  grading: "busy",
  completed: "good",
  failed: "bad",
  cancelled: "calm",
  timed_out: "warn",
  truncated: "warn",
};

export function Badge({ tone, children }: { tone: Tone; children: string }) {
  return (
    <span class={`badge ${tone}`}>
      <span aria-hidden="true">{SIGNS[tone]}</span> {children}
    </span>
  );
}

/** The status of an episode. */
export function StatusBadge({ status }: { status: string }) {
  return <Badge tone={STATUS[status] ?? "calm"}>{status.replaceAll("_", " ")}</Badge>;
}
