/** Lines of a diff: read from a unified diff, or found between two texts. */

export type DiffKind = "file" | "hunk" | "same" | "added" | "removed" | "note";

export interface DiffLine {
  readonly kind: DiffKind;
  readonly text: string;
  /** Line numbers, from 1. Null where the side has no such line. */
  readonly before: number | null;
  readonly after: number | null;
}

/** The lines of a unified diff (`diff -u`, `git diff`) of any number of files. */
export function parseUnified(diff: string): DiffLine[] {
  const found: DiffLine[] = [];
  let before = 0;
  let after = 0;
  let left = [0, 0]; // lines of the hunk that are still to come, on each side
  const lines = diff.split("\n");
  if (lines.at(-1) === "") lines.pop();
  for (const line of lines) {
    const inside = (left[0] ?? 0) > 0 || (left[1] ?? 0) > 0;
    const hunk = inside ? null : /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@/.exec(line);
    if (hunk) {
      before = Number(hunk[1]);
      after = Number(hunk[3]);
      left = [Number(hunk[2] ?? 1), Number(hunk[4] ?? 1)];
      found.push({ kind: "hunk", text: line, before: null, after: null });
    } else if (!inside) found.push({ kind: line.startsWith("\\") ? "note" : "file", text: line, before: null, after: null });
    else if (line.startsWith("+")) {
      found.push({ kind: "added", text: line.slice(1), before: null, after: after++ });
      left = [left[0] ?? 0, (left[1] ?? 0) - 1];
    } else if (line.startsWith("-")) {
      found.push({ kind: "removed", text: line.slice(1), before: before++, after: null });
      left = [(left[0] ?? 0) - 1, left[1] ?? 0];
    } else if (line.startsWith("\\")) found.push({ kind: "note", text: line, before: null, after: null });
    else {
      found.push({ kind: "same", text: line.slice(1), before: before++, after: after++ });
      left = [(left[0] ?? 0) - 1, (left[1] ?? 0) - 1];
    }
  }
  return found;
}

/** Products of line counts above which two texts are not compared line by line: a table of so many cells. */
const MOST_CELLS = 4_000_000;

function linesOf(text: string): string[] {
  return text === "" ? [] : text.split("\n");
}

/** The lines of ``before`` and ``after``, by their longest common subsequence. Texts that differ in too many lines are
 * shown as one replaced by the other. */
export function diffLines(before: string, after: string): DiffLine[] {
  const [a, b] = [linesOf(before), linesOf(after)];
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const [aEnd, bEnd] = [a.length - tail, b.length - tail];
  const found: DiffLine[] = [];
  const same = (i: number, j: number): void =>
    void found.push({ kind: "same", text: a[i] ?? "", before: i + 1, after: j + 1 });
  const removed = (i: number): void => void found.push({ kind: "removed", text: a[i] ?? "", before: i + 1, after: null });
  const added = (j: number): void => void found.push({ kind: "added", text: b[j] ?? "", before: null, after: j + 1 });
  for (let i = 0; i < head; i++) same(i, i);
  const [rows, columns] = [aEnd - head, bEnd - head];
  let [i, j] = [head, head];
  if (rows * columns <= MOST_CELLS) {
    const width = columns + 1;
    const longest = new Uint32Array((rows + 1) * width); // of what follows (i, j)
    for (let x = rows - 1; x >= 0; x--) {
      for (let y = columns - 1; y >= 0; y--) {
        longest[x * width + y] =
          a[head + x] === b[head + y]
            ? (longest[(x + 1) * width + y + 1] ?? 0) + 1
            : Math.max(longest[(x + 1) * width + y] ?? 0, longest[x * width + y + 1] ?? 0);
      }
    }
    while (i < aEnd && j < bEnd) {
      const [x, y] = [i - head, j - head];
      if (a[i] === b[j]) same(i++, j++);
      else if ((longest[(x + 1) * width + y] ?? 0) >= (longest[x * width + y + 1] ?? 0)) removed(i++);
      else added(j++);
    }
  }
  while (i < aEnd) removed(i++);
  while (j < bEnd) added(j++);
  for (let k = 0; k < tail; k++) same(aEnd + k, bEnd + k);
  return found;
}

/** The lines with at most ``context`` equal ones before and after what differs; how many others there were is a note. */
export function around(lines: readonly DiffLine[], context: number): DiffLine[] {
  const found: DiffLine[] = [];
  for (let index = 0; index < lines.length; ) {
    let end = index;
    while (end < lines.length && lines[end]?.kind === "same") end++;
    const head = index === 0 ? 0 : context;
    const tail = end === lines.length ? 0 : context;
    if (end - index > head + tail + 1) {
      found.push(...lines.slice(index, index + head));
      found.push({ kind: "note", text: `… ${end - index - head - tail} equal lines`, before: null, after: null });
      found.push(...lines.slice(end - tail, end));
    } else found.push(...lines.slice(index, end));
    for (index = end; index < lines.length && lines[index]?.kind !== "same"; index++) found.push(lines[index] as DiffLine);
  }
  return found;
}
