"""A report as one HTML page, which loads nothing and runs nothing: its policy allows its own style sheet alone."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable

from turnstile.models import StatsRow
from turnstile.report.contents import RunReport, ShownEpisode
from turnstile.report.episode_part import anchor, episode_part, legend
from turnstile.report.figures import (
    by_time,
    by_version,
    counts_table,
    curves,
    facts,
    number,
    pass_curve,
    rows_table,
    seconds,
    share,
    stats_of,
    table,
    time_bars,
    when,
)
from turnstile.report.markup import Markup, tag
from turnstile.report.style import STYLE
from turnstile.visible import visible_line

_LONGEST_NAME = 80
_NAMED = 12
"""Names of one kind (agents, tags, weight versions) that a fact lists."""


def page(report: RunReport) -> str:
    """The whole file."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    total = stats_of(report).total
    title = f"Turnstile report: {visible_line(report.name, _LONGEST_NAME)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        # Markup: the policy names the digest of exactly this text, and it is ours.
        tag("style", Markup(STYLE)),
    )
    main = tag(
        "main",
        tag("h1", title),
        _tiles(total),
        _section("What was run", [_facts(report)]),
        _section("Curves", [tag("div", found, class_="charts")] if (found := _charts(report, total)) else []),
        _section("Tables", _tables(report, total)),
        _section("Episodes", [*_chosen(report.shown), legend(report.shown)]),
        (episode_part(at, shown) for at, shown in enumerate(report.shown, 1)),
    )
    made = tag(
        "footer", tag("p", f"Made {when(report.made_at)} by Turnstile {report.client_version}.", class_="note")
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', main, made), lang='en')}\n"


def _section(title: str, content: Iterable[Markup]) -> Markup:
    found = [each for each in content if each]
    return tag("section", tag("h2", title), found) if found else Markup("")


def _tiles(total: StatsRow) -> Markup:
    error = "" if total.reward_error is None else f" ± {number(total.reward_error)}"
    tiles = [
        ("episodes", number(total.episodes)),
        ("graded", number(total.graded)),
        ("mean reward (± its standard error)", f"{number(total.reward_mean)}{error}"),
        ("solved", number(total.solved)),
        *((f"pass@{each.k}", share(each.value)) for each in total.pass_at_k[:1]),
        ("of sampled tokens trained", share(total.trained_share if total.sampled_tokens else None)),
        ("groups without signal", f"{number(total.groups_without_signal)} of {number(total.groups)}"),
        ("breaks", number(sum(total.breaks.values()))),
        *([("further conversations", number(total.new_conversations))] if total.new_conversations else []),
    ]
    return tag("ul", (tag("li", tag("strong", value), name) for name, value in tiles), class_="tiles")


def _facts(report: RunReport) -> Markup:
    rows = report.summaries
    begun = min((row.created_at for row in rows), default=None)
    ended = max((row.ended_at for row in rows if row.ended_at is not None), default=None)
    unended = sum(not row.status.ended for row in rows)
    return facts(
        [
            ("run", report.name),
            ("records", report.source),
            ("agents", _names(row.agent for row in rows)),
            ("tasks", number(len({row.task for row in rows}))),
            ("tags", _names(tag_ for row in rows for tag_ in row.tags)),
            ("weight versions", _names(row.weight_version for row in rows if row.weight_version is not None)),
            ("first episode", when(begun)),
            ("last end", when(ended)),
            ("took", None if begun is None or ended is None else seconds(ended - begun)),
            ("still running", number(unended) if unended else None),
            ("never begun", f"{report.never_begun} rollouts have no episode" if report.never_begun else None),
            ("solved means", f"a reward of at least {number(report.solved_at)}"),
            *report.facts.items(),
        ]
    )


def _names(names: Iterable[str]) -> str:
    found = [
        f"{visible_line(name, _LONGEST_NAME)} ({number(count)})" for name, count in Counter(names).most_common()
    ]
    left = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {number(left)} others" if left > 0 else "")


def _charts(report: RunReport, total: StatsRow) -> list[Markup]:
    steps = curves("train step", "step", stats_of(report, "step").rows)
    versions = curves("weight version", "version", by_version(report))
    times = curves("time", "bucket", by_time(report))
    return [each for each in [*steps, *versions, *times, pass_curve(total), time_bars(total)] if each]


def _tables(report: RunReport, total: StatsRow) -> list[Markup]:
    steps = [row for row in stats_of(report, "step").rows if row.key["step"] is not None]
    tags = [row for row in stats_of(report, "tag").rows if row.key["tag"] is not None]
    tasks = stats_of(report, "task").rows
    agents = stats_of(report, "agent").rows
    errors = [row for row in stats_of(report, "error").rows if row.key["error"] is not None]
    passes = ((f"{each.k}", share(each.value), number(each.sets), number(each.tasks)) for each in total.pass_at_k)
    whole = sum(total.seconds.values())
    times = ((part, seconds(spent), share(spent / whole)) for part, spent in total.seconds.items() if spent)
    return [
        table(
            "pass@k",
            ("k", "pass@k", "sets with so many graded rollouts", "their tasks"),
            passes,
            more="A set has the rollouts of one task by one agent on one weight version.",
        ),
        rows_table("By train step", "step", steps),
        rows_table("By weight version", "version", by_version(report)),
        rows_table("By time", "bucket", by_time(report)),
        rows_table("By agent", "agent", agents) if len(agents) > 1 else Markup(""),
        rows_table("By tag", "tag", tags, "An episode with several tags is in the row of each."),
        rows_table("By task", "task", tasks),
        counts_table("How episodes ended", "status", total.statuses, "episodes"),
        counts_table("Faults", "whose fault ended it", total.faults, "episodes"),
        rows_table("Errors", "error", errors),
        counts_table("Breaks", "reason", total.breaks, "turns"),
        counts_table("Sampled tokens that nothing trains", "reason", total.untrained, "tokens"),
        table("Where time went", ("part", "time", "share"), times),
    ]


def _chosen(shown: Iterable[ShownEpisode]) -> list[Markup]:
    rows = [
        (
            tag("a", str(at), href=f"#{anchor(at)}"),
            each.reason,
            visible_line(each.summary.task, _LONGEST_NAME),
            each.summary.status.value,
            visible_line(each.summary.why, 200),
            number(each.summary.reward),
            number(each.summary.turns),
        )
        for at, each in enumerate(shown, 1)
    ]
    return [
        table("Episodes below", ("no.", "chosen as", "task", "status", "why", "reward", "turns"), rows, words=5)
    ]
