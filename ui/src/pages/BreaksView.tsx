/** Every break of an episode: what was known, and what came instead, as a diff. */

import { useEffect, useState } from "preact/hooks";
import { get } from "../api/client";
import { asApiError } from "../api/hooks";
import type { BreakEntry } from "../api/looks";
import { Badge } from "../components/Badge";
import { TextDiff } from "../components/Diff";
import { SafeLine, SafeText } from "../components/SafeText";
import { ErrorBox } from "../components/Status";
import { Link, pathOf } from "../router";
import { count } from "../text/format";
import { nearDifference } from "../text/near_difference";
import { linesOf } from "../text/parting";
import type { TurnTree } from "../text/turn_tree";

/** The reason of a call that began a conversation beside the first one. */
export const NEW_CONVERSATION = "new_conversation";

interface Pages {
  readonly breaks: readonly BreakEntry[];
  readonly total: number;
}

/** ``total``: as the record of the episode has it; when it grows, the further ones are asked for. */
export function BreaksView({ episode_id, total, tree }: { episode_id: string; total: number; tree: TurnTree | null }) {
  const [pages, setPages] = useState<Pages | null>(null);
  const [error, setError] = useState<ReturnType<typeof asApiError> | null>(null);
  const [wanted, setWanted] = useState(0);
  const offset = pages?.breaks.length ?? 0;
  useEffect(() => {
    const abort = new AbortController();
    setError(null);
    get("/episodes/{episode_id}/breaks", { path: { episode_id }, query: { offset } }, abort.signal).then(
      (page) => setPages((before) => ({ breaks: [...(before?.breaks ?? []).slice(0, offset), ...page.breaks], total: page.total })),
      (reason: unknown) => abort.signal.aborted || setError(asApiError(reason)),
    );
    return () => abort.abort();
  }, [episode_id, wanted, total]);
  return (
    <section aria-labelledby="breaks">
      <h2 id="breaks">Breaks</h2>
      {error && <ErrorBox error={error} retry={() => setWanted(wanted + 1)} />}
      {!pages && !error && <p role="status">Loading…</p>}
      {pages?.total === 0 && <p class="calm">Every call continued what the model had been fed.</p>}
      {pages?.breaks.some(({ reason }) => reason === NEW_CONVERSATION) && (
        <p class="calm">A new conversation, of a sub-agent or a side call, loses nothing and is counted as no break.</p>
      )}
      {pages?.breaks.map((entry) => <BreakView key={entry.turn_id} episode_id={episode_id} entry={entry} tree={tree} />)}
      {pages && pages.total > pages.breaks.length && (
        <button type="button" onClick={() => setWanted(wanted + 1)}>{count(pages.total - pages.breaks.length)} more</button>
      )}
    </section>
  );
}

function BreakView({ episode_id, entry, tree }: { episode_id: string; entry: BreakEntry; tree: TurnTree | null }) {
  const { seq, reason, at, known, incoming, known_turn_id } = entry;
  const page = pathOf("episodes", episode_id);
  const nearest = known_turn_id ? tree?.byId.get(known_turn_id) : undefined;
  const alone = known && incoming ? null : (known ?? incoming);
  return (
    <article class="break" aria-label={`Break at turn ${seq}`}>
      <h3>
        <Link to={page} query={new URLSearchParams({ turn: String(seq) })}>Turn {seq}</Link>{" "}
        <Badge tone={reason === NEW_CONVERSATION ? "calm" : "warn"}>{reason.replaceAll("_", " ")}</Badge>
      </h3>
      <p class="calm">
        {at && <>Message {count(at.message)} of the call{at.path && <>, at <SafeLine text={at.path} /></>}{at.kind && <> (<SafeLine text={at.kind} />)</>}. </>}
        {known_turn_id && (
          <>
            It agrees for longest with the path of{" "}
            {nearest ? (
              <Link to={page} query={new URLSearchParams({ turn: String(nearest.seq) })}>turn {nearest.seq}</Link>
            ) : (
              "a turn of another episode"
            )}
            .{" "}
          </>
        )}
        {known && !incoming && "The call ends before this message, which would have come next:"}
        {!known && incoming && "The known path ends before this message:"}
        {!known && !incoming && "It has no place in the messages."}
      </p>
      {known && incoming && <Differs before={linesOf(known)} after={linesOf(incoming)} seq={seq} />}
      {alone && <SafeText text={linesOf(alone)} limit={2_000} />}
    </article>
  );
}

function Differs({ before, after, seq }: { before: string; after: string; seq: number }) {
  if (before === after) return <p class="calm">Both messages read the same: they differ in what is not shown, such as ids.</p>;
  const [known, incoming] = nearDifference(before, after);
  return <TextDiff before={known} after={incoming} label={`Turn ${seq}: from what was known to what came`} context={3} />;
}
