/** Which page is shown, or the form that asks for the key. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import { KeyForm } from "./KeyForm";
import { Layout } from "./Layout";
import { PAGES, START } from "./pages";
import { Link, match, navigate, useLocation } from "./router";
import { useSession } from "./session";
import { visibleLine } from "./text/visible";

export function App() {
  const { path } = useLocation();
  const { refused } = useSession();
  const shown = useMemo(() => {
    for (const page of PAGES) {
      const params = match(page.path, path);
      if (params) return { page, params };
    }
    return null;
  }, [path]);
  const crumbs = shown ? shown.page.crumbs(shown.params) : [{ title: "No such page" }];
  // With the page above it: many tabs are open at once, and "Tokens" says not whose.
  const title = crumbs.slice(-2).reverse().map((crumb) => visibleLine(crumb.title, 60)).join(" – ");
  useEffect(() => {
    if (path === "/") navigate(START, undefined, { replace: true });
  }, [path]);
  useEffect(() => {
    document.title = `${title} – Turnstile`;
  }, [title]);
  const begun = useRef(path);
  useEffect(() => {
    if (path === begun.current) return;
    begun.current = path;
    // The link that led here may be gone: the keyboard goes on with the new page, and a screen reader reads it.
    document.getElementById("main")?.focus({ preventScroll: true });
  }, [path]);
  if (refused !== null) return <KeyForm refused={refused} />;
  if (path === "/") return null;
  return (
    <Layout crumbs={crumbs}>
      {shown ? (
        <shown.page.component key={path} params={shown.params} />
      ) : (
        <>
          <h1>No such page</h1>
          <p>
            Nothing is at this address. <Link to={START}>Go to the start.</Link>
          </p>
        </>
      )}
    </Layout>
  );
}
