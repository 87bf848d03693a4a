"""``turnstile episodes``: list, show and export what a server has recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from turnstile._files import whole
from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import USAGE, fail, reported, show_table, table
from turnstile.cli.sample_files import Format, check_installed, write_lines, write_samples
from turnstile.models import Episode, EpisodeStatus, Turn
from turnstile.models.wire import encode_forest
from turnstile.sync import Client, EpisodeHandle


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    SAFETENSORS = "safetensors"
    PARQUET = "parquet"
    TREE = "tree"


StatusOption = Annotated[EpisodeStatus | None, typer.Option("--status", help="Only episodes of this status.")]
GroupOption = Annotated[str | None, typer.Option("--group-id", help="Only episodes of this group.")]


def list_episodes(
    status: StatusOption = None,
    group_id: GroupOption = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most this many; 0 for all.")] = 50,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Episodes, newest first."""
    with reported(), connect(url, key, data_dir) as client:
        found = islice(client.episodes(status=status, group_id=group_id), limit or None)
        if as_json:
            for episode in found:
                typer.echo(episode.model_dump_json())
            return
        rows = table("episode", "status", "group", "#reward", "#turns", "#trained")
        for episode in found:
            rows.add_row(*_row(episode))
        show_table(rows)


def show_episode(
    episode_id: str,
    turns: Annotated[bool, typer.Option("--turns", help="Its turns too.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """One episode: its state, its token accounting and, with --turns, every model call."""
    with reported(), connect(url, key, data_dir) as client:
        handle = client.episode(episode_id)
        episode = handle.status()
        recorded = handle.turns() if turns else ()
        if as_json:
            typer.echo(episode.model_dump_json())
            for turn in recorded:
                typer.echo(turn.model_dump_json())
            return
        facts = table("field", "value")
        for name, value in episode.model_dump(mode="json", exclude={"schema_version", "stats"}).items():
            facts.add_row(name, _cell(value))
        for name, value in episode.stats.model_dump(mode="json").items():
            facts.add_row(f"stats.{name}", _cell(value))
        show_table(facts)
        if turns:
            calls = table("#seq", "turn", "parent", "dialect", "#context", "#completion", "finish", "break")
            for turn in recorded:
                calls.add_row(*_turn_row(turn))
            show_table(calls)


def export_episodes(
    episode_ids: Annotated[
        list[str] | None, typer.Argument(help="Episodes; none: all that the filters leave.")
    ] = None,
    format_: Annotated[
        ExportFormat,
        typer.Option(
            "--format", help="One JSON line or Parquet row per sample; safetensors, of samples or of their tree."
        ),
    ] = ExportFormat.JSONL,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="jsonl: a file (default stdout); parquet: a file; safetensors, tree: a folder, one per episode.",
        ),
    ] = None,
    include_untrained: Annotated[
        bool, typer.Option("--include-untrained", help="Rows whose mask is 0 too.")
    ] = False,
    status: StatusOption = None,
    group_id: GroupOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """The samples of episodes, for a trainer."""
    if format_ is not ExportFormat.JSONL and out is None:
        fail(f"--format {format_} needs --out {'FILE' if format_ is ExportFormat.PARQUET else 'FOLDER'}", USAGE)
    check_installed(format_)
    with reported(), connect(url, key, data_dir) as client:
        wanted = episode_ids or _ids(client, status, group_id)
        handles = (client.episode(episode_id) for episode_id in wanted)
        if format_ is ExportFormat.JSONL or out is None:
            count = _export_jsonl(handles, out, include_untrained)
        elif format_ is ExportFormat.PARQUET:
            count = _export_parquet(handles, out, include_untrained)
        else:
            out.mkdir(parents=True, exist_ok=True)
            export = _export_trees if format_ is ExportFormat.TREE else _export_safetensors
            count = export(handles, out, include_untrained)
    typer.echo(f"{count} samples exported", err=True)


def _ids(client: Client, status: EpisodeStatus | None, group_id: str | None) -> Iterator[str]:
    return (episode.episode_id for episode in client.episodes(status=status, group_id=group_id))


def _export_jsonl(episodes: Iterable[EpisodeHandle], out: Path | None, include_untrained: bool) -> int:
    count = 0
    with _text_output(out) as file:
        for episode in episodes:
            found = episode.samples(include_untrained=include_untrained)
            write_lines(found, file)
            count += len(found.samples)
    return count


def _export_parquet(episodes: Iterable[EpisodeHandle], out: Path, include_untrained: bool) -> int:
    from turnstile.exporters.parquet import write_parquet  # noqa: PLC0415 - an extra

    return write_parquet(out, (episode.samples(include_untrained=include_untrained) for episode in episodes))


def _export_safetensors(episodes: Iterable[EpisodeHandle], out: Path, include_untrained: bool) -> int:
    count = 0
    for episode in episodes:
        found = episode.samples(include_untrained=include_untrained)
        write_samples(found, out / f"{episode.episode_id}.safetensors", Format.SAFETENSORS)
        count += len(found.samples)
    return count


def _export_trees(episodes: Iterable[EpisodeHandle], out: Path, include_untrained: bool) -> int:
    count = 0
    for episode in episodes:
        forest = episode.tree(include_untrained=include_untrained)
        with whole(out / f"{episode.episode_id}.tree.safetensors") as partial:
            partial.write_bytes(encode_forest(forest))
        count += len(forest.rows)
    return count


@contextmanager
def _text_output(out: Path | None) -> Iterator[TextIO]:
    if out is None or str(out) == "-":
        yield sys.stdout
        return
    with whole(out) as partial, partial.open("w", encoding="utf-8") as file:
        yield file


_GROUP = 8
"""Characters of a group's name in the list, which then fits 80 columns."""


def _row(episode: Episode) -> tuple[str, ...]:
    stats = episode.stats
    return (
        episode.episode_id,
        episode.status.value,
        _tail(episode.group_id or ""),
        "" if episode.reward is None else f"{episode.reward:.3g}",
        str(stats.turns),
        f"{stats.trained_share:.0%}",
    )


def _tail(name: str) -> str:
    """Enough of a long name to see which rows share it; ids that were made differ at their end."""
    return name if len(name) <= _GROUP else f"…{name[1 - _GROUP :]}"


def _turn_row(turn: Turn) -> tuple[str, ...]:
    return (
        str(turn.seq),
        turn.turn_id,
        turn.parent_id or "(root)",
        turn.dialect,
        str(len(turn.context_ids)),
        str(len(turn.completion_ids)),
        turn.finish_reason,
        turn.break_.reason.value if turn.break_ is not None else "",
    )


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
