/** A diff in lines, each with its numbers, its sign and its colour. */

import { useMemo, useState } from "preact/hooks";
import { count } from "../text/format";
import { type DiffKind, type DiffLine, around, diffLines, parseUnified } from "../text/diff";
import { SafeText } from "./SafeText";

const AT_ONCE = 400;
const LONGEST_LINE = 2_000;
const SIGNS: Readonly<Record<DiffKind, string>> = { file: "", hunk: "", same: " ", added: "+", removed: "−", note: "" };
const WORDS: Partial<Record<DiffKind, string>> = { added: "added: ", removed: "removed: " };

/** A unified diff, as `git diff` writes it. ``label`` names it for screen readers. */
export function Diff({ diff, label }: { diff: string; label: string }) {
  return <Lines lines={useMemo(() => parseUnified(diff), [diff])} label={label} />;
}

interface TextDiffProps {
  before: string;
  after: string;
  label: string;
  /** How many equal lines are shown around what differs; all, if it is left out. */
  context?: number;
}

/** What changed between two texts. */
export function TextDiff({ before, after, label, context = Infinity }: TextDiffProps) {
  return <Lines lines={useMemo(() => around(diffLines(before, after), context), [before, after, context])} label={label} />;
}

function Lines({ lines, label }: { lines: readonly DiffLine[]; label: string }) {
  const [shown, setShown] = useState(AT_ONCE);
  return (
    <div class="diff-box" tabIndex={0} role="region" aria-label={label}>
      <table class="diff">
        <tbody>
          {lines.slice(0, shown).map((line, index) => (
            <tr class={line.kind} key={index}>
              <td class="number">{line.before}</td>
              <td class="number">{line.after}</td>
              <td class="sign">
                <span aria-hidden="true">{SIGNS[line.kind]}</span>
                <span class="unseen">{WORDS[line.kind]}</span>
              </td>
              <td>
                <SafeText inline text={line.text} limit={LONGEST_LINE} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {lines.length > shown && (
        <p class="more">
          <button type="button" onClick={() => setShown(shown + 5 * AT_ONCE)}>
            {count(lines.length - shown)} more lines
          </button>
        </p>
      )}
    </div>
  );
}
