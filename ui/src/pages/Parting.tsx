/** The text where a part of a group's token tree begins, beside the other ways on from the same place. */

import { type Answer, get } from "../api/client";
import { useLoaded } from "../api/hooks";
import { SafeText } from "../components/SafeText";
import { Await } from "../components/Status";
import { Link, pathOf } from "../router";
import { textOfBytes } from "../text/bytes";
import { count } from "../text/format";

type Group = Answer<"/groups/{group_id}">;

/** Tokens that are shown before the parting, and after it. */
const BEFORE = 60;
const AFTER = 60;
/** Ways that are shown at once. */
const MOST = 8;

interface PartingProps {
  group: Group;
  node: number;
  nameOf: (member: number) => string;
}

export function Parting({ group, node, nameOf }: PartingProps) {
  const parent = group.nodes[node]?.parent ?? -1;
  const beside = group.nodes.flatMap((each, index) => (each.parent === parent ? [index] : []));
  const shown = [node, ...beside.filter((each) => each !== node)].slice(0, MOST).sort((a, b) => a - b);
  const start = group.nodes[node]?.start ?? 0;
  return (
    <section aria-labelledby="parting">
      <h3 id="parting">
        {parent < 0 ? "The beginning" : `The parting at token ${count(start)}`}
        {beside.length > 1 ? `: ${count(beside.length)} ways` : ""}
        {beside.length > shown.length ? `, of which ${count(shown.length)} are shown` : ""}
      </h3>
      <ul class="ways">
        {shown.map((each) => (
          <li key={each} class={each === node ? "chosen" : ""}>
            <Way group={group} node={each} nameOf={nameOf} chosen={each === node} />
          </li>
        ))}
      </ul>
    </section>
  );
}

function Way({ group, node, nameOf, chosen }: PartingProps & { chosen: boolean }) {
  const { turn_id = "", start = 0, end = 0, members = [] } = group.nodes[node] ?? {};
  const episode_id = group.members[members[0] ?? -1]?.summary.episode_id ?? "";
  const from = Math.max(0, start - BEFORE);
  const range = { start: from, count: Math.min(end, start + AFTER) - from, episode_id };
  const window = useLoaded(
    (signal) => get("/turns/{turn_id}/tokens", { path: { turn_id }, query: range }, signal),
    [turn_id, range],
  );
  return (
    <>
      <p>
        {chosen && <strong>Chosen: </strong>}
        {members.map(nameOf).join(" ")}{" "}
        <Link to={pathOf("episodes", episode_id, "tokens", turn_id)} query={new URLSearchParams({ at: String(start) })}>
          all its tokens
        </Link>
      </p>
      <Await of={window}>
        {({ bytes }) => (
          <>
            {start > from && <div class="shared"><SafeText text={textOfBytes(bytes.slice(0, start - from))} /></div>}
            <SafeText text={textOfBytes(bytes.slice(start - from))} />
            {end > start + AFTER && <p class="calm">… {count(end - start - AFTER)} further tokens</p>}
          </>
        )}
      </Await>
    </>
  );
}
