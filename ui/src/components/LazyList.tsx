/** A list of parts of any height. A part is made when it comes near the window, and stays: what was opened in it stays
 * open, and the browser lays out only what is seen (`content-visibility`). */

import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";

/** How far from the window parts are made. */
const NEAR = "1500px 0px";

interface LazyListProps<Item> {
  class: string;
  items: readonly Item[];
  keyOf: (item: Item) => string;
  /** Height of an item that is not made yet, in pixels. */
  height: (item: Item) => number;
  children: (item: Item, index: number) => ComponentChildren;
}

export function LazyList<Item>({ class: name, items, keyOf, height, children }: LazyListProps<Item>) {
  const near = useMemo(watchNearness, []);
  useEffect(() => near.stop, [near]);
  return (
    <ol class={name}>
      {items.map((item, index) => (
        <LazyItem key={keyOf(item)} id={keyOf(item)} near={near} height={height(item)}>
          {() => children(item, index)}
        </LazyItem>
      ))}
    </ol>
  );
}

interface LazyItemProps {
  id: string;
  near: Nearness;
  height: number;
  children: () => ComponentChildren;
}

function LazyItem({ id, near, height, children }: LazyItemProps) {
  const [made, setMade] = useState(false);
  const element = useRef<HTMLLIElement>(null);
  const make = useCallback(() => setMade(true), []);
  useEffect(() => {
    const item = element.current;
    if (!item || made) return undefined;
    near.watch(item, make);
    return () => near.unwatch(item);
  }, [near, made]);
  return (
    <li ref={element} id={id} style={{ minHeight: made ? "" : `${height}px`, containIntrinsicSize: `auto ${height}px` }}>
      {made && children()}
    </li>
  );
}

interface Nearness {
  watch: (item: Element, make: () => void) => void;
  unwatch: (item: Element) => void;
  stop: () => void;
}

function watchNearness(): Nearness {
  const waiting = new Map<Element, () => void>();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting) waiting.get(target)?.();
    },
    { rootMargin: NEAR },
  );
  return {
    watch: (item, make) => {
      waiting.set(item, make);
      observer.observe(item);
    },
    unwatch: (item) => {
      waiting.delete(item);
      observer.unobserve(item);
    },
    stop: () => observer.disconnect(),
  };
}
