/** Text that an agent, a model, a task or a tool wrote, made safe to read. The same rule as `turnstile/visible.py`:
 * characters that are not shown as themselves (control characters, terminal escapes, marks of direction and format,
 * separators of lines, half characters) become their escape. */

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]+/gu;
const NAMED: Readonly<Record<string, string>> = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

export interface Piece {
  readonly text: string;
  /** The text is the escape of characters that would not be seen. */
  readonly escaped: boolean;
}

/** ``lines``: line feeds and tabs stay, and a carriage return before a line feed is dropped. */
export function visible(text: string, lines = true): Piece[] {
  const given = lines ? text.replaceAll("\r\n", "\n") : text;
  const pieces: Piece[] = [];
  let plain = "";
  let at = 0;
  for (const found of given.matchAll(HIDDEN)) {
    plain += given.slice(at, found.index);
    at = found.index + found[0].length;
    for (const character of found[0]) {
      if (lines && (character === "\n" || character === "\t")) plain += character;
      else {
        if (plain) pieces.push({ text: plain, escaped: false });
        plain = "";
        pieces.push({ text: escapeOf(character), escaped: true });
      }
    }
  }
  plain += given.slice(at);
  if (plain) pieces.push({ text: plain, escaped: false });
  return pieces;
}

/** One line of plain text, for labels and titles. */
export function visibleLine(text: string, longest = 200): string {
  const cut = text.length > longest ? `${text.slice(0, longest)}…` : text;
  return visible(cut, false)
    .map((piece) => piece.text)
    .join("");
}

function escapeOf(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  const named = NAMED[character];
  if (named !== undefined) return named;
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  if (code < 0x10000) return `\\u${code.toString(16).padStart(4, "0")}`;
  return `\\U${code.toString(16).padStart(8, "0")}`;
}
