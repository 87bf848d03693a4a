/** Answers of routes that answer in more than one form, by the form that is asked for. */

import { get, type QueryValue } from "./client";
import type { components } from "./schema";

type Schemas = components["schemas"];

export type Episode = Schemas["Episode"];
export type EpisodeSummary = Schemas["EpisodeSummary"];
export type EpisodeSummaryPage = Schemas["EpisodeSummaryPage"];
export type TurnOutline = Schemas["TurnOutline"];
export type TurnOutlines = Schemas["TurnOutlines"];
export type RootOutline = Schemas["RootOutline"];
export type BreakEntry = Schemas["BreakEntry"];
export type WorkDiff = Schemas["WorkDiff"];
export type Span = Schemas["Span"];
export type Message = Schemas["Message"];

export type EpisodesQuery = Readonly<Record<string, QueryValue | readonly QueryValue[]>>;

/** A light row of each episode: conditions, `sort`, `order`, `offset`, `limit` as `GET /episodes` takes them. */
export function getSummaries(query: EpisodesQuery, signal?: AbortSignal): Promise<EpisodeSummaryPage> {
  return get("/episodes", { query: { ...query, view: "summary" } }, signal) as Promise<EpisodeSummaryPage>;
}

/** The turns of an episode without their tokens. */
export function getOutlines(episode_id: string, signal?: AbortSignal): Promise<TurnOutlines> {
  const options = { path: { episode_id }, query: { arrays: false } };
  return get("/episodes/{episode_id}/turns", options, signal) as Promise<TurnOutlines>;
}
