/** A part that can be folded. What is in it is made when it is first opened. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

interface FoldProps {
  summary: ComponentChildren;
  open?: boolean;
  children: () => ComponentChildren;
}

export function Fold({ summary, open = false, children }: FoldProps) {
  const [opened, setOpened] = useState(open);
  return (
    <details class="fold" open={open} onToggle={(event) => event.currentTarget.open && setOpened(true)}>
      <summary>{summary}</summary>
      {opened && <div class="folded">{children()}</div>}
    </details>
  );
}
