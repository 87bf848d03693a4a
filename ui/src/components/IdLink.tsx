/** A link whose text is an id, cut in its middle where there is no room: ids begin with a time, their ends differ. */

import { Link } from "../router";
import { visibleLine } from "../text/visible";
import { SafeLine } from "./SafeText";

const TAIL = 6;
/** Longer than any id that the server makes. */
const LONGEST = 80;

/** ``to``: a path below `/ui`, as `Link` has it. */
export function IdLink({ id, to }: { id: string; to: string }) {
  const cut = Math.max(0, id.length - TAIL);
  return (
    <Link to={to} class="id" title={visibleLine(id)} aria-label={visibleLine(id)}>
      <span><SafeLine text={id.slice(0, cut)} longest={LONGEST} /></span>
      <span><SafeLine text={id.slice(cut)} /></span>
    </Link>
  );
}
