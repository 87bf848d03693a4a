/** The rollouts of a group beside each other: rewards, advantages, and the tree of their tokens. */

import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { Answer } from "../api/client";
import { changedGroup } from "../api/events";
import { useFresh, useGet } from "../api/hooks";
import { StatusBadge } from "../components/Badge";
import { Facts } from "../components/Facts";
import { Gauge } from "../components/Gauge";
import { IdLink } from "../components/IdLink";
import { SafeLine } from "../components/SafeText";
import { Await } from "../components/Status";
import { TokenTree } from "../components/TokenTree";
import { Link, navigate, type Params, pathOf, useLocation } from "../router";
import { count, reward } from "../text/format";
import { Parting } from "./Parting";
import { TaskName } from "./TaskName";

type Group = Answer<"/groups/{group_id}">;

export function GroupPage({ params }: { params: Params }) {
  const group_id = params.id ?? "";
  const group = useGet("/groups/{group_id}", { path: { group_id } });
  useFresh(group, { concerns: (event) => changedGroup(event) === group_id, poll: false });
  return (
    <>
      <h1>Group <SafeLine text={group_id} /></h1>
      <Await of={group}>{(found) => <Shown group={found} />}</Await>
    </>
  );
}

function Shown({ group }: { group: Group }) {
  const { path, query } = useLocation();
  const { members, nodes } = group;
  const running = members.filter(({ summary }) => summary.ended_s === null).length;
  const equal = new Set(members.flatMap(({ summary }) => summary.reward ?? [])).size <= 1;
  const graded = members.filter(({ summary }) => summary.reward !== null).length;
  const asked = Number(query.get("node") ?? NaN);
  const chosen = Number.isInteger(asked) && nodes[asked] ? asked : null;
  const choose = (node: number): void => {
    const next = new URLSearchParams(query);
    next.set("node", String(node));
    navigate(path, next, { replace: true });
  };
  const before = useRef({ group, chosen });
  useLayoutEffect(() => {
    const { group: old, chosen: was } = before.current;
    const now = old === group || was === null ? chosen : sameNode(old, was, group);
    before.current = { group, chosen: now };
    if (now !== null && now !== chosen) choose(now);
  }, [group, chosen]);
  const once = useMemo(() => nodes.reduce((sum, { start, end }) => sum + end - start, 0), [nodes]);
  const all = useMemo(() => nodes.reduce((sum, { start, end, members: through }) => sum + (end - start) * through.length, 0), [nodes]);
  return (
    <>
      <Facts
        facts={[
          ["Task", members[0] && <TaskName of={members[0].summary} />],
          ["Rollouts", group.further ? `${count(members.length)} (and ${count(group.further)} older ones)` : count(members.length)],
          ["Still running", running ? count(running) : null],
          ["Mean reward", reward(group.mean)],
          ["Deviation (n − 1)", reward(group.std)],
          ["Signal", graded < 2 ? "fewer than two rewards" : equal ? "none: all rewards are equal" : "yes"],
        ]}
      />
      <p class="table-tools">
        <Link to="/episodes" query={new URLSearchParams({ group_id: group.group_id })}>Its episodes as a list</Link>
        {running > 0 && <span class="calm">Changes are shown as they come.</span>}
      </p>
      <Members group={group} />
      <section aria-labelledby="tree">
        <h2 id="tree">Tokens</h2>
        {nodes.length === 0 ? (
          <p class="calm">{running ? "No sample yet." : "There is no sample."}</p>
        ) : (
          <>
            <p class="calm">
              What rollouts share is drawn once: {count(once)} tokens for {count(all)}. Long parts are long; the bar at
              the bottom of a part is the share that was sampled; a thick right edge is where a sample ends.
            </p>
            <TokenTree label="Tokens of the group" nodes={nodes} nameOf={nameOf} chosen={chosen} onChoose={choose} />
            {chosen !== null && <Parting group={group} node={chosen} nameOf={nameOf} />}
          </>
        )}
      </section>
    </>
  );
}

/** The chosen part in a newer tree: that with the same token of the same sample, else of the same rollouts. */
function sameNode(old: Group, chosen: number, now: Group): number | null {
  const was = old.nodes[chosen];
  if (was === undefined) return null;
  const idOf = (group: Group) => (member: number): string => group.members[member]?.summary.episode_id ?? "";
  const rollouts = new Set(was.members.map(idOf(old)));
  const places = now.nodes.flatMap(({ start, end, members }, index) =>
    start <= was.start && was.start < end && members.map(idOf(now)).some((id) => rollouts.has(id)) ? [index] : [],
  );
  return places.find((index) => now.nodes[index]?.turn_id === was.turn_id) ?? places[0] ?? null;
}

/** Rollouts are numbered from 1, the oldest first. */
function nameOf(member: number): string {
  return `#${member + 1}`;
}

function Members({ group: { members } }: { group: Group }) {
  const scale = (values: readonly (number | null)[]): { least: number; most: number } => {
    const known = values.filter((value) => value !== null);
    return { least: Math.min(0, ...known), most: Math.max(0, ...known) };
  };
  const rewards = scale(members.map(({ summary }) => summary.reward));
  const advantages = scale(members.map(({ advantage }) => advantage));
  return (
    <div class="scroll-x" tabIndex={0} role="region" aria-label="Table: Rollouts">
      <table class="compare rollouts">
        <caption class="unseen">Rollouts</caption>
        <thead>
          <tr>
            <th scope="col">#</th>
            <th scope="col">Episode</th>
            <th scope="col">Status</th>
            <th scope="col" colSpan={2}>Reward</th>
            <th scope="col" colSpan={2}>Advantage</th>
            <th scope="col">Centred</th>
            <th scope="col">Turns</th>
            <th scope="col">Sampled</th>
            <th scope="col">Samples</th>
            <th scope="col">Why</th>
          </tr>
        </thead>
        <tbody>
          {members.map(({ summary, advantage, centred, rows }, index) => (
            <tr key={summary.episode_id}>
              <th scope="row">{nameOf(index)}</th>
              <td>
                <IdLink id={summary.episode_id} to={pathOf("episodes", summary.episode_id)} />
              </td>
              <td><StatusBadge status={summary.status} /></td>
              <td class="numeric">{reward(summary.reward)}</td>
              <td><Gauge value={summary.reward} {...rewards} /></td>
              <td class="numeric">{signed(advantage)}</td>
              <td><Gauge value={advantage} {...advantages} /></td>
              <td class="numeric">{signed(centred)}</td>
              <td class="numeric">{count(summary.turns)}</td>
              <td class="numeric">{count(summary.sampled_tokens)}</td>
              <td class="samples">
                {rows.map((turn_id, sample) => (
                  <span key={turn_id}>
                    <Link to={pathOf("episodes", summary.episode_id, "tokens", turn_id)}>
                      <span class="unseen">tokens of sample </span>{sample + 1}
                    </Link>{" "}
                  </span>
                ))}
              </td>
              <td><SafeLine text={summary.why} longest={300} /></td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function signed(value: number | null): string {
  return value !== null && value > 0 ? `+${reward(value)}` : reward(value);
}
