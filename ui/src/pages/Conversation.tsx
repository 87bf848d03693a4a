/** The turns of an episode as messages: what was new to the model, and what it replied. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Message, TurnOutline as Turn } from "../api/looks";
import { Badge } from "../components/Badge";
import { Fold } from "../components/Fold";
import { SafeLine, SafeText } from "../components/SafeText";
import { Link, pathOf } from "../router";
import { count, seconds } from "../text/format";

const AT_ONCE = 50;
const FOLDED = 400;

export function Conversation({ turns }: { turns: readonly Turn[] }) {
  const [shown, setShown] = useState(AT_ONCE);
  if (turns.length === 0) return <p class="calm">No model call yet.</p>;
  return (
    <>
      <ol class="turns">
        {turns.slice(0, shown).map((turn, index) => (
          <li key={turn.turn_id} id={`turn-${turn.turn_id}`}>
            <TurnView turn={turn} before={turns[index - 1]} known={turns} />
          </li>
        ))}
      </ol>
      {turns.length > shown && (
        <button type="button" onClick={() => setShown(shown + 4 * AT_ONCE)}>
          {count(turns.length - shown)} more turns
        </button>
      )}
    </>
  );
}

function TurnView({ turn, before, known }: { turn: Turn; before: Turn | undefined; known: readonly Turn[] }) {
  const parent = known.find((each) => each.turn_id === turn.parent_id);
  const continues = turn.parent_id === (before?.turn_id ?? null);
  return (
    <article aria-label={`Turn ${turn.seq}`}>
      <header class="turn-head">
        <strong>Turn {turn.seq}</strong>
        <span class="calm">
          {count(turn.context_tokens)} in, {count(turn.completion_tokens)} out, {turn.finish_reason},{" "}
          {seconds(turn.timings.total_s)}
        </span>
        <Link to={pathOf("episodes", turn.episode_id, "tokens", turn.turn_id)}>Tokens</Link>
        {!continues && (
          <span>{parent ? <>continues turn {parent.seq}</> : "begins anew"}</span>
        )}
        {turn.break && <Badge tone="warn">{`break: ${turn.break.reason.replaceAll("_", " ")}`}</Badge>}
      </header>
      {turn.new_messages.map((message, index) => <MessageView key={index} message={message} />)}
      <MessageView message={turn.reply} sampled />
    </article>
  );
}

function MessageView({ message, sampled = false }: { message: Message; sampled?: boolean }) {
  const calls = message.tool_calls ?? [];
  const long = message.role === "tool" && (message.content ?? "").length > FOLDED;
  return (
    <section class={`message ${sampled ? "sampled" : message.role}`}>
      <h3>
        {sampled ? "assistant, sampled" : message.role}
        {message.name ? <> <SafeLine text={message.name} /></> : null}
      </h3>
      {message.reasoning && <Fold summary="Reasoning">{() => <SafeText text={message.reasoning ?? ""} />}</Fold>}
      {message.content && <Folded when={long} text={message.content} />}
      {calls.map((call, index) => (
        <Fold key={index} summary={<>Calls <SafeLine text={call.name} /> <small><SafeLine text={call.arguments} /></small></>}>
          {() => <SafeText text={pretty(call.arguments)} />}
        </Fold>
      ))}
    </section>
  );
}

function Folded({ when, text }: { when: boolean; text: string }): ComponentChildren {
  if (!when) return <SafeText text={text} limit={4_000} />;
  return <Fold summary={<SafeLine text={text} longest={160} />}>{() => <SafeText text={text} />}</Fold>;
}

/** Arguments as the model wrote them, in lines where they are JSON. */
function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
