/** Numbers and times as the viewer writes them: short, in one form everywhere. */

const COUNT = new Intl.NumberFormat("en");
const REWARD = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });

export const NONE = "–";

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : COUNT.format(value);
}

export function reward(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : REWARD.format(value);
}

/** A share of 1 as percent. */
export function share(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

/** A duration in seconds. */
export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

/** Unix time in seconds, as local date and time. */
export function time(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  const at = new Date(value * 1000);
  const two = (part: number): string => String(part).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}
