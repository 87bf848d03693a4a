/** What all pages have: navigation, where one is, the keys of the keyboard. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { watchSilence } from "./api/client";
import { ofDirectory } from "./base";
import { SafeLine } from "./components/SafeText";
import { type Crumb, PAGES } from "./pages";
import { Link, useLocation } from "./router";
import { currentKey, forgetKey } from "./session";
import { time } from "./text/format";

const KEYS: readonly (readonly [string, string])[] = [
  ["/", "Search or filter on this page"],
  ["?", "This help"],
  ["Tab", "The next link, button, table or chart"],
  ["↑ ↓ Page Home End", "In a table: the current row"],
  ["Enter", "In a table or a timeline: open it"],
  ["j k", "In an episode: the next turn, the turn before"],
  ["← → + − 0", "In a timeline: the next span, zoom, all"],
  ["Esc", "Close this help; leave a field"],
];

export function Layout({ crumbs, children }: { crumbs: readonly Crumb[]; children: ComponentChildren }) {
  const help = useRef<HTMLDialogElement>(null);
  const { path } = useLocation();
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const target = event.target instanceof HTMLElement ? event.target : null;
      if (target?.matches("input, textarea, select")) {
        if (event.key === "Escape") target.blur();
        return;
      }
      if (event.key === "?") help.current?.showModal();
      else if (event.key === "/") document.querySelector<HTMLElement>("[data-search]")?.focus();
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, []);
  const skip = (event: MouseEvent): void => {
    event.preventDefault();
    document.getElementById("main")?.focus();
  };
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>Skip to the content</a>
      <header class="top">
        <span class="name">Turnstile</span>
        <nav aria-label="Pages">
          {PAGES.map((page) =>
            page.nav ? (
              <Link key={page.path} to={page.path} {...(path === page.path ? { "aria-current": "page" as const } : {})}>
                {page.nav}
              </Link>
            ) : null,
          )}
        </nav>
        <span class="spring" />
        {ofDirectory && <span class="calm">A folder, read-only</span>}
        <button type="button" onClick={() => help.current?.showModal()}>Help <kbd aria-hidden="true">?</kbd></button>
        {currentKey() !== null && <button type="button" onClick={forgetKey}>Forget the key</button>}
      </header>
      <Silence />
      {crumbs.length > 1 && (
        <nav class="crumbs" aria-label="Where you are">
          <ol>
            {crumbs.map((crumb, index) => (
              <li key={index}>
                {crumb.to ? (
                  <Link to={crumb.to}><SafeLine text={crumb.title} longest={60} /></Link>
                ) : (
                  <span aria-current="page"><SafeLine text={crumb.title} longest={60} /></span>
                )}
              </li>
            ))}
          </ol>
        </nav>
      )}
      <main id="main" tabIndex={-1}>{children}</main>
      <dialog ref={help} aria-labelledby="help-title">
        <h2 id="help-title">Keyboard</h2>
        <dl class="facts">
          {KEYS.map(([keys, does]) => (
            <div key={keys}>
              <dt><kbd>{keys}</kbd></dt>
              <dd>{does}</dd>
            </div>
          ))}
        </dl>
        <form method="dialog" onSubmit={(event) => (event.preventDefault(), help.current?.close())}>
          <button type="submit">Close</button>
        </form>
      </dialog>
    </>
  );
}

/** Says while the server does not answer. What the page shows stays. */
function Silence() {
  const [since, setSince] = useState<number | null>(null);
  useEffect(() => watchSilence(setSince), []);
  return (
    <p class={since === null ? "unseen" : "silence"} role="status">
      {since !== null && `The server does not answer since ${time(since)}. What is shown is from before; the page tries again.`}
    </p>
  );
}
