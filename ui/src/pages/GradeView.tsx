/** The grade of an episode and what it is made of: its parts, and the evidence of each grader. */

import type { Answer } from "../api/client";
import type { TurnOutline } from "../api/looks";
import { Badge } from "../components/Badge";
import { Facts } from "../components/Facts";
import { Fold } from "../components/Fold";
import { JsonView } from "../components/JsonView";
import { SafeLine } from "../components/SafeText";
import { Link, useLocation } from "../router";
import { reward, time } from "../text/format";
import type { TurnTree } from "../text/turn_tree";
import { Evidence } from "./GradeEvidence";

type Episode = Answer<"/episodes/{episode_id}">;

interface GradeViewProps {
  episode: Episode;
  tree: TurnTree | null;
  queryOf: (changes: Readonly<Record<string, string | null>>) => URLSearchParams;
}

export function GradeView({ episode, tree, queryOf }: GradeViewProps) {
  const grading = episode.grading ?? {};
  const parts = Object.entries(episode.reward_components ?? {});
  const late = episode.late_rewards;
  return (
    <section aria-labelledby="grade">
      <h2 id="grade">Grade</h2>
      <Facts
        facts={[
          ["Reward", <strong>{reward(episode.reward)}</strong>],
          ...parts.map(([name, value]) => [`Part: ${name}`, reward(value)] as const),
          ["Work", episode.work ? "kept" : "not kept"],
        ]}
      />
      {parts.length === 0 && episode.reward == null && Object.keys(grading).length === 0 && <p class="calm">No grade.</p>}
      <Evidence grading={grading} parts={episode.reward_components ?? {}} />
      <TurnRewards rewards={episode.turn_rewards ?? {}} tree={tree} queryOf={queryOf} />
      {late && (
        <section aria-labelledby="late">
          <h3 id="late">From the trainer</h3>
          <JsonView value={late} />
        </section>
      )}
      <Regrades regrades={episode.regrades ?? []} />
      <Fold summary="The grading as JSON">{() => <JsonView value={grading} depth={2} />}</Fold>
    </section>
  );
}

interface TurnRewardsProps {
  rewards: Readonly<Record<string, number>>;
  tree: TurnTree | null;
  queryOf: GradeViewProps["queryOf"];
}

function TurnRewards({ rewards, tree, queryOf }: TurnRewardsProps) {
  const { path } = useLocation();
  const turns = Object.entries(rewards);
  if (turns.length === 0) return null;
  const named = (turn: TurnOutline | undefined, id: string) =>
    turn ? <Link to={path} query={queryOf({ turn: String(turn.seq), show: null })}>turn {turn.seq}</Link> : <SafeLine text={id} />;
  return (
    <section aria-labelledby="turn-rewards">
      <h3 id="turn-rewards">Rewards of turns</h3>
      <ul class="scroll">
        {turns.map(([id, value]) => <li key={id}>{named(tree?.byId.get(id), id)}: {reward(value)}</li>)}
      </ul>
    </section>
  );
}

function Regrades({ regrades }: { regrades: NonNullable<Episode["regrades"]> }) {
  if (regrades.length === 0) return null;
  return (
    <section aria-labelledby="regrades">
      <h3 id="regrades">Judged again</h3>
      {regrades.map((each) => (
        <Fold
          key={each.regrade_id}
          summary={
            <>
              {time(each.at)}: reward {reward(each.before.reward)} → {reward(each.after.reward)}{" "}
              {each.applied && <Badge tone="good">applied</Badge>} {each.reason && <SafeLine text={each.reason} />}
            </>
          }
        >
          {() => <JsonView value={each} depth={2} />}
        </Fold>
      ))}
    </section>
  );
}
