"""``turnstile episodes``: list, show and export what a server has recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import USAGE, Cell, Column, echo, echo_json, fail, reported, show_table
from turnstile.cli.transcript import show_episode_facts, show_turns
from turnstile.exporters.formats import ExportFormat
from turnstile.exporters.registry import export_format, installed_formats, writer_of
from turnstile.exporters.sample_files import atomic_write
from turnstile.models import Episode, EpisodeStatus
from turnstile.sync import Client, EpisodeHandle

StatusOption = Annotated[EpisodeStatus | None, typer.Option("--status", help="Only episodes of this status.")]
GroupOption = Annotated[str | None, typer.Option("--group-id", help="Only episodes of this group.")]

_GROUP = 8
"""Characters of a group's name in a list that has no room for all of it."""
_FORMATS = installed_formats()
_TEXT = ", ".join(name for name, each in _FORMATS.items() if each.text)
_FILE = ", ".join(name for name, each in _FORMATS.items() if not each.per_episode)
_FOLDER = ", ".join(name for name, each in _FORMATS.items() if each.per_episode)


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
                echo_json(episode.model_dump_json())
            return
        columns = [
            Column("episode"),
            Column("status"),
            Column("group"),
            Column("reward", "number"),
            Column("turns", "number"),
            Column("trained", "number"),
        ]
        show_table(columns, [_row(episode) for episode in found])


def show_episode(
    episode_id: str,
    turns: Annotated[bool, typer.Option("--turns", help="Its turns too: messages, replies, tool calls.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All of every text, not its beginning.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """One episode: its state, its token accounting and, with --turns, every model call."""
    with reported(), connect(url, key, data_dir) as client:
        handle = client.episode(episode_id)
        episode = handle.status()
        if as_json:
            echo_json(episode.model_dump_json())
            for turn in handle.turns() if turns else ():
                echo_json(turn.model_dump_json())
            return
        show_episode_facts(episode, full=full)
        show_turns(handle.turn_outlines() if turns else (), full=full)


def export_episodes(
    episode_ids: Annotated[
        list[str] | None, typer.Argument(help="Episodes; none: all that the filters leave.")
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="|".join(_FORMATS),
            help="; ".join(f"{name}: {each.summary}" for name, each in _FORMATS.items()) + ".",
        ),
    ] = "jsonl",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help=f"A file for {_FILE} (default stdout for {_TEXT}); a folder for {_FOLDER}: a file per episode.",
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
    with reported():
        wanted, write = export_format(format_), writer_of(format_)
    if out is None and not wanted.text:
        fail(f"--format {format_} needs --out {'FOLDER' if wanted.per_episode else 'FILE'}", USAGE)
    with reported(), connect(url, key, data_dir) as client:
        episodes = (client.episode(each) for each in episode_ids or _ids(client, status, group_id))
        if wanted.per_episode:
            assert out is not None
            out.mkdir(parents=True, exist_ok=True)
            count = 0
            for episode in episodes:
                with atomic_write(out / f"{episode.episode_id}{wanted.suffix}") as file:
                    count += write(_data([episode], wanted, include_untrained), file)
        else:
            with _output(out) as file:
                count = write(_data(episodes, wanted, include_untrained), file)
    echo(f"{count} {wanted.counts} exported", err=True)


def _ids(client: Client, status: EpisodeStatus | None, group_id: str | None) -> Iterator[str]:
    return (episode.episode_id for episode in client.episodes(status=status, group_id=group_id))


def _data(episodes: Iterable[EpisodeHandle], wanted: ExportFormat, include_untrained: bool) -> Iterator[Any]:
    """The format's data of each episode, fetched when the writer asks for it."""
    for episode in episodes:
        if wanted.source == "journal":
            yield episode.journal()
        elif wanted.source == "tree":
            yield episode.tree(include_untrained=include_untrained)
        else:
            yield episode.samples(include_untrained=include_untrained)


@contextmanager
def _output(out: Path | None) -> Iterator[BinaryIO]:
    if out is None or str(out) == "-":
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with atomic_write(out) as file:
        yield file


def _row(episode: Episode) -> list[str | Cell]:
    stats, group = episode.stats, episode.group_id or ""
    # The end of a long name: ids that were made together differ there.
    return [
        episode.episode_id,
        episode.status.value,
        Cell(group, group if len(group) <= _GROUP else f"…{group[1 - _GROUP :]}"),
        "-" if episode.reward is None else f"{episode.reward:.3g}",
        str(stats.turns),
        f"{stats.trained_share:.0%}",
    ]
