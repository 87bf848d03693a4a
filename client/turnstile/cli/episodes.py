"""``turnstile episodes``: list, show and export what a server has recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from turnstile.cli.condition_options import with_conditions
from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import USAGE, Cell, Column, echo, echo_json, fail, reported, show_table
from turnstile.cli.transcript import show_episode_facts, show_turns
from turnstile.conditions import EpisodeConditions
from turnstile.errors import NOT_TRAINABLE, Conflict
from turnstile.exporters.formats import ExportFormat
from turnstile.exporters.registry import export_format, installed_formats, writer_of
from turnstile.exporters.sample_files import atomic_write
from turnstile.models import EpisodeSummary
from turnstile.sync import Client, EpisodeHandle

_SHORT = 8
"""Characters of the name of a group or a run in a list that has no room for all of it."""
_SHORT_TASK = 12
_FORMATS = installed_formats()
_TEXT = ", ".join(name for name, each in _FORMATS.items() if each.text)
_FILE = ", ".join(name for name, each in _FORMATS.items() if not each.per_episode)
_FOLDER = ", ".join(name for name, each in _FORMATS.items() if each.per_episode)


@with_conditions
def list_episodes(
    conditions: EpisodeConditions,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most this many; 0 for all.")] = 50,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Episodes, newest first."""
    with reported(), connect(url, key, data_dir) as client:
        if as_json:
            for episode in islice(client.episodes(**conditions), limit or None):
                echo_json(episode.model_dump_json())
            return
        columns = [
            Column("episode"),
            Column("status"),
            Column("task"),
            Column("agent", spare=1),
            Column("run", optional=True, spare=2),
            Column("step", "number", optional=True, spare=4),
            Column("group", optional=True, spare=5),
            Column("reward", "number"),
            Column("turns", "number", spare=3),
            Column("trained", "number"),
        ]
        show_table(columns, [_row(row) for row in islice(client.summaries(**conditions), limit or None)])


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


@with_conditions
def export_episodes(
    conditions: EpisodeConditions,
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
        fetched = _Fetched(wanted, include_untrained, named=bool(episode_ids))
        episodes = (client.episode(each) for each in episode_ids or _ids(client, conditions))
        if wanted.per_episode:
            assert out is not None
            out.mkdir(parents=True, exist_ok=True)
            count = 0
            for episode in episodes:
                for data in fetched.data([episode]):
                    with atomic_write(out / f"{episode.episode_id}{wanted.suffix}") as file:
                        count += write([data], file)
        else:
            with _output(out) as file:
                count = write(fetched.data(episodes), file)
    echo(f"{count} {wanted.counts} exported", err=True)
    if fetched.hosted:
        echo(f"{fetched.hosted} episodes of hosted models left out: they have no tokens", err=True)


def _ids(client: Client, conditions: EpisodeConditions) -> Iterator[str]:
    return (row.episode_id for row in client.summaries(**conditions))


@dataclass(slots=True)
class _Fetched:
    """The format's data of episodes. ``named``: one without tokens, which a hosted model played, is an error;
    else it is left out, and counted in ``hosted``."""

    wanted: ExportFormat
    include_untrained: bool
    named: bool
    hosted: int = 0

    def data(self, episodes: Iterable[EpisodeHandle]) -> Iterator[Any]:
        """Fetched when the writer asks for it."""
        for episode in episodes:
            try:
                found = self._of(episode)
            except Conflict as error:
                if error.type != NOT_TRAINABLE or self.named:
                    raise
                self.hosted += 1
            else:
                yield found

    def _of(self, episode: EpisodeHandle) -> Any:
        if self.wanted.source == "journal":
            return episode.journal()
        if self.wanted.source == "tree":
            return episode.tree(include_untrained=self.include_untrained)
        return episode.samples(include_untrained=self.include_untrained)


@contextmanager
def _output(out: Path | None) -> Iterator[BinaryIO]:
    if out is None or str(out) == "-":
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with atomic_write(out) as file:
        yield file


def _row(row: EpisodeSummary) -> list[str | Cell]:
    task = row.task
    return [
        row.episode_id,
        row.status.value,
        Cell(task, task if len(task) <= _SHORT_TASK else f"{task[:4]}…{task[5 - _SHORT_TASK :]}"),
        row.agent,
        _end(row.run_id),
        "" if row.train_step is None else str(row.train_step),
        _end(row.group_id),
        "-" if row.reward is None else f"{row.reward:.3g}",
        str(row.turns),
        f"{row.trained_tokens / row.sampled_tokens:.0%}" if row.sampled_tokens else "-",
    ]


def _end(name: str | None) -> Cell:
    """The end of a long name: ids that were made together differ there."""
    whole = name or ""
    return Cell(whole, whole if len(whole) <= _SHORT else f"…{whole[1 - _SHORT :]}")
