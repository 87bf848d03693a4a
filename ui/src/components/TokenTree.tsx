/** The tokens of many rollouts as one tree: what they share is drawn once, and to the right of it where they part.
 *
 * Keyboard: the tree takes the focus; → goes to the first part behind, ← to the part before, ↑ ↓ to what lies above
 * and below at the same place, Home to the beginning. What has the focus is chosen. */

import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, share } from "../text/format";

export interface TreeNode {
  /** Index of the node before it; −1: it begins. Nodes come after their parents. */
  readonly parent: number;
  readonly start: number;
  readonly end: number;
  /** Indices of the rollouts that go through it, and of those that end with it. */
  readonly members: readonly number[];
  readonly ends: readonly number[];
  readonly sampled: number;
}

interface TokenTreeProps {
  label: string;
  nodes: readonly TreeNode[];
  /** The short name of a rollout. */
  nameOf: (member: number) => string;
  chosen: number | null;
  onChoose: (node: number) => void;
}

interface Place {
  readonly left: number;
  readonly width: number;
  readonly top: number;
  readonly height: number;
}

const ROW = 26;
/** CSS pixels of the narrowest part: also one token can be seen and clicked. */
const NARROWEST = 10;
/** CSS pixels from which a part has words in it. */
const LEGIBLE = 70;

export function TokenTree({ label, nodes, nameOf, chosen, onChoose }: TokenTreeProps) {
  const box = useRef<HTMLDivElement>(null);
  const [room, setRoom] = useState(900);
  const [pointed, setPointed] = useState<number | null>(null);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const watch = new ResizeObserver(() => setRoom(element.clientWidth));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  const children = useMemo(() => childrenOf(nodes), [nodes]);
  const { places, height, width } = useMemo(() => placesOf(nodes, children, room), [nodes, children, room]);
  const said = (index: number): string => sayingOf(nodes[index], nameOf);

  const goTo = (index: number | undefined): void => {
    if (index === undefined) return;
    onChoose(index);
    box.current?.querySelector<HTMLElement>(`[data-node="${index}"]`)?.focus();
  };
  const onKeyDown = (event: KeyboardEvent, index: number): void => {
    const parent = nodes[index]?.parent ?? -1;
    const beside = children.get(parent) ?? [];
    const steps: Record<string, number | undefined> = {
      ArrowRight: children.get(index)?.[0],
      ArrowLeft: parent >= 0 ? parent : undefined,
      ArrowDown: beside[beside.indexOf(index) + 1],
      ArrowUp: beside[beside.indexOf(index) - 1],
      Home: 0,
    };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    goTo(steps[event.key]);
  };
  return (
    <div class="token-tree-frame">
      <div ref={box} class="scroll-x" role="tree" aria-label={label}>
        <div class="token-tree" role="none" style={{ height: `${height}px`, width: `${width}px` }}>
          {nodes.map((node, index) => {
            const { left, width: wide, top, height: high } = places[index] ?? { left: 0, width: 0, top: 0, height: 0 };
            const tokens = node.end - node.start;
            return (
              <div
                key={index}
                role="treeitem"
                data-node={index}
                tabIndex={index === (chosen ?? 0) ? 0 : -1}
                aria-level={levelOf(nodes, index)}
                aria-selected={index === chosen}
                aria-label={said(index)}
                class={node.ends.length ? "tree-node ends" : "tree-node"}
                style={{ left: `${left}px`, width: `${wide - 1}px`, top: `${top}px`, height: `${high - 2}px` }}
                onClick={() => goTo(index)}
                onFocus={() => index !== chosen && onChoose(index)}
                onKeyDown={(event) => onKeyDown(event, index)}
                onMouseEnter={() => setPointed(index)}
                onMouseLeave={() => setPointed(null)}
              >
                <span class="tree-sampled" style={{ width: `${tokens ? (100 * node.sampled) / tokens : 0}%` }} />
                {wide > LEGIBLE && shortOf(node, nameOf)}
              </div>
            );
          })}
        </div>
      </div>
      <p class="swim-said" role="status">{said(pointed ?? chosen ?? 0)}</p>
    </div>
  );
}

/** A part in words. */
function sayingOf(node: TreeNode | undefined, nameOf: (member: number) => string): string {
  if (!node) return "";
  const tokens = node.end - node.start;
  const from = `from token ${count(node.start)} on, ${share(tokens ? node.sampled / tokens : 0)} sampled`;
  const ends = node.ends.length ? `; here ends ${namesOf(node.ends, nameOf)}` : "";
  return `${shortOf(node, nameOf)}: ${from}${ends}`;
}

/** How many tokens, and whose. */
function shortOf(node: TreeNode, nameOf: (member: number) => string): string {
  const tokens = node.end - node.start;
  return `${count(tokens)} ${tokens === 1 ? "token" : "tokens"} of ${namesOf(node.members, nameOf)}`;
}

function namesOf(members: readonly number[], nameOf: (member: number) => string): string {
  const most = 12;
  const names = members.slice(0, most).map(nameOf).join(" ");
  return members.length > most ? `${names} and ${members.length - most} more` : names;
}

function childrenOf(nodes: readonly TreeNode[]): ReadonlyMap<number, readonly number[]> {
  const found = new Map<number, number[]>();
  for (const [index, { parent }] of nodes.entries()) {
    const beside = found.get(parent);
    if (beside) beside.push(index);
    else found.set(parent, [index]);
  }
  return found;
}

function levelOf(nodes: readonly TreeNode[], index: number): number {
  let level = 1;
  for (let at = nodes[index]?.parent ?? -1; at >= 0; at = nodes[at]?.parent ?? -1) level++;
  return level;
}

/** Lengths from left to right by tokens; a row for each end, and a part is as high as what lies behind it. */
function placesOf(
  nodes: readonly TreeNode[],
  children: ReadonlyMap<number, readonly number[]>,
  room: number,
): { places: readonly Place[]; height: number; width: number } {
  const longest = nodes.reduce((most, { end }) => Math.max(most, end), 1);
  const levels = nodes.reduce((most, _, index) => Math.max(most, levelOf(nodes, index)), 1);
  const scale = Math.max(1, room - levels * NARROWEST) / longest;
  const rows: number[] = nodes.map(() => 0);
  for (let index = nodes.length - 1; index >= 0; index--) {
    rows[index] = Math.max(1, rows[index] ?? 0);
    const parent = nodes[index]?.parent ?? -1;
    if (parent >= 0) rows[parent] = (rows[parent] ?? 0) + (rows[index] ?? 0);
  }
  const places: Place[] = [];
  const free = new Map<number, number>(); // below which row the next child of a node begins
  let width = 0;
  for (const [index, node] of nodes.entries()) {
    const before = places[node.parent];
    const row = free.get(node.parent) ?? (before ? before.top / ROW : 0);
    free.set(node.parent, row + (rows[index] ?? 1));
    const wide = NARROWEST + (node.end - node.start) * scale;
    const left = before ? before.left + before.width : 0;
    places.push({ left, width: wide, top: row * ROW, height: (rows[index] ?? 1) * ROW });
    width = Math.max(width, left + wide);
  }
  return { places, height: (children.get(-1) ?? []).reduce((sum, root) => sum + (rows[root] ?? 1), 0) * ROW, width };
}
