/** Curves over a common axis, drawn by uPlot; the same numbers as a table for those who do not see them. */

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { NONE } from "../text/format";
import { Fold } from "./Fold";

export interface Series {
  readonly label: string;
  /** As many as ``x`` has; null where there is none. */
  readonly values: readonly (number | null)[];
}

interface ChartProps {
  title: string;
  x: { readonly label: string; readonly values: readonly number[]; /** Unix seconds. */ readonly time?: boolean };
  series: readonly Series[];
  format?: (value: number) => string;
  /** CSS pixels. */
  height?: number;
}

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const MOST_ROWS = 500;
/** Distances of ticks between whole numbers. */
const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();

/** What the curves span, with some room; a line that stays at one value has a unit of it. */
function rangeOf(_: uPlot, least: number | null, most: number | null): uPlot.Range.MinMax {
  if (least === null || most === null) return [0, 1];
  if (least === most) return [Math.min(0, least), Math.max(1, most)];
  return uPlot.rangeNum(least, most, 0.1, true);
}

function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function Chart({ title, x, series, format = String, height = 220 }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const [dark, setDark] = useState(() => window.matchMedia("(prefers-color-scheme: dark)").matches);

  useEffect(() => {
    const scheme = window.matchMedia("(prefers-color-scheme: dark)");
    const change = (): void => setDark(scheme.matches);
    scheme.addEventListener("change", change);
    return () => scheme.removeEventListener("change", change);
  }, []);

  useEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const [ink, line] = [colour("--calm"), colour("--line")];
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    const plot = new uPlot(
      {
        width: Math.max(200, element.clientWidth),
        height,
        legend: { show: false },
        cursor: { drag: { x: true, y: false } },
        scales: { x: { time: x.time ?? false }, y: { range: rangeOf } },
        axes: [{ ...axis, ...(x.values.every(Number.isInteger) && !x.time ? { incrs: WHOLE } : {}) }, { ...axis, size: 60, values: (_, ticks) => ticks.map(format) }],
        series: [
          {},
          ...series.map((one, index) => ({
            label: one.label,
            stroke: colour(`--c${index % 8}`),
            width: 2,
            dash: DASHES[Math.floor(index / 8) % DASHES.length] ?? [],
            points: { show: x.values.length < 60 },
            spanGaps: true,
          })),
        ],
      },
      [[...x.values], ...series.map((one) => [...one.values])],
      element,
    );
    const watch = new ResizeObserver(() => plot.setSize({ width: Math.max(200, element.clientWidth), height }));
    watch.observe(element);
    return () => {
      watch.disconnect();
      plot.destroy();
    };
  }, [x, series, height, dark, format]);

  return (
    <figure class="chart">
      <figcaption>{title}</figcaption>
      <div ref={box} aria-hidden="true" />
      <ul class="legend">
        {series.map((one, index) => (
          <li key={one.label}>
            <span class={`swatch c${index % 8}`} aria-hidden="true" />
            {one.label} <span class="calm">{last(one.values, format)}</span>
          </li>
        ))}
      </ul>
      <Fold summary={`Numbers: ${title}`}>
        {() => (
          <div class="scroll" tabIndex={0} role="region" aria-label={`Numbers: ${title}`}>
            <table>
              <thead>
                <tr>
                  <th scope="col">{x.label}</th>
                  {series.map((one) => <th scope="col" class="numeric" key={one.label}>{one.label}</th>)}
                </tr>
              </thead>
              <tbody>
                {x.values.slice(-MOST_ROWS).map((value, row) => {
                  const index = row + Math.max(0, x.values.length - MOST_ROWS);
                  return (
                    <tr key={index}>
                      <th scope="row">{x.time ? new Date(value * 1000).toLocaleString() : value}</th>
                      {series.map((one) => <td class="numeric" key={one.label}>{shown(one.values[index], format)}</td>)}
                    </tr>
                  );
                })}
              </tbody>
            </table>
          </div>
        )}
      </Fold>
    </figure>
  );
}

function shown(value: number | null | undefined, format: (value: number) => string): string {
  return value === null || value === undefined ? NONE : format(value);
}

function last(values: readonly (number | null)[], format: (value: number) => string): string {
  return shown(values.findLast((value) => value !== null), format);
}
