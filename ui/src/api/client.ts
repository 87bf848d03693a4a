/** Requests to the control API, typed by `schema.d.ts`: ``get("/episodes/{episode_id}", { path: { episode_id } })``. */

import { apiUrl } from "../base";
import { currentKey, refuse } from "../session";
import type { paths } from "./schema";

type JsonAnswer<Operation> = Operation extends {
  responses: { 200: { content: { "application/json": infer Body } } };
}
  ? Body
  : never;

/** The routes that can be read. */
export type GetRoute = {
  [Path in keyof paths]: paths[Path] extends { get: object } ? Path : never;
}[keyof paths];

/** What ``GET route`` answers. */
export type Answer<Route extends GetRoute> = JsonAnswer<paths[Route]["get"]>;

export type QueryValue = string | number | boolean | null | undefined;

export interface GetOptions {
  /** The values of the route's `{parts}`. */
  path?: Readonly<Record<string, string>>;
  /** Null and undefined are left out; a list is repeated. */
  query?: Readonly<Record<string, QueryValue | readonly QueryValue[]>>;
}

/** The control API's error: its type, and its message for the reader. ``status`` 0: no answer came. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly type: string,
    message: string,
  ) {
    super(message);
  }
}

export function urlOf(route: string, { path = {}, query = {} }: GetOptions = {}): string {
  const filled = route.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = path[name];
    if (value === undefined) throw new Error(`${route} needs ${name}`);
    return encodeURIComponent(value);
  });
  const url = new URL(filled.replace(/^\//, ""), apiUrl);
  for (const [name, given] of Object.entries(query)) {
    for (const value of Array.isArray(given) ? given : [given]) {
      if (value !== null && value !== undefined) url.searchParams.append(name, String(value));
    }
  }
  return url.href;
}

/** Unix seconds since which the server does not answer; null while it does. */
let silentSince: number | null = null;
const silenceListeners = new Set<(since: number | null) => void>();

function setSilent(since: number | null): void {
  if (since === silentSince || (since !== null && silentSince !== null)) return;
  silentSince = since;
  for (const tell of silenceListeners) tell(since);
}

/** Calls ``tell`` now and whenever the server stops to answer or answers again; the function that it gives stops. */
export function watchSilence(tell: (since: number | null) => void): () => void {
  silenceListeners.add(tell);
  tell(silentSince);
  return () => void silenceListeners.delete(tell);
}

/** Sends a request with the key. Raises ApiError for every answer but 2xx; after 401 the page asks for the key. */
export async function request(url: string, init: RequestInit = {}): Promise<Response> {
  const key = currentKey();
  const headers = new Headers(init.headers);
  if (key !== null && /[^\x21-\x7e]/.test(key)) {
    const error = new ApiError(401, "unauthorized", "A control key has letters, digits and . _ ~ + = - only.");
    refuse(key, error.message); // a header could not even carry it
    throw error;
  }
  if (key !== null) headers.set("authorization", `Bearer ${key}`);
  let response: Response;
  try {
    response = await fetch(url, { ...init, headers, credentials: "omit", redirect: "error", cache: "no-store" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    setSilent(Date.now() / 1000);
    throw new ApiError(0, "unreachable", "The server does not answer. Is it running, and is this network up?");
  }
  setSilent(null);
  if (response.ok) return response;
  const error = await errorOf(response);
  // Of a page that is gone the reason may not have been read; another request has said it.
  if (response.status === 401 && !init.signal?.aborted) refuse(key, error.message);
  throw error;
}

async function errorOf(response: Response): Promise<ApiError> {
  const fallback = `The server answered ${response.status} ${response.statusText}`.trim();
  try {
    const body: unknown = await response.json();
    const { type, message } = (body as { error: { type: unknown; message: unknown } }).error;
    return new ApiError(response.status, String(type), String(message));
  } catch {
    return new ApiError(response.status, "unknown", fallback); // a proxy's page, or half an answer
  }
}

export async function get<Route extends GetRoute>(
  route: Route,
  options: GetOptions = {},
  signal?: AbortSignal,
): Promise<Answer<Route>> {
  const response = await request(urlOf(route, options), {
    headers: { accept: "application/json" },
    ...(signal ? { signal } : {}),
  });
  return (await response.json()) as Answer<Route>;
}
