/** Values of free JSON, as what is expected of them, or as nothing. */

export type Json = Readonly<Record<string, unknown>>;

export function objectOf(value: unknown): Json {
  return value !== null && typeof value === "object" && !Array.isArray(value) ? (value as Json) : {};
}

export function arrayOf(value: unknown): readonly unknown[] {
  return Array.isArray(value) ? value : [];
}

export function numberOf(value: unknown): number | null {
  return typeof value === "number" ? value : null;
}

/** A text as it is, other values as JSON has them; nothing for null and what is not there. */
export function textOf(value: unknown): string {
  if (typeof value === "string") return value;
  return value === null || value === undefined ? "" : JSON.stringify(value);
}
