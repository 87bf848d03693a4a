/** The control key: taken from the address or typed once, kept by the tab's session, sent as a header only. A new tab
 * of the viewer gets it from one that is open, so that a link can be opened in a tab of its own. */

import { useEffect, useState } from "preact/hooks";
import { viewerPath } from "./base";

const STORED = "turnstile-control-key";
/** How long a new tab waits for another one's answer. */
const ANSWER_MS = 150;

/** Between the tabs of this viewer in this browser; no other origin hears it. */
type TabMessage = { readonly kind: "ask" } | { readonly kind: "key"; readonly key: string } | { readonly kind: "forget" };

export interface Session {
  readonly key: string | null;
  /** Why the server refused; null while it did not. The page asks for a key then. */
  readonly refused: string | null;
}

let session: Session = { key: null, refused: null };
const listeners = new Set<(now: Session) => void>();

function set(next: Session): void {
  session = next;
  for (const tell of listeners) tell(next);
}

const tabs = new BroadcastChannel(`turnstile ${viewerPath}`);

function say(message: TabMessage): void {
  tabs.postMessage(message);
}

/** Finds the key: in the address, else of this tab, else of another tab. The address is cleared before anything else. */
export async function openSession(): Promise<void> {
  const given = keyOfAddress();
  if (given !== null) window.sessionStorage.setItem(STORED, given);
  session = { key: window.sessionStorage.getItem(STORED) ?? (await keyOfOtherTab()), refused: null };
  if (session.key !== null) window.sessionStorage.setItem(STORED, session.key);
  tabs.addEventListener("message", ({ data }: MessageEvent<TabMessage>) => {
    if (data.kind === "ask" && session.key !== null && session.refused === null) say({ kind: "key", key: session.key });
    if (data.kind === "forget") drop();
  });
  // An address with a key that is opened where the viewer is open already.
  window.addEventListener("hashchange", () => {
    const key = keyOfAddress();
    if (key !== null) enterKey(key);
  });
}

/** The key in the address (`#key=…`), which has none from then on. */
function keyOfAddress(): string | null {
  const given = /^#key=(.*)$/.exec(window.location.hash);
  if (!given) return null;
  const { pathname, search } = window.location;
  window.history.replaceState(window.history.state, "", pathname + search);
  const key = given[1] ?? "";
  try {
    return decodeURIComponent(key);
  } catch {
    return key; // not encoded: the server says whether it is a key
  }
}

function keyOfOtherTab(): Promise<string | null> {
  return new Promise((found) => {
    const hear = ({ data }: MessageEvent<TabMessage>): void => {
      if (data.kind === "key") end(data.key);
    };
    const end = (key: string | null): void => {
      tabs.removeEventListener("message", hear);
      clearTimeout(timer);
      found(key);
    };
    const timer = setTimeout(() => end(null), ANSWER_MS);
    tabs.addEventListener("message", hear);
    say({ kind: "ask" });
  });
}

export function currentKey(): string | null {
  return session.key;
}

export function enterKey(key: string): void {
  window.sessionStorage.setItem(STORED, key);
  set({ key, refused: null });
}

/** In all tabs. */
export function forgetKey(): void {
  say({ kind: "forget" });
  drop();
}

function drop(): void {
  window.sessionStorage.removeItem(STORED);
  set({ key: null, refused: "The key is forgotten." });
}

/** The server answered 401 to a request that was sent with ``key``. */
export function refuse(key: string | null, message: string): void {
  if (key === session.key) set({ key, refused: message });
}

export function useSession(): Session {
  const [now, setNow] = useState(session);
  useEffect(() => {
    listeners.add(setNow);
    setNow(session);
    return () => void listeners.delete(setNow);
  }, []);
  return now;
}
