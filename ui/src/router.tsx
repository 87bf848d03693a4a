/** Addresses: the path below `/ui` says which page, the query says how it is filtered. Links are real links. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { viewerPath } from "./base";
import { flushPlaces } from "./scroll";

export interface Location {
  /** Below `/ui`, with a leading slash: `/episodes/ep-1`. Still percent-encoded. */
  readonly path: string;
  readonly query: URLSearchParams;
}

export type Params = Readonly<Record<string, string>>;

const listeners = new Set<() => void>();

function here(): Location {
  const { pathname, search } = window.location;
  const below = pathname.startsWith(viewerPath) ? pathname.slice(viewerPath.length) : "";
  return { path: `/${below.replace(/\/+$/, "")}`, query: new URLSearchParams(search) };
}

/** The address of a page as a link has it. `path` is below `/ui`; its parts are already encoded (see `pathOf`). */
export function hrefOf(path: string, query?: URLSearchParams): string {
  const text = query?.toString();
  return viewerPath + path.replace(/^\//, "") + (text ? `?${text}` : "");
}

/** A path of encoded parts: ``pathOf("episodes", id)``. */
export function pathOf(...parts: string[]): string {
  return `/${parts.map(encodeURIComponent).join("/")}`;
}

/** Goes to a page. ``replace``: the address before is not kept in the history (a filter that is being typed). */
export function navigate(path: string, query?: URLSearchParams, options: { replace?: boolean } = {}): void {
  const href = hrefOf(path, query);
  flushPlaces();
  if (options.replace) window.history.replaceState(null, "", href);
  else {
    window.history.pushState(null, "", href);
    window.scrollTo(0, 0);
  }
  for (const tell of listeners) tell();
}

export function useLocation(): Location {
  const [location, setLocation] = useState(here);
  useEffect(() => {
    const update = (): void => setLocation(here());
    listeners.add(update);
    window.addEventListener("popstate", update);
    return () => {
      listeners.delete(update);
      window.removeEventListener("popstate", update);
    };
  }, []);
  return location;
}

/** The values of ``:name`` parts when ``path`` fits ``pattern`` (``/episodes/:id``), decoded; else null. */
export function match(pattern: string, path: string): Params | null {
  const wanted = pattern.split("/");
  const given = path.split("/");
  if (wanted.length !== given.length) return null;
  const found: Record<string, string> = {};
  for (const [index, part] of wanted.entries()) {
    const value = given[index] ?? "";
    if (part.startsWith(":")) {
      if (!value) return null;
      try {
        found[part.slice(1)] = decodeURIComponent(value);
      } catch {
        return null; // not an address of ours
      }
    } else if (part !== value) return null;
  }
  return found;
}

interface LinkProps {
  to: string;
  query?: URLSearchParams;
  class?: string;
  children: ComponentChildren;
  title?: string;
  "aria-current"?: "page" | "true";
  "aria-label"?: string;
  tabIndex?: number;
  /** Changes the address of this page, and stays where it is. */
  replace?: boolean;
}

/** A link to a page of the viewer. A new tab, a copied address: all that a link can. */
export function Link({ to, query, children, replace = false, ...rest }: LinkProps) {
  const follow = (event: MouseEvent): void => {
    if (event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    navigate(to, query, { replace });
  };
  return (
    <a href={hrefOf(to, query)} onClick={follow} {...rest}>
      {children}
    </a>
  );
}
