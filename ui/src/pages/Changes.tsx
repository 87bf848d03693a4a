/** Changes that came while a list is looked at: they move no row until they are asked for. */

import { useState } from "preact/hooks";
import { useEvents } from "../api/hooks";
import { count } from "../text/format";

export interface Changes {
  readonly many: number;
  /** Another one after each ``show``: the list is then loaded again. */
  readonly version: number;
  readonly show: () => void;
}

export function useChanges(): Changes {
  const [many, setMany] = useState(0);
  const [version, setVersion] = useState(0);
  const note = (): void => setMany((before) => before + 1);
  useEvents((event) => event.type === "episode" && note(), note);
  const show = (): void => {
    setMany(0);
    setVersion((before) => before + 1);
  };
  return { many, version, show };
}

export function ShowChanges({ of: { many, show } }: { of: Changes }) {
  if (many === 0) return null;
  return <button type="button" onClick={show}>Show {count(many)} {many === 1 ? "change" : "changes"}</button>;
}
