/** What a task is called in a list: its id and its title; of an inline task the title first, because its id says
 * nothing to a reader. */

import { SafeLine } from "../components/SafeText";

const INLINE = "inline-";

export function TaskName({ of: { task, title } }: { of: { readonly task: string; readonly title: string | null } }) {
  const [first, second] = task.startsWith(INLINE) && title ? [title, task] : [task, title];
  return <><SafeLine text={first} /> {second && <small><SafeLine text={second} /></small>}</>;
}
