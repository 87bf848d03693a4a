"""Numbers in words, and the tables and curves of a report's statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from turnstile.models import StatsKey, StatsReport, StatsRow, statistics_by
from turnstile.report.charts import CurvePoint, bars, curve
from turnstile.report.contents import MOST_BUCKETS, MOST_ROWS, RunReport
from turnstile.report.markup import Markup, joined, tag
from turnstile.visible import visible_line

NONE = "–"
_LONGEST_NAME = 60
_BUCKETS_S = (60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_HEADS: Mapping[str, str] = {
    "task": "task",
    "tag": "tag",
    "agent": "agent",
    "step": "train step",
    "version": "weight version",
    "error": "error",
    "bucket": "ended from (UTC)",
}


def number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def when(unix_s: float | None) -> str:
    return NONE if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[Markup | str]], *, words: int = 1, more: str = ""
) -> Markup:
    """A table with a caption; the first cell of a row is its head. The first ``words`` columns are text, the
    others numbers. Nothing without rows; of more than ``MOST_ROWS`` the first ones."""
    found = list(rows)
    if not found:
        return Markup("")
    left = len(found) - MOST_ROWS
    note = f"{more} {number(left)} further rows are left out.".strip() if left > 0 else more
    kinds = [None if at < words else "n" for at in range(len(heads))]
    head = tag("tr", (tag("th", name, scope="col", class_=kind) for name, kind in zip(heads, kinds, strict=True)))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            (tag("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)),
        )
        for row in found[:MOST_ROWS]
    ]
    shown = tag("table", tag("caption", title), tag("thead", head), tag("tbody", body))
    return tag("div", shown, tag("p", note, class_="note") if note else "", class_="table")


def counts_table(title: str, head: str, counts: Mapping[str, int], unit: str) -> Markup:
    """The most frequent first."""
    order = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return table(title, (head, unit), ((name, number(count)) for name, count in order))


def stats_of(report: RunReport, *by: StatsKey, bucket_s: float | None = None) -> StatsReport:
    return statistics_by(report.summaries, by, bucket_s=bucket_s, solved_at=report.solved_at)


def rows_table(title: str, by: str, rows: Sequence[StatsRow], more: str = "") -> Markup:
    heads = [_HEADS[by], "episodes", "graded", "reward", "deviation", "solved", "pass@k", "flat groups", "turns"]
    heads += ["sampled", "trained", "breaks", "errors", "lag", "time"]
    return table(title, heads, ((_name(row, by), *_cells(row)) for row in rows), more=more)


def curves(title: str, by: str, rows: Sequence[StatsRow]) -> list[Markup]:
    """Reward, trained share and lag by what the rows' key ``by`` is; one point says no more than the table."""
    rows = [row for row in rows if row.key[by] is not None]
    if len(rows) < 2:
        return []

    def points(value: Callable[[StatsRow], float | None], error: bool = False) -> list[CurvePoint]:
        return [CurvePoint(_name(row, by), value(row), row.reward_error if error else None) for row in rows]

    head = _HEADS[by]
    means = points(lambda row: row.reward_mean, True)
    return [
        curve(f"Mean reward by {title}, ± its standard error", head, means, number),
        curve(f"Trained share by {title}", head, points(_trained_share), share, share=True),
        curve(f"Lag by {title}, in weight versions", head, points(lambda row: row.lag_mean), number),
    ]


def pass_curve(total: StatsRow) -> Markup:
    points = [CurvePoint(str(each.k), each.value) for each in total.pass_at_k]
    return curve("pass@k", "k", points, share, share=True) if len(points) > 1 else Markup("")


def time_bars(total: StatsRow) -> Markup:
    return bars("Where time went, summed over the episodes", list(total.seconds.items()), seconds)


def by_version(report: RunReport) -> list[StatsRow]:
    return list(stats_of(report, "version").rows)


def by_time(report: RunReport) -> list[StatsRow]:
    """The shortest round interval that gives at most ``MOST_BUCKETS``."""
    ends = [row.created_at if row.ended_at is None else row.ended_at for row in report.summaries]
    whole = max(ends, default=0.0) - min(ends, default=0.0)
    bucket_s = next((each for each in _BUCKETS_S if whole / each < MOST_BUCKETS), None)
    return list(stats_of(report, bucket_s=bucket_s or -(-whole // MOST_BUCKETS)).rows)


def _cells(row: StatsRow) -> tuple[str, ...]:
    passes = ", ".join(f"{each.k}: {share(each.value)}" for each in row.pass_at_k[:1] + row.pass_at_k[1:][-1:])
    return (
        number(row.episodes),
        number(row.graded),
        number(row.reward_mean),
        number(row.reward_std),
        number(row.solved),
        passes or NONE,
        f"{row.groups_without_signal} of {row.groups}",
        number(row.turns),
        number(row.sampled_tokens),
        share(_trained_share(row)),
        number(sum(row.breaks.values())),
        number(sum(row.errors.values())),
        number(row.lag_mean),
        seconds(sum(row.seconds.values())),
    )


def _trained_share(row: StatsRow) -> float | None:
    return row.trained_share if row.sampled_tokens else None


def _name(row: StatsRow, by: str) -> str:
    value = row.key[by]
    if by == "bucket":
        return datetime.fromtimestamp(int(value or 0), UTC).strftime("%m-%d %H:%M")
    return NONE if value is None else visible_line(str(value), _LONGEST_NAME)


def facts(pairs: Iterable[tuple[str, Markup | str | None]]) -> Markup:
    """A list of names and values; those without a value are left out."""
    known = [(name, value) for name, value in pairs if value not in (None, "")]
    return tag("dl", (joined(tag("dt", name), tag("dd", value or "")) for name, value in known))
