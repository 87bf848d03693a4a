/** How tokens are coloured: for each choice the classes with their words. A class is a ground and a kind of line. */

import type { Token, TokenWindow } from "../api/token_pages";

export const COLOURS = ["mask", "logprob", "version", "turn", "audit"] as const;
export type Colour = (typeof COLOURS)[number];
export const TITLES: Readonly<Record<Colour, string>> = {
  mask: "loss mask",
  logprob: "logprob",
  version: "weight version",
  turn: "turn",
  audit: "audited distance",
};

const LOGPROBS = [-0.1, -0.7, -2.3, -4.6];
const DISTANCES = [0.01, 0.05, 0.2, 1];
const STEPS = 5;

/** Largest distance of each audited turn, in nats. */
export type Distances = ReadonlyMap<string, number>;

/** The step of a token, 0 to 4; null: nothing is known. */
export function stepOf(colour: Colour, token: Token, window: TokenWindow, distances: Distances): number | null {
  if (colour === "mask") return token.trained ? 2 : null;
  if (colour === "version") return token.version === null ? null : token.version % STEPS;
  if (colour === "turn") return token.turn % STEPS;
  if (token.logprob === null) return null;
  const logprob = token.logprob;
  if (colour === "logprob") return LOGPROBS.filter((edge) => logprob < edge).length;
  const found = distances.get(window.turns[token.turn]?.turn_id ?? "");
  return found === undefined ? null : DISTANCES.filter((edge) => found >= edge).length;
}

/** The legend: each step with its words; step null last. */
export function legendOf(colour: Colour, window: TokenWindow): (readonly [number | null, string])[] {
  if (colour === "mask") return [[2, "trained (mask 1)"], [null, "not trained (mask 0)"]];
  if (colour === "version") {
    return [...grouped(window.weight_version_names), [null, "not sampled by the policy"]];
  }
  if (colour === "turn") return grouped(window.turns.map((turn) => String(turn.seq)));
  if (colour === "logprob") {
    return [...ranges(LOGPROBS, "≥", "<"), [null, "not sampled by the policy"]];
  }
  return [...ranges(DISTANCES, "<", "≥"), [null, "not audited"]];
}

function ranges(edges: readonly number[], near: string, far: string): (readonly [number, string])[] {
  return [...edges, null].map((edge, step) => [step, edge === null ? `${far} ${edges[step - 1]}` : `${near} ${edge}`]);
}

function grouped(names: readonly string[]): (readonly [number, string])[] {
  return Array.from({ length: Math.min(STEPS, names.length) }, (_, step) => {
    const same = names.filter((_, index) => index % STEPS === step);
    return [step, same.slice(0, 3).join(", ") + (same.length > 3 ? ", …" : "")];
  });
}
