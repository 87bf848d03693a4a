"""``turnstile audit``: re-score recorded tokens on the server's engine and check every invariant.

The server does the work, so the command is part of the thin client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import FAILED, USAGE, Column, echo, echo_json, fail, reported, show_table, show_text
from turnstile.errors import NOT_TRAINABLE, Conflict
from turnstile.models import AuditReport, TurnAudit


def audit(
    episode_ids: Annotated[list[str] | None, typer.Argument(help="Episodes to audit.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every episode of the server.")] = False,
    require_rescored: Annotated[
        bool,
        typer.Option(
            "--require-rescored",
            help="Exit 1 too if the engine could not re-score any turn of an episode that has some.",
        ),
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Re-score recorded tokens on the engine and check every invariant. Exit 1 if an episode does not pass.

    An episode of which nothing can be re-scored (other weights are served now, …) passes on its records alone.
    Those of hosted models have no tokens: --all leaves them out and counts them.
    """
    if bool(episode_ids) == every:
        fail("name episodes or give --all, one of the two", USAGE)
    with reported(), connect(url, key, data_dir) as client:
        wanted = list(episode_ids or (episode.episode_id for episode in client.episodes()))
        reports: list[AuditReport] = []
        hosted = 0
        for episode_id in wanted:
            try:
                reports.append(client.audit(episode_id))
            except Conflict as error:
                if error.type != NOT_TRAINABLE or not every:
                    raise
                hosted += 1
                continue
            if as_json:
                echo_json(reports[-1].model_dump_json())
    if as_json:
        echo(headline(reports, hosted), err=True)
    else:
        _show(reports)
        show_text(headline(reports, hosted))
    unscored = hosted > 0 or any(_on_records_alone(report) for report in reports)
    if not all(report.passed for report in reports) or (require_rescored and unscored):
        raise typer.Exit(FAILED)


def headline(reports: Sequence[AuditReport], hosted: int) -> str:
    """How many episodes passed, and how many of them the engine re-scored: the two are said together. ``hosted``:
    episodes beside them that have no tokens."""
    distances = [report.max_abs_delta for report in reports if report.max_abs_delta is not None]
    turns = [turn for report in reports for turn in report.turns]
    unscored = sum(_on_records_alone(report) for report in reports)
    empty = sum(not report.turns for report in reports)
    parts = [
        f"{sum(report.passed for report in reports)} of {len(reports)} episodes passed",
        f"{len(distances)} re-scored",
        f"{unscored} could not be re-scored: their records alone were checked" if unscored else "",
        f"{empty} without a turn" if empty else "",
        f"{hosted} of hosted models left out: they have no tokens" if hosted else "",
        f"{sum(map(_compared, turns))} of {sum(turn.tokens for turn in turns)} tokens re-scored",
        f"max |Δlogprob| = {_distance(max(distances, default=None))}",
    ]
    return "; ".join(part for part in parts if part)


def _on_records_alone(report: AuditReport) -> bool:
    """True if the episode has turns and none of them could be re-scored."""
    return bool(report.turns) and report.max_abs_delta is None


def _compared(turn: TurnAudit) -> int:
    return 0 if turn.max_abs_delta is None else turn.tokens - turn.unscored - turn.stale


def _show(reports: list[AuditReport]) -> None:
    columns = [
        Column("episode"),
        Column("turns", "number"),
        Column("re-scored", "number", short="scored"),
        Column("tokens", "number"),
        Column("max |Δlogprob|", "number", short="max |Δ|"),
        Column("skipped", "text", optional=True),
        Column("passed"),
    ]
    rows = []
    for report in reports:
        scored = [turn for turn in report.turns if turn.max_abs_delta is not None]
        skipped = Counter(turn.skipped for turn in report.turns if turn.skipped is not None)
        rows.append(
            [
                report.episode_id,
                str(len(report.turns)),
                str(len(scored)),
                str(sum(map(_compared, scored))),
                _distance(report.max_abs_delta),
                ", ".join(f"{reason}: {count}" for reason, count in skipped.items()),
                _verdict(report),
            ]
        )
    show_table(columns, rows)
    _show_versions(reports)
    for report in reports:
        for check in report.invariants:
            for failure in check.failures:
                echo(f"{report.episode_id}: {check.name}: {failure}")
    turns = [turn for report in reports for turn in report.turns]
    if ends := sum(turn.unscored - turn.other_weights for turn in turns if turn.skipped is None):
        echo(f"{ends} tokens at the end of the context were not re-scored: the engine takes no such input")
    if why := Counter(turn.skipped for turn in turns if turn.skipped is not None):
        reasons = ", ".join(f"{many} {reason}" for reason, many in why.most_common())
        echo(f"turns that were not re-scored: {reasons}")
    for sentence in dict.fromkeys(sentence for report in reports for sentence in report.explanations):
        echo(sentence)


def _show_versions(reports: list[AuditReport]) -> None:
    """One row per episode and weight version, where a version was not compared whole or there are several."""
    found = [(report.episode_id, version) for report in reports for version in report.versions]
    if all(version.compared == version.tokens for _, version in found) and len(found) <= len(reports):
        return
    columns = [
        Column("episode"),
        Column("weights"),
        Column("tokens", "number"),
        Column("compared", "number"),
        Column("max |Δ|", "number"),
        Column("mean |Δ|", "number", short="mean"),
        Column("p99 |Δ|", "number", short="p99"),
        Column("on an old cache", "number", short="stale", optional=True),
        Column("max |Δ| there", "number", short="stale max", optional=True),
    ]
    rows = [
        [
            episode_id,
            version.version,
            str(version.tokens),
            str(version.compared),
            _distance(version.max_abs_delta),
            _distance(version.mean_abs_delta),
            _distance(version.p99_abs_delta),
            str(version.stale_tokens or ""),
            _distance(version.stale_max_abs_delta) if version.stale_tokens else "",
        ]
        for episode_id, version in found
    ]
    show_table(columns, rows)


def _verdict(report: AuditReport) -> str:
    if not report.passed:
        return "NO"
    return "records only" if _on_records_alone(report) else "yes"


def _distance(nats: float | None) -> str:
    return "-" if nats is None else f"{nats:.2e}"
