/** All tokens of a sample: the path from the root to a turn. The address says the colour, the token and the search. */

import { useEffect, useMemo, useState } from "preact/hooks";
import { urlOf, request } from "../api/client";
import { asApiError, useLoaded } from "../api/hooks";
import { getOutlines, type TurnOutline } from "../api/looks";
import type { components } from "../api/schema";
import { type Token, type TokenWindow, useTokenPages } from "../api/token_pages";
import { Facts } from "../components/Facts";
import { SafeLine } from "../components/SafeText";
import { ErrorBox } from "../components/Status";
import { navigate, type Params, pathOf, useLocation } from "../router";
import { count } from "../text/format";
import { visibleLine } from "../text/visible";
import { TokenFind } from "./TokenFind";
import { type Look, shownText, TokenLines } from "./TokenLines";
import { trainedOf, TrainedTurns } from "./TrainedTurns";
import { type Colour, COLOURS, type Distances, legendOf, stepOf, TITLES } from "./token_colours";

type AuditReport = components["schemas"]["AuditReport"];

export function TokensPage({ params }: { params: Params }) {
  // Another path is another page: nothing of the one before stays.
  return <Tokens key={`${params.id} ${params.turn}`} episode_id={params.id ?? ""} turn_id={params.turn ?? ""} />;
}

function Tokens({ episode_id, turn_id }: { episode_id: string; turn_id: string }) {
  const { path, query } = useLocation();
  const [range, setRange] = useState<readonly [number, number]>([0, 1]);
  const [hovered, setHovered] = useState<number | null>(null);
  const [found, setFound] = useState<{ start: number; end: number } | null>(null);
  const [report, setReport] = useState<AuditReport | null>(null);
  const pages = useTokenPages(episode_id, turn_id, range[0], range[1]);
  const turns = useLoaded((signal) => getOutlines(episode_id, signal), [episode_id]);
  const { head, tokenAt } = pages;
  const colour = COLOURS.find((one) => one === query.get("colour")) ?? "mask";
  const given = query.get("at");
  const named = head && given !== null && /^\d{1,9}$/.test(given) && Number(given) < head.total ? Number(given) : null;
  // Most of a path is its prompt: without a token of the address, what is trained of it is shown.
  const at = named ?? (head && !query.get("find") ? (trainedOf(head)[0]?.start ?? null) : null);
  const distances: Distances = useMemo(
    () => new Map((report?.turns ?? []).flatMap((one) => distanceOf(one).map((far) => [one.turn_id, far] as const))),
    [report],
  );
  const audited = useMemo(() => [...distances.values()].join(" "), [distances]);
  const look: Look = {
    key: `${colour} ${audited}`,
    step: (token) => (head ? stepOf(colour, token, head, distances) : null),
    words: (token) => wordsOf(token, head, colour, distances),
  };
  const go = (changes: Readonly<Record<string, string | null>>): void => {
    const next = new URLSearchParams(window.location.search);
    for (const [name, value] of Object.entries(changes)) {
      if (value === null) next.delete(name);
      else next.set(name, value);
    }
    navigate(path, next, { replace: true });
  };
  useEffect(() => document.getElementById("main")?.focus({ preventScroll: true }), []);
  const shown = hovered ?? at;
  return (
    <>
      <h1>Tokens</h1>
      {pages.error && <ErrorBox error={pages.error} retry={pages.retry} />}
      <div class="token-bar">
        <SampleMenu episode_id={episode_id} turn_id={turn_id} turns={turns.data?.turns ?? []} />
        <label>
          Colour by{" "}
          <select value={colour} onChange={(event) => go({ colour: event.currentTarget.value })}>
            {COLOURS.map((one) => <option key={one} value={one}>{TITLES[one]}</option>)}
          </select>
        </label>
        <TokenFind
          episode_id={episode_id}
          turn_id={turn_id}
          text={query.get("find") ?? ""}
          by={query.get("by") === "id" ? "id" : "text"}
          at={at}
          onAsk={(text, by) => go({ find: text || null, by: by === "id" ? "id" : null })}
          onFound={(match) => {
            setFound(match);
            if (match) go({ at: String(match.start) });
          }}
        />
      </div>
      {colour === "audit" && <Audit episode_id={episode_id} report={report} onReport={setReport} />}
      {head && <Legend colour={colour} window={head} />}
      {head?.total === 0 && <p>The turns of this path have no tokens: a hosted model answered.</p>}
      {head && <TrainedTurns window={head} at={at} range={range} onOpen={(position) => go({ at: String(position) })} />}
      {head && (
        <div class="token-frame">
          <TokenLines
            total={head.total}
            tokenAt={tokenAt}
            look={look}
            at={at}
            found={found}
            range={range}
            onRange={(first, last) => setRange([first, last])}
            onSelect={(position) => go({ at: String(position) })}
            onHover={setHovered}
          />
          <aside class="token-detail" aria-label="Token">
            <Detail token={shown === null ? null : tokenAt(shown)} window={head} distances={distances} />
          </aside>
        </div>
      )}
      <p class="calm" role="status">{head ? `${count(head.total)} tokens` : pages.error ? "" : "Loading…"}</p>
      {head && <Untrained window={head} onOpen={(position) => go({ at: String(position) })} />}
    </>
  );
}

function distanceOf(turn: AuditReport["turns"][number]): number[] {
  const all = [turn.max_abs_delta, turn.stale_max_abs_delta].filter((one): one is number => typeof one === "number");
  return all.length ? [Math.max(...all)] : [];
}

function wordsOf(token: Token, window: TokenWindow | null, colour: Colour, distances: Distances): string {
  const turn = window?.turns[token.turn];
  const words = [shownText(token.text), `position ${token.position}`, token.trained ? "trained" : "not trained"];
  if (token.special) words.push("special");
  if (colour === "logprob" && token.logprob !== null) words.push(`logprob ${token.logprob.toFixed(3)}`);
  if (colour === "version" && token.version !== null) {
    words.push(`version ${visibleLine(window?.weight_version_names[token.version] ?? "")}`);
  }
  if (colour === "turn") words.push(`turn ${turn?.seq}`);
  const far = distances.get(turn?.turn_id ?? "");
  if (colour === "audit" && token.logprob !== null && far !== undefined) words.push(`turn's distance ${far}`);
  return words.join(", ");
}

interface SampleMenuProps {
  episode_id: string;
  turn_id: string;
  turns: readonly TurnOutline[];
}

function SampleMenu({ episode_id, turn_id, turns }: SampleMenuProps) {
  const continued = new Set(turns.map((turn) => turn.parent_id));
  const ends = turns.filter((turn) => !continued.has(turn.turn_id) || turn.turn_id === turn_id);
  if (ends.length === 0) return null;
  return (
    <label>
      Sample{" "}
      <select value={turn_id} onChange={(event) => navigate(pathOf("episodes", episode_id, "tokens", event.currentTarget.value))}>
        {ends.map((turn) => (
          <option key={turn.turn_id} value={turn.turn_id}>
            {continued.has(turn.turn_id) ? "up to" : "ends at"} turn {turn.seq}
          </option>
        ))}
      </select>
    </label>
  );
}

function Legend({ colour, window }: { colour: Colour; window: TokenWindow }) {
  return (
    <ul class="token-legend" aria-label={`Legend: ${TITLES[colour]}`}>
      {legendOf(colour, window).map(([step, words]) => (
        <li key={step}>
          <span class={`token ${step === null ? "token-none" : `token-${step}`}`} aria-hidden="true">abc</span>{" "}
          <SafeLine text={words} />
        </li>
      ))}
      <li><span class="token token-none token-special" aria-hidden="true">abc</span> special token</li>
    </ul>
  );
}

interface DetailProps {
  token: Token | null;
  window: TokenWindow;
  distances: Distances;
}

function Detail({ token, window, distances }: DetailProps) {
  if (!token) return <p class="calm">Point at a token, or go to one with the arrows.</p>;
  const turn = window.turns[token.turn];
  const reason = turn && token.position >= turn.start && !token.trained ? turn.untrained_reason : null;
  return (
    <Facts
      facts={[
        ["Text", <SafeLine text={shownText(token.text)} />],
        ["Id", String(token.id)],
        ["Bytes", token.bytes ? <code>{token.bytes.replace(/..(?=.)/g, "$& ")}</code> : "none"],
        ["Position", count(token.position)],
        ["Kind", token.special ? "special token" : "text"],
        ["Loss mask", token.trained ? "1" : "0"],
        ["Not trained because", reason ? <SafeLine text={reason} /> : null],
        ["Logprob", token.logprob === null ? "not sampled" : token.logprob.toFixed(4)],
        ["Weight version", token.version === null ? null : <SafeLine text={window.weight_version_names[token.version] ?? ""} />],
        ["Turn", turn ? `${turn.seq} (${token.position < turn.start ? "context" : "completion"})` : null],
        ["Turn's largest distance", turn && token.logprob !== null ? (distances.get(turn.turn_id)?.toPrecision(3) ?? null) : null],
      ]}
    />
  );
}

interface AuditProps {
  episode_id: string;
  report: AuditReport | null;
  onReport: (report: AuditReport) => void;
}

/** Audits when asked to: the engine scores every token again. Nothing of it is stored. */
function Audit({ episode_id, report, onReport }: AuditProps) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<ReturnType<typeof asApiError> | null>(null);
  const run = async (): Promise<void> => {
    setBusy(true);
    setError(null);
    try {
      const url = urlOf("/episodes/{episode_id}/audit", { path: { episode_id } });
      onReport((await (await request(url, { method: "POST" })).json()) as AuditReport);
    } catch (reason) {
      setError(asApiError(reason));
    } finally {
      setBusy(false);
    }
  };
  return (
    <section aria-label="Audit">
      {error && <ErrorBox error={error} retry={() => void run()} />}
      <button type="button" disabled={busy} onClick={() => void run()}>{busy ? "Auditing…" : "Audit this episode"}</button>{" "}
      <span role="status">
        {report && (
          <>
            {report.passed ? "Passed" : "Failed"}; largest distance {report.max_abs_delta ?? "–"}, tolerance{" "}
            {report.tolerance}.
          </>
        )}
      </span>
      <p class="calm">The report has the largest |recorded − scored again| of each turn, in nats; all its tokens show that.</p>
    </section>
  );
}

/** Completions that are not trained, with the reason. */
function Untrained({ window, onOpen }: { window: TokenWindow; onOpen: (position: number) => void }) {
  const spans = window.turns.filter((turn) => !turn.trained);
  return (
    <section aria-labelledby="untrained">
      <h2 id="untrained">Not trained</h2>
      {spans.length === 0 && <p class="calm">Every completion of this path is trained.</p>}
      <ul>
        {spans.slice(0, 200).map((turn) => (
          <li key={turn.turn_id}>
            <button type="button" onClick={() => onOpen(turn.start)}>Turn {turn.seq}</button>{" "}
            tokens {count(turn.start)} to {count(turn.end)}: <SafeLine text={turn.untrained_reason ?? "unknown"} />
          </li>
        ))}
      </ul>
      {spans.length > 200 && <p class="calm">… and {count(spans.length - 200)} more turns.</p>}
    </section>
  );
}
