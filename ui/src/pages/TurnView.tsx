/** One turn: what was new to the model, and what it replied, with the results of its tool calls at the calls. */

import { Component, type ComponentChildren, Fragment } from "preact";
import type { Message, TurnOutline as Turn } from "../api/looks";
import { Badge } from "../components/Badge";
import { Fold } from "../components/Fold";
import { SafeLine, SafeText } from "../components/SafeText";
import { Link, pathOf } from "../router";
import { count, seconds } from "../text/format";
import { resultsFor } from "../text/turn_tree";
import { visibleLine } from "../text/visible";

/** Characters of a user's message, above which it is folded. */
const FOLDED = 1_500;
/** Of other text: what is shown as one line is not folded. */
const LINE = 140;
const SHOWN = 4_000;

export interface TurnProps {
  turn: Turn;
  /** The turn that it continues; undefined: it begins anew, or that one is another episode's. */
  parent: Turn | undefined;
  /** The turn whose results of tools are shown at this one's calls. */
  next: Turn | undefined;
  /** The results that it begins with are shown at its parent's calls. */
  joined: boolean;
  /** Its parent stands right above it. */
  follows: boolean;
  chosen: boolean;
  /** Its branch; null: there is only one. */
  branch: string | null;
  /** The address of a turn. */
  queryOf: (turn: Turn) => URLSearchParams;
}

/** Drawn again only when something of it changes: turns never change, and there are many of them. */
export class TurnView extends Component<TurnProps> {
  override shouldComponentUpdate(next: TurnProps): boolean {
    const now = this.props;
    return (Object.keys(next) as (keyof TurnProps)[]).some((name) => name !== "queryOf" && now[name] !== next[name]);
  }

  override render() {
    const { turn, parent, next, joined, chosen } = this.props;
    const given = turn.new_messages;
    const atCalls = new Set(joined && parent ? resultsFor(parent.reply, given).values() : []);
    const results = given.map((message, index) => (message.tool_calls.length ? resultsFor(message, given.slice(index + 1)) : null));
    for (const found of results) for (const result of found?.values() ?? []) atCalls.add(result);
    return (
      <article aria-label={`Turn ${turn.seq}`} class={chosen ? "chosen" : ""}>
        <TurnHead {...this.props} />
        {given.map((message, index) =>
          atCalls.has(message) ? null : <MessageView key={index} message={message} results={results[index]} />,
        )}
        <MessageView message={turn.reply} sampled results={resultsFor(turn.reply, next?.new_messages ?? [])} />
      </article>
    );
  }
}

/** A hosted model, and its server's own counts of tokens. */
function hostedOf({ model, prompt_tokens, completion_tokens }: NonNullable<TurnProps["turn"]["upstream"]>): string {
  const counted = prompt_tokens != null || completion_tokens != null;
  return `${visibleLine(model)}, ${counted ? `${count(prompt_tokens)} in, ${count(completion_tokens)} out by its server's count` : "tokens not counted"}`;
}

function TurnHead({ turn, parent, follows, chosen, branch, queryOf }: TurnProps) {
  const page = pathOf("episodes", turn.episode_id);
  const unparsed = turn.parse_status?.filter((status) => status !== "ok") ?? [];
  const liberties = turn.parse_notes ?? [];
  const at = new URLSearchParams({ at: String(turn.start) });
  return (
    <header class="turn-head">
      <Link to={page} query={queryOf(turn)} replace {...(chosen ? { "aria-current": "true" as const } : {})}>
        <strong>Turn {turn.seq}</strong>
      </Link>
      {branch !== null && <span class="turn-branch"><SafeLine text={branch} longest={60} /></span>}
      <span class="calm">
        {turn.upstream ? hostedOf(turn.upstream) : `${count(turn.context_tokens)} in, ${count(turn.completion_tokens)} out`}, {turn.finish_reason}, {seconds(turn.timings.total_s)}
      </span>
      {!turn.upstream && <Link to={pathOf("episodes", turn.episode_id, "tokens", turn.turn_id)} query={at}>Tokens</Link>}
      {!follows && (
        <span class="calm">
          {parent ? <>continues <Link to={page} query={queryOf(parent)} replace>turn {parent.seq}</Link></> : turn.parent_id ? "continues a turn of another episode" : "begins anew"}
        </span>
      )}
      {turn.break && <Badge tone="warn">{`break: ${turn.break.reason.replaceAll("_", " ")}`}</Badge>}
      {turn.untrained_reason && <Badge tone="calm">{`not trained: ${turn.untrained_reason.replaceAll("_", " ")}`}</Badge>}
      {liberties.map((note, index) => <Badge key={index} tone="calm">{`tool call: ${note.replaceAll("_", " ")}`}</Badge>)}
      {unparsed.map((status, index) => <Badge key={index} tone="warn">{`tool call: ${status.replaceAll("_", " ")}`}</Badge>)}
    </header>
  );
}

interface MessageProps {
  message: Message;
  sampled?: boolean;
  results: ReadonlyMap<string, Message> | null | undefined;
}

function MessageView({ message, sampled = false, results }: MessageProps) {
  const { role, content = "", reasoning } = message;
  const folds = role === "tool" || (!sampled && content.length > (role === "user" ? FOLDED : LINE));
  return (
    <section class={`message ${sampled ? "sampled" : role}`}>
      <h3>
        {sampled ? "assistant, sampled" : role}
        {message.name ? <> <SafeLine text={message.name} /></> : null}
      </h3>
      {reasoning && <Fold summary={<>Reasoning {sizeOf(reasoning)}</>}>{() => <SafeText text={reasoning} limit={SHOWN} />}</Fold>}
      {content && (folds ? <LongText text={content} /> : <SafeText text={content} limit={SHOWN} />)}
      {(message.tool_calls ?? []).map((call, index) => (
        <Fragment key={index}>
          <Fold summary={<>Calls <strong><SafeLine text={call.name} /></strong> <small><SafeLine text={call.arguments} /></small></>}>
            {() => <SafeText text={pretty(call.arguments)} limit={SHOWN} />}
          </Fold>
          <Result of={results?.get(call.id ?? "")} />
        </Fragment>
      ))}
    </section>
  );
}

function Result({ of }: { of: Message | undefined }) {
  if (!of) return null;
  return (
    <div class="tool-result">
      <LongText text={of.content ?? ""} name="Result" />
    </div>
  );
}

/** A text that is folded, with its beginning and its size. */
function LongText({ text, name }: { text: string; name?: string }): ComponentChildren {
  const head = name ? <>{name} </> : null;
  if (text === "") return <p class="calm">{head}is empty.</p>;
  if (text.length <= LINE && !text.includes("\n")) return <p>{head}<SafeText inline text={text} /></p>;
  return (
    <Fold summary={<>{head}<small><SafeLine text={firstLine(text)} longest={LINE} /></small> {sizeOf(text)}</>}>
      {() => <SafeText text={text} limit={SHOWN} />}
    </Fold>
  );
}

function firstLine(text: string): string {
  const [line = "", ...more] = text.slice(0, 2 * LINE).trimStart().split("\n", 2);
  return more.length ? `${line} …` : line;
}

function sizeOf(text: string): ComponentChildren {
  return <small class="size">{count(text.length)} characters</small>;
}

/** Arguments as the model wrote them, in lines where they are JSON. */
function pretty(text: string): string {
  if (text.length > 1_000_000) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
