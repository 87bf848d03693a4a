/** The files of a state: each that changed as a diff, and the whole folder as a tree. */

import { useMemo, useState } from "preact/hooks";
import { type Answer, request, urlOf } from "../api/client";
import { useGet, useLoaded } from "../api/hooks";
import { Badge, type Tone } from "../components/Badge";
import { TextDiff } from "../components/Diff";
import { Fold } from "../components/Fold";
import { SafeLine, SafeText } from "../components/SafeText";
import { Await } from "../components/Status";
import { count } from "../text/format";
import { visibleLine } from "../text/visible";

type State = Answer<"/episodes/{episode_id}/replay">["states"][number];
type Change = State["changes"][number];
type File = Answer<"/episodes/{episode_id}/replay/files">["files"][number];

/** Changes that are opened by themselves, and bytes of a file that is read for it. */
const OPENED = 8;
const OPENED_BYTES = 200_000;
const AT_ONCE = 100;
const TONES: Readonly<Record<Change["change"], Tone>> = { added: "good", changed: "warn", removed: "bad" };
const KINDS: Readonly<Record<string, string>> = {
  "100755": "executable",
  "120000": "link",
  "040000": "folder",
  "000000": "special",
};

export function ChangedFiles({ episode_id, state }: { episode_id: string; state: State }) {
  const [shown, setShown] = useState(AT_ONCE);
  const { changes } = state;
  const none = state.state === 0 ? "The first state: its files are below." : "Nothing changed.";
  return (
    <section aria-labelledby="changes">
      <h2 id="changes">Changes</h2>
      {changes.length === 0 && <p class="calm">{none}</p>}
      {changes.slice(0, shown).map((change, index) => (
        <Fold
          key={change.path}
          open={index < OPENED && sizeOf(change) <= OPENED_BYTES}
          summary={
            <>
              <Badge tone={TONES[change.change]}>{change.change}</Badge> <SafeLine text={change.path} />{" "}
              <small>{bytesOf(change)}</small>
            </>
          }
        >
          {() => <ChangeView episode_id={episode_id} change={change} />}
        </Fold>
      ))}
      {changes.length > shown && (
        <button type="button" onClick={() => setShown(shown + 4 * AT_ONCE)}>
          {count(changes.length - shown)} more changes
        </button>
      )}
    </section>
  );
}

function sizeOf({ before, after }: Change): number {
  return (before?.size ?? 0) + (after?.size ?? 0);
}

function bytesOf({ before, after }: Change): string {
  if (!before || !after) return `${count((before ?? after)?.size)} bytes`;
  return `${count(before.size)} → ${count(after.size)} bytes`;
}

function ChangeView({ episode_id, change }: { episode_id: string; change: Change }) {
  const { before, after, path } = change;
  const modes = before && after && before.mode !== after.mode ? `${kindOf(before)} → ${kindOf(after)}` : null;
  const texts = useLoaded(
    (signal) => Promise.all([before, after].map((file) => readFile(episode_id, file, signal))),
    [episode_id, before?.digest, after?.digest],
  );
  return (
    <>
      {modes && <p class="calm">{modes}</p>}
      <NotKept when="Before" file={before} />
      <NotKept when="After" file={after} />
      <Await of={texts}>
        {([old, now]) => {
          if (old === BINARY || now === BINARY) return <p class="calm">Not text: {bytesOf(change)}.</p>;
          if (typeof old !== "string" && typeof now !== "string") return null;
          if (old === now) return <p class="calm">The same content.</p>;
          const [before, after] = withoutEnd(old ?? "", now ?? "");
          return <TextDiff before={before} after={after} label={`Changes of ${visibleLine(path)}`} />;
        }}
      </Await>
    </>
  );
}

/** Two texts without the line feed at their ends, where both have it or one is empty: it is no line of its own. */
function withoutEnd(before: string, after: string): readonly [string, string] {
  const ended = [before, after].every((text) => text === "" || text.endsWith("\n"));
  return ended ? [before.slice(0, -1), after.slice(0, -1)] : [before, after];
}

function kindOf(file: File): string {
  return KINDS[file.mode] ?? "not executable";
}

function NotKept({ when, file }: { when: string; file: File | null }) {
  if (!file?.left_out) return null;
  return <p class="calm">{when}: not kept, <SafeLine text={file.left_out} longest={300} />.</p>;
}

/** Stands for a content that is no text. */
const BINARY = Symbol("binary");

/** The text of a file; null where there is none. */
async function readFile(episode_id: string, file: File | null, signal: AbortSignal): Promise<string | typeof BINARY | null> {
  if (!file?.digest) return null;
  const url = urlOf("/episodes/{episode_id}/replay/{digest}", { path: { episode_id, digest: file.digest } });
  const bytes = await (await request(url, { signal })).arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    return text.includes("\0") ? BINARY : text;
  } catch {
    return BINARY;
  }
}

/** A folder of the tree: what is in it, by name. */
interface Branch {
  readonly folders: Map<string, Branch>;
  readonly files: File[];
}

export function Folder({ episode_id, state }: { episode_id: string; state: State }) {
  return (
    <section aria-labelledby="folder">
      <h2 id="folder">The work folder</h2>
      <Fold summary={`${count(state.files)} files`}>
        {() => <Listing episode_id={episode_id} state={state} />}
      </Fold>
    </section>
  );
}

function Listing({ episode_id, state }: { episode_id: string; state: State }) {
  const options = { path: { episode_id }, query: { state: state.state } };
  const listing = useGet("/episodes/{episode_id}/replay/files", options);
  return <Await of={listing}>{({ files }) => <Tree episode_id={episode_id} files={files} />}</Await>;
}

function Tree({ episode_id, files }: { episode_id: string; files: readonly File[] }) {
  const root = useMemo(() => treeOf(files), [files]);
  const left = files.filter((file) => file.left_out);
  return (
    <>
      {left.length > 0 && (
        <Fold summary={`${count(left.length)} without their content, and why`}>
          {() => <LeftOut files={left} />}
        </Fold>
      )}
      <BranchView episode_id={episode_id} branch={root} />
    </>
  );
}

function treeOf(files: readonly File[]): Branch {
  const root: Branch = { folders: new Map(), files: [] };
  for (const file of files) {
    let at = root;
    for (const name of file.path.split("/").slice(0, -1)) {
      let below = at.folders.get(name);
      if (!below) at.folders.set(name, (below = { folders: new Map(), files: [] }));
      at = below;
    }
    at.files.push(file);
  }
  return root;
}

function BranchView({ episode_id, branch }: { episode_id: string; branch: Branch }) {
  const [shown, setShown] = useState(AT_ONCE);
  return (
    <>
      {[...branch.folders].map(([name, below]) => (
        <Fold key={name} summary={<><SafeLine text={name} />/ <small>{inWords(below)}</small></>}>
          {() => <BranchView episode_id={episode_id} branch={below} />}
        </Fold>
      ))}
      {branch.files.slice(0, shown).map((file) => (
        <Fold
          key={file.path}
          summary={
            <>
              <SafeLine text={file.path.slice(file.path.lastIndexOf("/") + 1)} />{" "}
              <small>
                {count(file.size)} bytes{KINDS[file.mode] ? `, ${KINDS[file.mode]}` : ""}{file.left_out ? ", not kept" : ""}
              </small>
            </>
          }
        >
          {() => <Content episode_id={episode_id} file={file} />}
        </Fold>
      ))}
      {branch.files.length > shown && (
        <button type="button" onClick={() => setShown(shown + 4 * AT_ONCE)}>
          {count(branch.files.length - shown)} more files
        </button>
      )}
    </>
  );
}

function inWords(branch: Branch): string {
  const [folders, files] = [branch.folders.size, branch.files.length];
  return [folders && `${count(folders)} folders`, files && `${count(files)} files`].filter(Boolean).join(", ");
}

function Content({ episode_id, file }: { episode_id: string; file: File }) {
  const text = useLoaded((signal) => readFile(episode_id, file, signal), [episode_id, file.digest]);
  return (
    <>
      <NotKept when="Content" file={file} />
      <Await of={text}>
        {(found) => (found === BINARY ? <p class="calm">Not text.</p> : found === null ? null : <SafeText text={found} />)}
      </Await>
    </>
  );
}

function LeftOut({ files }: { files: readonly File[] }) {
  const [shown, setShown] = useState(AT_ONCE);
  return (
    <>
      <ul>
        {files.slice(0, shown).map((file) => (
          <li key={file.path}>
            <SafeLine text={file.path} />: <SafeLine text={file.left_out ?? ""} longest={300} />
          </li>
        ))}
      </ul>
      {files.length > shown && (
        <button type="button" onClick={() => setShown(shown + 4 * AT_ONCE)}>{count(files.length - shown)} more</button>
      )}
    </>
  );
}
