"""Charts as inline SVG: curves and bars. Each says in words what it draws; the numbers are in the page's tables.

Colours are classes of the page's style sheet, so a chart follows light and dark, and prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnstile.report.contents import MOST_POINTS
from turnstile.report.markup import Markup, joined, tag

_WIDE, _HIGH = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 40
_Y_MARKS = 4
_X_MARKS = 6
_BAR = 26


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """``label`` names its place on the x axis. ``value`` None: a gap. ``spread``: drawn as a band around it."""

    label: str
    value: float | None
    spread: float | None = None


def curve(
    title: str,
    x_label: str,
    points: Sequence[CurvePoint],
    show: Callable[[float | None], str],
    *,
    share: bool = False,
) -> Markup:
    """A figure with one curve; nothing where no point has a value. ``show`` writes values. ``share``: the axis
    goes from 0 to 1."""
    points = _thinned(points)
    known = [each.value for each in points if each.value is not None]
    if not known:
        return Markup("")
    marks = [0.0, 0.25, 0.5, 0.75, 1.0] if share else _marks(*_bounds(points))
    low, high = marks[0], marks[-1]

    def x(at: int) -> float:
        room = _WIDE - _LEFT - _RIGHT
        return round(_LEFT + (room / 2 if len(points) == 1 else room * at / (len(points) - 1)), 1)

    def y(value: float) -> float:
        inside = min(max(value, low), high)
        return round(_TOP + (_HIGH - _TOP - _BOTTOM) * (high - inside) / (high - low), 1)

    parts = [
        joined(
            tag("line", class_="grid", x1=_LEFT, x2=_WIDE - _RIGHT, y1=y(mark), y2=y(mark)),
            tag("text", show(mark), class_="mark", x=_LEFT - 6, y=y(mark) + 4, text_anchor="end"),
        )
        for mark in marks
    ]
    step = max(1, -(-len(points) // _X_MARKS))
    parts += [
        tag("text", points[at].label, class_="mark", x=x(at), y=_HIGH - _BOTTOM + 16, text_anchor="middle")
        for at in range(0, len(points), step)
    ]
    parts.append(tag("text", x_label, class_="mark", x=(_LEFT + _WIDE) / 2, y=_HIGH - 6, text_anchor="middle"))
    for run in _runs(points):
        spread = [(at, points[at].value or 0.0, points[at].spread or 0.0) for at in run]
        if any(each[2] for each in spread):
            upper = [f"{x(at)},{y(value + wide)}" for at, value, wide in spread]
            lower = [f"{x(at)},{y(value - wide)}" for at, value, wide in reversed(spread)]
            parts.append(tag("polygon", class_="band", points=" ".join(upper + lower)))
        parts.append(tag("polyline", class_="curve", points=" ".join(f"{x(at)},{y(v)}" for at, v, _ in spread)))
        parts += [
            tag("circle", class_="dot", cx=x(at), cy=y(v), r=2.5 if len(points) < 80 else 1) for at, v, _ in spread
        ]
    said = (
        f"{title}: {len(known)} values from {points[0].label} to {points[-1].label}; first {show(known[0])}, "
        f"last {show(known[-1])}, lowest {show(min(known))}, highest {show(max(known))}."
    )
    drawn = tag("svg", parts, viewBox=f"0 0 {_WIDE} {_HIGH}", role="img", aria_label=said)
    return tag("figure", tag("figcaption", title), drawn)


def bars(title: str, parts: Sequence[tuple[str, float]], show: Callable[[float | None], str]) -> Markup:
    """A figure with a bar for each part, as long as its share of the longest; nothing where all are 0."""
    most = max((value for _, value in parts), default=0.0)
    if most <= 0:
        return Markup("")
    left, right = 150, 90
    room = _WIDE - left - right
    rows = [
        joined(
            tag("text", name, class_="mark", x=left - 8, y=_BAR * at + 17, text_anchor="end"),
            tag(
                "rect",
                class_="bar",
                x=left,
                y=_BAR * at + 5,
                width=round(room * max(0.0, value) / most, 1),
                height=16,
            ),
            tag(
                "text",
                show(value),
                class_="mark",
                x=left + round(room * max(0.0, value) / most, 1) + 6,
                y=_BAR * at + 17,
            ),
        )
        for at, (name, value) in enumerate(parts)
    ]
    said = f"{title}: " + ", ".join(f"{name} {show(value)}" for name, value in parts)
    drawn = tag("svg", rows, viewBox=f"0 0 {_WIDE} {_BAR * len(parts) + 4}", role="img", aria_label=said)
    return tag("figure", tag("figcaption", title), drawn)


def _bounds(points: Sequence[CurvePoint]) -> tuple[float, float]:
    """The bounds of the axis: 0 and all values are inside."""
    lows = [each.value - (each.spread or 0.0) for each in points if each.value is not None]
    highs = [each.value + (each.spread or 0.0) for each in points if each.value is not None]
    low, high = min(0.0, *lows), max(0.0, *highs)
    return (low, high) if high > low else (low, low + 1.0)


def _marks(low: float, high: float) -> list[float]:
    """Round numbers, evenly spaced, from at most ``low`` to at least ``high``; some ``_Y_MARKS`` of them."""
    rough = (high - low) / _Y_MARKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((each * power for each in (1.0, 2.0, 2.5, 5.0) if each * power >= rough), 10.0 * power)
    return [round(at * step, 12) for at in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _runs(points: Sequence[CurvePoint]) -> list[list[int]]:
    """The indices of neighbours that have values."""
    runs: list[list[int]] = [[]]
    for at, each in enumerate(points):
        if each.value is not None:
            runs[-1].append(at)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thinned(points: Sequence[CurvePoint]) -> Sequence[CurvePoint]:
    if len(points) <= MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[round(at * last / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]
