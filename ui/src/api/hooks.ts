/** Data for components: loading, an error with the server's message, or the answer. */

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { useSession } from "../session";
import { type Answer, ApiError, get, type GetOptions, type GetRoute } from "./client";
import { type ServerEvent, listen } from "./events";

export type Loaded<Data> =
  | { readonly state: "loading"; readonly data: Data | null }
  | { readonly state: "error"; readonly error: ApiError; readonly data: Data | null }
  | { readonly state: "ok"; readonly data: Data };

/** ``data`` stays while it is loaded again. ``reload`` asks once more. */
export type Loading<Data> = Loaded<Data> & { readonly reload: () => void };

/** What ``load`` gives, asked for again when ``deps`` or the key change. The request of before is then aborted; but
 * ``reload`` waits for the one in flight and asks once more after it, so that an answer comes however often it is
 * called. */
export function useLoaded<Data>(load: (signal: AbortSignal) => Promise<Data>, deps: readonly unknown[]): Loading<Data> {
  const { key } = useSession();
  const [asked, setAsked] = useState(0);
  const [found, setFound] = useState<{ of: string; now: Loaded<Data> }>();
  const flight = useRef({ busy: false, again: false });
  const reload = useCallback(() => {
    if (flight.current.busy) flight.current.again = true;
    else setAsked((before) => before + 1);
  }, []);
  const of = JSON.stringify([key, ...deps]);
  useEffect(() => {
    const abort = new AbortController();
    const mine = { busy: true, again: false };
    flight.current = mine;
    const landed = (): void => {
      mine.busy = false;
      if (mine.again && !abort.signal.aborted) reload();
    };
    const show = (next: (data: Data | null) => Loaded<Data>): void =>
      setFound((before) => ({ of, now: next(before?.of === of ? before.now.data : null) }));
    show((data) => ({ state: "loading", data }));
    load(abort.signal)
      .then(
        (data) => abort.signal.aborted || show(() => ({ state: "ok", data })),
        (error: unknown) => abort.signal.aborted || show((data) => ({ state: "error", error: asApiError(error), data })),
      )
      .finally(landed);
    return () => abort.abort();
  }, [of, asked]);
  const now: Loaded<Data> = found?.of === of ? found.now : { state: "loading", data: null };
  return { ...now, reload };
}

/** What ``GET route`` answers, asked for again when the route or its options change. */
export function useGet<Route extends GetRoute>(route: Route, options: GetOptions = {}): Loading<Answer<Route>> {
  return useLoaded((signal) => get(route, options, signal), [route, options]);
}

export function asApiError(error: unknown): ApiError {
  if (error instanceof ApiError) return error;
  return new ApiError(0, "viewer", error instanceof Error ? error.message : String(error));
}

/** Calls ``handle`` for each event of ``GET /events``, and ``gap`` when some may have been missed. */
export function useEvents(handle: (event: ServerEvent) => void, gap: () => void): void {
  const { key } = useSession();
  const now = useRef({ handle, gap });
  now.current = { handle, gap };
  useEffect(
    () => listen({ handle: (event) => now.current.handle(event), gap: () => now.current.gap() }),
    [key],
  );
}

/** How often it is looked whether it is time to load again. */
const TICK_MS = 500;
const SOONEST_MS = 2000;
const POLL_MS = 5000;
/** After an answer that took a second, ten seconds pass: an open page takes little of a server that has much to do. */
const REST = 10;

interface Fresh {
  /** The events after which to load again; by default those of any episode. */
  readonly concerns?: (event: ServerEvent) => boolean;
  /** Also now and then without one, while the page is seen. */
  readonly poll?: boolean;
}

/** Loads again soon after an episode changed, and now and then. Never while an answer is awaited, so that a slow
 * server's answer comes to be shown. */
export function useFresh(of: Pick<Loading<unknown>, "state" | "reload">, { concerns, poll = true }: Fresh = {}): void {
  const now = useRef({ of, poll });
  now.current = { of, poll };
  const changed = useRef(false);
  const begun = useRef(performance.now());
  const rested = useRef(0);
  const loading = of.state === "loading";
  useEffect(() => {
    const at = performance.now();
    if (loading) begun.current = at;
    else rested.current = at + Math.max(SOONEST_MS, REST * (at - begun.current));
  }, [loading]);
  const note = (): void => void (changed.current = true);
  useEvents((event) => (concerns ? concerns(event) : event.type === "episode") && note(), note);
  useEffect(() => {
    const tick = window.setInterval(() => {
      if (document.visibilityState !== "visible" || now.current.of.state === "loading") return;
      const idle_ms = now.current.poll ? POLL_MS - SOONEST_MS : Infinity;
      if (performance.now() < rested.current + (changed.current ? 0 : idle_ms)) return;
      changed.current = false;
      now.current.of.reload();
    }, TICK_MS);
    return () => window.clearInterval(tick);
  }, []);
}
