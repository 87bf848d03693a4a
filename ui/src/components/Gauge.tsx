/** A number as a bar from a zero that may lie inside; the number itself stands beside it. */

interface GaugeProps {
  value: number | null;
  /** Of the scale; zero lies between them. */
  least: number;
  most: number;
}

export function Gauge({ value, least, most }: GaugeProps) {
  const [low, high] = [Math.min(least, 0), Math.max(most, 0)];
  const at = (of: number): number => (high > low ? (100 * (of - low)) / (high - low) : 0);
  const [from, to] = [at(Math.min(value ?? 0, 0)), at(Math.max(value ?? 0, 0))];
  return (
    <span class="gauge" aria-hidden="true">
      <span class={(value ?? 0) < 0 ? "below" : "above"} style={{ left: `${from}%`, width: `${to - from}%` }} />
      <span class="zero" style={{ left: `${at(0)}%` }} />
    </span>
  );
}
