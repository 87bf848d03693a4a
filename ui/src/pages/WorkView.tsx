/** What the agent changed in its work folder, file by file, compared when it is asked for: that takes a sandbox. */

import { useEffect, useRef, useState } from "preact/hooks";
import { type Answer, type ApiError, get } from "../api/client";
import { asApiError } from "../api/hooks";
import type { WorkDiff } from "../api/looks";
import { Badge, type Tone } from "../components/Badge";
import { Diff } from "../components/Diff";
import { Fold } from "../components/Fold";
import { SafeLine, SafeText } from "../components/SafeText";
import { ErrorBox } from "../components/Status";
import { count } from "../text/format";
import { visibleLine } from "../text/visible";

type FileChange = NonNullable<WorkDiff["files"]>[number];

/** What a refusal means to who reads the page: none of these is a failure of it. */
const REFUSALS: Readonly<Record<string, string>> = {
  conflict: "The work can be compared when the episode has ended.",
  read_only: "Comparing takes a sandbox, and this viewer reads a directory without a server.",
  work_not_kept: "No work of this episode is kept.",
  invalid_value: "This server does not know the task, so there is nothing to compare with.",
  task_failed: "The task cannot be set up, so there is nothing to compare with.",
  sandbox_unavailable: "No sandbox can be made for it now.",
  sandbox_failed: "The sandbox in which it was compared was lost.",
};
const AGAIN = new Set(["conflict", "sandbox_unavailable", "sandbox_failed"]);
const OPEN = 3;

export function WorkView({ episode }: { episode: Answer<"/episodes/{episode_id}"> }) {
  const [asked, setAsked] = useState<"no" | "waits" | WorkDiff | ApiError>("no");
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  const ask = (): void => {
    abort.current?.abort();
    const now = new AbortController();
    abort.current = now;
    setAsked("waits");
    get("/episodes/{episode_id}/work", { path: { episode_id: episode.episode_id } }, now.signal).then(setAsked, (reason: unknown) =>
      now.signal.aborted ? undefined : setAsked(asApiError(reason)),
    );
  };
  return (
    <section aria-labelledby="work">
      <h2 id="work">Work</h2>
      {asked === "no" && (
        <>
          <p class="calm">
            What the agent changed, against the work folder as the task makes it now. The first time, that takes as long
            as a sandbox and the task's set-up do.
            {!episode.work && " The record says that no work is kept."}
          </p>
          <button type="button" onClick={ask}>Compare the work</button>
        </>
      )}
      {asked === "waits" && <p role="status">Comparing…</p>}
      {asked instanceof Error && <Refused error={asked} ask={ask} />}
      {typeof asked === "object" && !(asked instanceof Error) && <Shown work={asked} />}
    </section>
  );
}

function Refused({ error, ask }: { error: ApiError; ask: () => void }) {
  const words = REFUSALS[error.type];
  if (words === undefined) return <ErrorBox error={error} retry={ask} />;
  return (
    <div class="hint" role="status">
      <p>{words}</p>
      <SafeText text={error.message} limit={4_000} />
      {AGAIN.has(error.type) && <button type="button" onClick={ask}>Try again</button>}
    </div>
  );
}

function Shown({ work }: { work: WorkDiff }) {
  const { files = [], left_out = [], further = 0, refused } = work;
  return (
    <>
      {refused && <p class="hint">The work cannot be read: <SafeText inline text={refused} limit={2_000} /></p>}
      <p role="status">
        {count(files.length + further)} {files.length + further === 1 ? "file" : "files"} changed
        {further > 0 && `, of which ${count(further)} are not listed`}.
      </p>
      {files.map((file, index) => <FileView key={file.path} file={file} open={index < OPEN} />)}
      {left_out.length > 0 && (
        <section aria-labelledby="left-out">
          <h3 id="left-out">Not taken, and not compared</h3>
          <ul class="left-out">
            {left_out.map(({ path, reason }) => (
              <li key={path}><SafeLine text={path} longest={300} />: <SafeLine text={reason} longest={400} /></li>
            ))}
          </ul>
        </section>
      )}
    </>
  );
}

const TONES: Readonly<Record<FileChange["change"], Tone>> = { added: "good", modified: "calm", deleted: "bad", mode: "calm" };

function FileView({ file, open }: { file: FileChange; open: boolean }) {
  const { path, change, diff, omitted, left_out, binary } = file;
  return (
    <Fold
      open={open}
      summary={
        <>
          <Badge tone={TONES[change]}>{change}</Badge> <SafeLine text={path} longest={300} />{" "}
          <small>{sizesOf(file)}</small> {left_out && <Badge tone="warn">not given to the graders</Badge>}
        </>
      }
    >
      {() => (
        <>
          {left_out && <p>Left out: <SafeText inline text={left_out} limit={2_000} /></p>}
          {modesOf(file)}
          {diff ? (
            <Diff diff={diff} label={`Diff of ${visibleLine(path)}`} />
          ) : (
            <p class="calm">{omitted ? <>No diff: <SafeText inline text={omitted} limit={2_000} /></> : binary ? "A binary file." : "Its content is the same."}</p>
          )}
        </>
      )}
    </Fold>
  );
}

function sizesOf({ size_before, size_after }: FileChange): string {
  const sizes = [size_before, size_after].filter((size) => size !== null);
  return `${[...new Set(sizes)].map(count).join(" → ")} bytes`;
}

function modesOf({ mode_before, mode_after }: FileChange) {
  if (mode_before === mode_after || mode_before === null || mode_after === null) return null;
  return <p class="calm">Mode {mode_before} → {mode_after}</p>;
}
