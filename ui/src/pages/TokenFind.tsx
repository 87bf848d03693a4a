/** Finds a text or a token's id on the path, and goes from one place to the next. */

import { useEffect, useState } from "preact/hooks";
import { get } from "../api/client";
import { useLoaded } from "../api/hooks";
import { ErrorBox } from "../components/Status";
import { count } from "../text/format";

type By = "text" | "id";

interface TokenFindProps {
  episode_id: string;
  turn_id: string;
  text: string;
  by: By;
  at: number | null;
  onAsk: (text: string, by: By) => void;
  onFound: (match: { start: number; end: number } | null) => void;
}

interface Found {
  readonly matches: { start: number; end: number }[];
  readonly more: boolean;
}

export function TokenFind({ episode_id, turn_id, text, by, at, onAsk, onFound }: TokenFindProps) {
  const [typed, setTyped] = useState(text);
  const [kind, setKind] = useState<By>(by);
  const [after, setAfter] = useState(-1);
  const [chosen, setChosen] = useState(false);
  const asked = useLoaded<Found | null>(
    (signal) => {
      if (!text) return Promise.resolve(null);
      const query = { episode_id, after, ...(by === "id" ? { id: text } : { text }) };
      return get("/turns/{turn_id}/tokens/find", { path: { turn_id }, query }, signal);
    },
    [episode_id, turn_id, text, by, after],
  );
  const matches = asked.data?.matches ?? [];
  const index = matches.findIndex((match) => match.start === at);
  useEffect(() => {
    if (asked.state !== "ok") return;
    const first = asked.data?.matches[0];
    const here = asked.data?.matches.find((match) => match.start === at);
    if (chosen && first) onFound(first);
    else onFound(here ?? null);
    setChosen(false);
  }, [asked.state, asked.data]);
  const step = (by_: 1 | -1): void => {
    const ahead = matches.findIndex((match) => match.start > (at ?? -1));
    const from = index >= 0 ? index + by_ : by_ === 1 ? (ahead < 0 ? matches.length : ahead) : ahead < 0 ? matches.length - 1 : ahead - 1;
    const last = matches[matches.length - 1];
    if (from >= matches.length && asked.data?.more && last) {
      setChosen(true);
      setAfter(last.start);
      return;
    }
    const match = matches[(from + matches.length) % matches.length];
    if (match) onFound(match);
  };
  return (
    <form
      role="search"
      class="token-find"
      onSubmit={(event) => {
        event.preventDefault();
        if (typed === text && kind === by && matches.length) step(1);
        else {
          setAfter(-1);
          setChosen(true);
          onAsk(typed, kind);
        }
      }}
    >
      <label>Find <input data-search value={typed} onInput={(event) => setTyped(event.currentTarget.value)} /></label>
      <label>
        as{" "}
        <select value={kind} onChange={(event) => setKind(event.currentTarget.value as By)}>
          <option value="text">text</option>
          <option value="id">token id</option>
        </select>
      </label>
      <button type="submit">Find</button>
      <button type="button" disabled={!matches.length} onClick={() => step(-1)}>Previous</button>
      <button type="button" disabled={!matches.length} onClick={() => step(1)}>Next</button>
      <span role="status" aria-label="Found">
        {text && asked.state === "ok" &&
          `${index >= 0 ? `${count(index + 1)} of ` : ""}${count(matches.length)}${asked.data?.more ? " or more" : ""}` +
          ` found${after >= 0 ? " after those before" : ""}`}
      </span>
      {asked.state === "error" && <ErrorBox error={asked.error} retry={asked.reload} />}
    </form>
  );
}
