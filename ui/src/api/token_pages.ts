/** The tokens of a path, loaded in windows when they are wanted. */

import { useEffect, useRef, useState } from "preact/hooks";
import { joinedTexts } from "../text/tokens";
import { type ApiError, get } from "./client";
import { asApiError } from "./hooks";
import type { components } from "./schema";

export type TokenWindow = components["schemas"]["TokenWindow"];

export interface Token {
  readonly position: number;
  readonly id: number;
  readonly text: string;
  readonly bytes: string;
  readonly special: boolean;
  readonly trained: boolean;
  readonly logprob: number | null;
  readonly version: number | null;
  readonly turn: number;
}

/** Windows that are kept around the one that is looked at. */
const KEPT = 12;
/** Tokens that windows share, so that a character split between two is whole in the first. */
const SHARED = 4;

export interface TokenPages {
  /** The first window: what holds for the whole path. Null until it is there. */
  readonly head: TokenWindow | null;
  readonly error: ApiError | null;
  /** Null while it is loaded. */
  readonly tokenAt: (position: number) => Token | null;
  readonly retry: () => void;
}

/** Keeps the tokens ``[first, last)`` loaded. */
export function useTokenPages(episode_id: string, turn_id: string, first: number, last: number): TokenPages {
  const pages = useRef(new Map<number, TokenWindow & { shown: string[] }>());
  const asked = useRef(new Map<number, AbortController>());
  const [head, setHead] = useState<TokenWindow | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const [tries, setTries] = useState(0);
  const [, redraw] = useState(0);
  const full = head ? head.ids.length : 0;
  const size = head && full < head.total ? Math.max(1, full > 2 * SHARED ? full - SHARED : full) : Math.max(1, full);

  useEffect(() => () => asked.current.forEach((one) => one.abort()), []);
  useEffect(() => {
    const from = head ? Math.floor(first / size) : 0;
    const to = head ? Math.floor(Math.min(Math.max(first, last - 1), Math.max(0, head.total - 1)) / size) : 0;
    for (const [index, abort] of asked.current) {
      if (index >= from - 1 && index <= to + 1) continue;
      abort.abort();
      asked.current.delete(index);
    }
    for (let index = from; index <= to; index += 1) {
      if (pages.current.has(index) || asked.current.has(index)) continue;
      const abort = new AbortController();
      asked.current.set(index, abort);
      const query = { episode_id, start: index * size };
      get("/turns/{turn_id}/tokens", { path: { turn_id }, query }, abort.signal)
        .then((found) => {
          pages.current.set(index, { ...found, shown: joinedTexts(found.bytes, found.text) });
          const far = [...pages.current.keys()].sort((a, b) => Math.abs(a - index) - Math.abs(b - index)).slice(KEPT);
          for (const one of far) pages.current.delete(one);
          if (index === 0 && !head) setHead(found);
          setError(null);
          redraw((before) => before + 1);
        })
        .catch((reason: unknown) => {
          if (!abort.signal.aborted) setError(asApiError(reason));
        })
        .finally(() => {
          if (asked.current.get(index) === abort) asked.current.delete(index); // else it was asked for once more
        });
    }
  }, [episode_id, turn_id, head, size, first, last, tries]);

  const tokenAt = (position: number): Token | null => {
    const page = pages.current.get(Math.floor(position / size));
    const at = page ? position - page.start : 0;
    if (!page || at >= page.ids.length) return null;
    return {
      position,
      id: page.ids[at] ?? 0,
      text: page.shown[at] ?? "",
      bytes: page.bytes[at] ?? "",
      special: page.special[at] ?? false,
      trained: page.loss_mask[at] === 1,
      logprob: page.logprobs[at] ?? null,
      version: page.weight_version[at] ?? null,
      turn: page.turn[at] ?? 0,
    };
  };
  return { head, error, tokenAt, retry: () => setTries((before) => before + 1) };
}
