/** The text of tokens in a row: a character that is split over tokens is shown whole, at the token in which it begins. */

const whole = new TextDecoder("utf-8", { ignoreBOM: true });
/** A token that only goes on with the character of a token before it. */
export const CONTINUED = "⋯";

function bytesOf(hex: string): number[] {
  return Array.from({ length: hex.length / 2 }, (_, at) => Number.parseInt(hex.slice(2 * at, 2 * at + 2), 16));
}

/** How many bytes the character has that begins with ``lead``. */
function lengthOf(lead: number): number {
  return lead >= 0xf0 && lead < 0xf8 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
}

/** ``bytes``: the hex of each token; ``text``: each by itself, which stands where no character is split. */
export function joinedTexts(bytes: readonly string[], text: readonly string[]): string[] {
  return text.map((alone, index) => {
    if (!alone.includes("\ufffd")) return alone;
    const own = bytesOf(bytes[index] ?? "");
    let from = 0;
    while (from < own.length && (own[from] ?? 0) >> 6 === 0b10) from += 1;
    let last = own.length - 1;
    while (last > from && (own[last] ?? 0) >> 6 === 0b10) last -= 1;
    let missing = last >= from ? last + lengthOf(own[last] ?? 0) - own.length : 0;
    for (let next = index + 1; missing > 0 && next < bytes.length; next += 1) {
      const more = bytesOf(bytes[next] ?? "").slice(0, missing);
      if (more.length === 0 || more.some((byte) => byte >> 6 !== 0b10)) break;
      own.push(...more);
      missing -= more.length;
    }
    const shown = whole.decode(new Uint8Array(own.slice(from)));
    return from > 0 ? CONTINUED + shown : shown;
  });
}
