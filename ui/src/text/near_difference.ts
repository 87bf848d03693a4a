/** Two long texts, cut to what lies around their first difference: lines of millions of characters are not read. */

const BEFORE = 200;
/** Equal characters that a line may begin with before they are cut. */
const LONG = 1_000;
const AROUND = 400;
const MOST = 400_000;

export function nearDifference(before: string, after: string): readonly [string, string] {
  const shorter = Math.min(before.length, after.length);
  let at = 0;
  while (at < shorter && before[at] === after[at]) at++;
  const line = at === 0 ? 0 : before.lastIndexOf("\n", at - 1) + 1;
  const from = at - line > LONG ? at - BEFORE : line;
  // Lines before the difference are equal, so both texts lose the same ones.
  const near = line > AROUND ? before.lastIndexOf("\n", line - AROUND) + 1 : 0;
  const kept = line - near > LONG ? line : near;
  const head = (kept > 0 ? `… (${kept} equal characters before)\n` : "") + before.slice(kept, line);
  const cut = from > line ? `… (${from - line} equal characters) ` : "";
  const end = (text: string): string => {
    const rest = text.slice(from, from + MOST);
    return head + cut + rest + (text.length > from + MOST ? `\n… (${text.length - from - MOST} more characters)` : "");
  };
  return [end(before), end(after)];
}
