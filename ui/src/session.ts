/** The control key: taken from the address or typed once, kept by this tab's session, sent as a header only. */

import { useEffect, useState } from "preact/hooks";

const STORED = "turnstile-control-key";

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

/** Reads the key of this tab. A key in the address (`#key=…`) is taken out of it at once and replaces the old one. */
export function openSession(): void {
  const given = /^#key=(.*)$/.exec(window.location.hash);
  if (given) {
    const { pathname, search } = window.location;
    window.history.replaceState(null, "", pathname + search);
    let key = given[1] ?? "";
    try {
      key = decodeURIComponent(key);
    } catch {
      // Not encoded: taken as it stands, and the server says whether it is a key.
    }
    window.sessionStorage.setItem(STORED, key);
  }
  session = { key: window.sessionStorage.getItem(STORED), refused: null };
}

export function currentKey(): string | null {
  return session.key;
}

export function enterKey(key: string): void {
  window.sessionStorage.setItem(STORED, key);
  set({ key, refused: null });
}

export function forgetKey(): void {
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
