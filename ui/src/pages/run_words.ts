/** What the pages of runs have in common: sums over the statistics of `GET /stats`, and queries of the Episodes page. */

import type { Answer } from "../api/client";

export type StatsRow = Answer<"/stats">["total"];

const RUNNING = ["preparing", "running", "grading"] as const;

function sum(row: StatsRow, statuses: readonly string[]): number {
  return statuses.reduce((all, status) => all + (row.statuses[status] ?? 0), 0);
}

export const waitingOf = (row: StatsRow): number => row.statuses["queued"] ?? 0;
export const runningOf = (row: StatsRow): number => sum(row, RUNNING);
export const statusOf = (row: StatsRow, status: string): number => row.statuses[status] ?? 0;
export const endedOf = (row: StatsRow): number => row.episodes - waitingOf(row) - runningOf(row);

/** Null where nothing was sampled. */
export function trainedShare(row: StatsRow): number | null {
  return row.sampled_tokens ? row.trained_tokens / row.sampled_tokens : null;
}

/** Conditions as `GET /episodes` takes them; those without a value are left out. */
export function conditions(of: Readonly<Record<string, string | number | null | undefined>>): URLSearchParams {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(of)) {
    if (value !== null && value !== undefined) query.set(name, String(value));
  }
  return query;
}

/** A dictionary of counts, the most frequent first. */
export function ranked(counts: Readonly<Record<string, number>>): [string, number][] {
  return Object.entries(counts).sort(([a, many], [b, more]) => more - many || (a < b ? -1 : 1));
}
