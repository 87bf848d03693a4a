/** What is shown while data is loading, or did not come. */

import type { ComponentChildren } from "preact";
import type { ApiError } from "../api/client";
import type { Loading } from "../api/hooks";
import { SafeText } from "./SafeText";

export function ErrorBox({ error, retry }: { error: ApiError; retry?: () => void }) {
  return (
    <div class="error" role="alert">
      <strong>{error.status ? `${error.status} ${error.type}` : "No answer"}</strong>
      <SafeText text={error.message} />
      {retry && <button type="button" onClick={retry}>Try again</button>}
    </div>
  );
}

/** ``children`` of the data once it is there; before that, that it is loading or why it cannot be had. That the server
 * does not answer stands at the top of the page (`Layout`), and not beside data that was had before. */
export function Await<Data>({ of, children }: { of: Loading<Data>; children: (data: Data) => ComponentChildren }) {
  return (
    <>
      {of.state === "error" && (of.data === null || of.error.status !== 0) && <ErrorBox error={of.error} retry={of.reload} />}
      {of.data !== null && children(of.data)}
      {of.state === "loading" && of.data === null && <p role="status">Loading…</p>}
    </>
  );
}
