/** Text of tokens: their bytes, in hex, put together before they are read, since one character may lie in several. */

export function textOfBytes(hex: readonly string[]): string {
  const all = hex.join("");
  const bytes = new Uint8Array(all.length / 2);
  for (let index = 0; index < bytes.length; index++) bytes[index] = parseInt(all.slice(2 * index, 2 * index + 2), 16);
  return new TextDecoder().decode(bytes);
}
