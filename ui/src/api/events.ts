/** `GET /events` over fetch, because EventSource sends no key. It resumes after the last event that had an id.
 *
 * One stream serves all listeners of the page; it ends with the last of them. A tab that is not seen has none: browsers
 * open six connections to a server for all of their tabs together. */

import { ApiError, request, urlOf } from "./client";

export interface ServerEvent {
  readonly id: string | null;
  readonly type: string;
  readonly data: string;
}

interface Listener {
  handle: (event: ServerEvent) => void;
  /** Events may have been missed: the stream broke and could not be resumed, or the server was started again. */
  gap: () => void;
}

const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 30_000;

const listeners = new Set<Listener>();
let running: AbortController | null = null;

/** Starts to listen; the function that it gives stops. */
export function listen(listener: Listener): () => void {
  listeners.add(listener);
  if (running === null) {
    running = new AbortController();
    void run(running.signal);
  }
  return () => {
    listeners.delete(listener);
    if (listeners.size > 0) return;
    running?.abort();
    running = null;
  };
}

/** The id of the episode whose status an event tells; null for other events. */
export function changedEpisode(event: ServerEvent): string | null {
  if (event.type !== "episode") return null;
  return (JSON.parse(event.data) as { episode_id: string }).episode_id;
}

/** The group of the episode whose status an event tells; null for other events, and where it has none. */
export function changedGroup(event: ServerEvent): string | null {
  if (event.type !== "episode") return null;
  return (JSON.parse(event.data) as { group_id: string | null }).group_id;
}

async function run(signal: AbortSignal): Promise<void> {
  let last: string | null = null;
  let wait = FIRST_WAIT_MS;
  let broken = false;
  while (!signal.aborted) {
    await untilSeen();
    const seen = new AbortController();
    const hide = (): void => {
      if (document.hidden) seen.abort();
    };
    document.addEventListener("visibilitychange", hide);
    try {
      const headers: Record<string, string> = { accept: "text/event-stream" };
      if (last !== null) headers["last-event-id"] = last;
      const response = await request(urlOf("/events"), { headers, signal: AbortSignal.any([signal, seen.signal]) });
      if (broken && last === null) for (const listener of listeners) listener.gap();
      if (!response.body) return;
      for await (const event of eventsOf(response.body)) {
        wait = FIRST_WAIT_MS;
        if (event.id !== null) last = event.id;
        for (const listener of listeners) {
          if (event.type === "reset") listener.gap();
          else listener.handle(event);
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429) return;
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    broken = true;
    if (seen.signal.aborted) continue;
    // Spread, so that all pages of a server that starts again do not come at once.
    await pause(wait * (0.5 + Math.random() / 2), signal);
    wait = Math.min(wait * 2, LONGEST_WAIT_MS);
  }
}

function untilSeen(): Promise<void> {
  return new Promise((done) => {
    const look = (): void => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      done();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
}

/** The events of a stream (https://html.spec.whatwg.org/multipage/server-sent-events.html). */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let held = "";
  let id: string | null = null;
  let type = "message";
  let data: string[] = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (held + value).split(/\r\n|\n|\r/);
      held = lines.pop() ?? "";
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { id, type, data: data.join("\n") };
          type = "message";
          data = [];
          continue;
        }
        const [, field = "", text = ""] = /^([^:]*):? ?(.*)$/s.exec(line) ?? [];
        if (field === "id" && !text.includes("\0")) id = text;
        else if (field === "event") type = text;
        else if (field === "data") data.push(text);
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined); // already broken
  }
}
