/** An episode step by step: what each turn's tool calls changed in the work folder. The address has the state. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { Answer } from "../api/client";
import { changedEpisode } from "../api/events";
import { useEvents, useGet, useLoaded } from "../api/hooks";
import { getOutlines, type Message, type TurnOutline } from "../api/looks";
import { Facts } from "../components/Facts";
import { Fold } from "../components/Fold";
import { SafeLine, SafeText } from "../components/SafeText";
import { Await } from "../components/Status";
import { navigate, type Params, useLocation } from "../router";
import { count, seconds } from "../text/format";
import { ChangedFiles, Folder } from "./ReplayFiles";

type Report = Answer<"/episodes/{episode_id}/replay">;
type State = Report["states"][number];

export function ReplayPage({ params }: { params: Params }) {
  const episode_id = params.id ?? "";
  const report = useGet("/episodes/{episode_id}/replay", { path: { episode_id } });
  const turns = useLoaded((signal) => getOutlines(episode_id, signal), [episode_id]);
  const reload = (): void => {
    report.reload();
    turns.reload();
  };
  useEvents((event) => {
    if (changedEpisode(event) === episode_id) reload();
  }, reload);
  useEffect(() => document.getElementById("main")?.focus({ preventScroll: true }), []);
  return (
    <>
      <h1>Replay of <SafeLine text={episode_id} /></h1>
      <Await of={report}>
        {(found) => <Replay report={found} turns={turns.data?.turns ?? []} />}
      </Await>
    </>
  );
}

function Replay({ report, turns }: { report: Report; turns: readonly TurnOutline[] }) {
  const { path, query } = useLocation();
  const { states, episode_id } = report;
  const given = Number(query.get("state") ?? 0);
  const number = Math.min(Number.isInteger(given) && given > 0 ? given : 0, Math.max(0, states.length - 1));
  const go = (next: number): void => {
    if (next >= 0 && next < states.length) navigate(path, new URLSearchParams({ state: String(next) }), { replace: true });
  };
  useArrows(() => go(number - 1), () => go(number + 1));
  const state = states[number];
  if (!state) return <p class="calm">No state is recorded yet.</p>;
  return (
    <>
      <div class="replay-steps" role="group" aria-label="States">
        <button type="button" disabled={number === 0} onClick={() => go(number - 1)}>← Before</button>
        <label>
          State{" "}
          <select data-search value={String(number)} onChange={(event) => go(Number(event.currentTarget.value))}>
            {states.map((one) => <option key={one.state} value={String(one.state)}>{nameOf(one)}</option>)}
          </select>
        </label>
        <button type="button" disabled={number === states.length - 1} onClick={() => go(number + 1)}>Next →</button>
        <span class="calm" role="status">{`${count(number + 1)} of ${count(states.length)}`}</span>
      </div>
      <Facts
        facts={[
          ["At", seconds(state.at_s)],
          ["Files", count(state.files)],
          ["Changed", count(state.changes.length)],
          ["Not looked at", state.further ? `${count(state.further)} files (episodes.replay_paths)` : null],
        ]}
      />
      {state.missed && (
        <p class="error"><strong>Not recorded</strong> <SafeLine text={state.missed} longest={400} /></p>
      )}
      <div class="replay-frame" key={number}>
        <Calls turns={turns} before={states[number - 1]} state={state} />
        <ChangedFiles episode_id={episode_id} state={state} />
      </div>
      <Continue episode_id={episode_id} state={state} />
      <Folder episode_id={episode_id} state={state} />
    </>
  );
}

function nameOf(state: State): string {
  const when =
    state.moment === "begin" ? "before the agent" : state.moment === "end" ? "after the agent" : `after turn ${state.seq}`;
  const changes = state.changes.length;
  const what = state.missed ? ", not recorded" : changes ? `, ${count(changes)} changed` : "";
  return `${state.state}: ${when}${what}`;
}

/** The arrow keys of the page, where nothing that has the focus needs them. */
function useArrows(before: () => void, next: () => void): void {
  useEffect(() => {
    const press = (event: KeyboardEvent): void => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
      const at = event.target instanceof Element ? event.target : null;
      if (at?.closest("input, select, textarea, dialog, .diff-box, .scroll-x")) return;
      if (event.key === "ArrowLeft") before();
      else if (event.key === "ArrowRight") next();
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  });
}

/** The turns whose calls lie between two states, each with what its tools answered. */
function Calls({ turns, before, state }: { turns: readonly TurnOutline[]; before: State | undefined; state: State }) {
  const seq = state.seq ?? -1;
  const since = before?.seq ?? -1;
  const shown = turns.filter((turn) => turn.seq === seq || (turn.seq > since && turn.seq < seq));
  const answers = useMemo(() => answersOf(turns), [turns]);
  return (
    <section aria-labelledby="calls">
      <h2 id="calls">Tool calls</h2>
      {shown.length === 0 && <p class="calm">No turn yet: this is what the agent began with.</p>}
      {shown.map((turn) => (
        <article key={turn.turn_id} aria-label={`Turn ${turn.seq}`}>
          <h3>Turn {turn.seq}</h3>
          {turn.reply.content && <SafeText text={turn.reply.content} limit={1_000} />}
          {(turn.reply.tool_calls ?? []).map((call, index) => (
            <section class="message tool" key={index}>
              <h4><SafeLine text={call.name} /></h4>
              <SafeText text={pretty(call.arguments)} limit={2_000} />
              <Result text={(call.id && answers.get(call.id)) || null} />
            </section>
          ))}
          {!turn.reply.tool_calls?.length && <p class="calm">It called no tool.</p>}
        </article>
      ))}
    </section>
  );
}

function Result({ text }: { text: string | null }) {
  if (text === null) return <p class="calm">Its result was sent in no call.</p>;
  return <Fold summary={<>Result <small><SafeLine text={text} longest={100} /></small></>}>{() => <SafeText text={text} />}</Fold>;
}

/** What tools answered, by the id of the call: it came with a later turn. */
function answersOf(turns: readonly TurnOutline[]): Map<string, string> {
  const messages: readonly Message[] = turns.flatMap((turn) => turn.new_messages);
  return new Map(
    messages.flatMap(({ tool_call_id, content }) => (tool_call_id ? [[tool_call_id, content ?? ""] as const] : [])),
  );
}

/** Arguments as the model wrote them; a command's text in lines of its own. */
function pretty(text: string): string {
  try {
    const read: unknown = JSON.parse(text);
    if (typeof read !== "object" || read === null) return text;
    const values = Object.entries(read as Record<string, unknown>);
    return values.map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("\n");
  } catch {
    return text;
  }
}

/** How to go on from here with other episodes, where the state has a snapshot. */
function Continue({ episode_id, state }: { episode_id: string; state: State }) {
  const { snapshot_id } = state;
  return (
    <section aria-labelledby="continue">
      <h2 id="continue">Continue from here</h2>
      {snapshot_id ? (
        <>
          <p>Starts episodes that have this turn's conversation and files:</p>
          <Command text={`await client.episode(${JSON.stringify(episode_id)}).fork(snapshot_id=${JSON.stringify(snapshot_id)}, n=4)`} />
        </>
      ) : (
        <p class="calm">
          There is no snapshot of this state. An episode that is created with <code>snapshots="every_turn"</code> keeps one
          of each turn but the last, and can be forked there.
        </p>
      )}
    </section>
  );
}

function Command({ text }: { text: string }) {
  const [copied, setCopied] = useState(false);
  const copy = (): void => void navigator.clipboard.writeText(text).then(() => setCopied(true));
  return (
    <div class="replay-command">
      <div class="scroll-x" tabIndex={0} role="region" aria-label="The call"><code>{text}</code></div>
      {window.isSecureContext && (
        <button type="button" onClick={copy}>{copied ? "Copied" : "Copy"}</button>
      )}
    </div>
  );
}
