/** Shares of a whole as one bar, with its parts in words below. */

import { share } from "../text/format";

export interface BarPart {
  readonly name: string;
  readonly value: number;
}

interface StackedBarProps {
  label: string;
  /** At most eight have colours of their own. Parts of zero are listed and not drawn. */
  parts: readonly BarPart[];
  format: (value: number) => string;
}

export function StackedBar({ label, parts, format }: StackedBarProps) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return (
    <figure class="stacked">
      <figcaption>
        {label} <span class="calm">{format(total)}</span>
      </figcaption>
      <div class="bar" aria-hidden="true">
        {parts.map((part, index) =>
          part.value > 0 ? (
            <span key={part.name} class={`part c${index % 8}`} style={{ flexGrow: String(part.value / total) }} />
          ) : null,
        )}
      </div>
      <ul class="legend">
        {parts.map((part, index) => (
          <li key={part.name}>
            <span class={`swatch c${index % 8}`} aria-hidden="true" />
            {part.name} {format(part.value)} <span class="calm">{total > 0 ? share(part.value / total) : ""}</span>
          </li>
        ))}
      </ul>
    </figure>
  );
}
