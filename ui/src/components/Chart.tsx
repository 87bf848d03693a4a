/** Curves over a common axis, drawn by uPlot; the same numbers as a table for those who do not see them. */

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { NONE, time } from "../text/format";
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
/** Steps between ticks of an axis that counts. */
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

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
        scales: { x: { time: x.time ?? false }, y: { range: (_, least, most) => rangeOf(least, most) } },
        axes: [
          x.time ? { ...axis, space: 70, values: (_, ticks) => timesOf(ticks) } : { ...axis, label: x.label, labelSize: 20, incrs: WHOLE },
          { ...axis, size: 60, values: (_, ticks) => ticks.map(format) },
        ],
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
                      <th scope="row">{x.time ? time(value) : value}</th>
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

/** Of the vertical axis: with room around the values, and for equal ones from zero. */
function rangeOf(least: number | null, most: number | null): [number, number] {
  if (least === null || most === null || (least === 0 && most === 0)) return [0, 1];
  if (least === most) return [Math.min(0, least * 1.1), Math.max(0, most * 1.1)];
  const [from, to] = uPlot.rangeNum(least, most, 0.1, true);
  return [from ?? least, to ?? most];
}

/** Ticks of a time axis: the time of day, or with the day where they span more than one. */
function timesOf(ticks: readonly number[]): string[] {
  const days = (ticks.at(-1) ?? 0) - (ticks[0] ?? 0) > 86_400;
  return ticks.map((tick) => (days ? time(tick).slice(5, 16) : time(tick).slice(11)));
}

function shown(value: number | null | undefined, format: (value: number) => string): string {
  return value === null || value === undefined ? NONE : format(value);
}

function last(values: readonly (number | null)[], format: (value: number) => string): string {
  return shown(values.findLast((value) => value !== null), format);
}
