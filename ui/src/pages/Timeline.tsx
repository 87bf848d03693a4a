/** The time of an episode beside its conversation: choosing a span chooses its turn, and a turn its spans. */

import type { RefObject } from "preact";
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { Answer } from "../api/client";
import type { TurnOutline } from "../api/looks";
import { type LaneSpan, Swimlane } from "../components/Swimlane";
import { count } from "../text/format";
import { KINDS, laneSpans, spansOfTurn, turnOfSpan } from "../text/lanes";
import type { TurnTree } from "../text/turn_tree";

interface TimelineProps {
  report: Answer<"/episodes/{episode_id}/spans">;
  tree: TurnTree | null;
  chosen: TurnOutline | null;
  running: boolean;
  onChoose: (turn: TurnOutline) => void;
}

export function Timeline({ report, tree, chosen, running, onChoose }: TimelineProps) {
  const { started_at, dropped = 0 } = report;
  const spans = useMemo(() => report.spans ?? [], [report]);
  const { drawn, lanes } = useMemo(() => laneSpans(spans), [spans]);
  const end = useMemo(() => {
    const last = spans.reduce((most, span) => Math.max(most, span.end_s ?? span.start_s), 0);
    return running ? Math.max(last, Date.now() / 1000 - started_at) : last;
  }, [report, running]);
  const selected = useMemo(() => (chosen ? spansOfTurn(spans, chosen) : []), [spans, chosen]);
  const open = (one: LaneSpan): void => {
    const turn = tree && turnOfSpan(spans, one.id, tree);
    if (turn) onChoose(turn);
  };
  const section = useRef<HTMLElement>(null);
  const some = drawn.length > 0;
  useStickyHeight(section, some);
  if (!some) return null;
  return (
    <section ref={section} class="timeline" aria-labelledby="time">
      <h2 id="time" class="unseen">Time</h2>
      <Swimlane label="Time of the episode" lanes={lanes} kinds={KINDS} spans={drawn} end={end} selected={selected} onOpen={open} />
      {dropped > 0 && <p class="calm">{count(dropped)} further calls and snapshots were not recorded.</p>}
    </section>
  );
}

/** Tells the style how much of the window's top the timeline covers, so that turns are brought into view below it. */
function useStickyHeight(section: RefObject<HTMLElement | null>, shown: boolean): void {
  useLayoutEffect(() => {
    const element = section.current;
    const { style } = document.documentElement;
    if (!element) return undefined;
    const tell = (): void => {
      const covers = getComputedStyle(element).position === "sticky" ? element.offsetHeight : 0;
      style.setProperty("--timeline-height", `${covers}px`);
    };
    const watch = new ResizeObserver(tell);
    watch.observe(element);
    window.addEventListener("resize", tell);
    tell();
    return () => {
      watch.disconnect();
      window.removeEventListener("resize", tell);
      style.removeProperty("--timeline-height");
    };
  }, [shown]);
}
