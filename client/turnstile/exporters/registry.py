"""The formats of ``turnstile episodes export --format`` and ``turnstile run --format``. One line adds one.

An exporter is a module with one function: it takes the episodes' data and an open binary file, writes, and returns
the number of samples. Its module is imported when the format is used. What it needs installed is an extra of the
package, named in its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO, Literal, TypeAlias

from turnstile import errors

Writer: TypeAlias = Callable[[Iterable[Any], BinaryIO], int]
"""Takes SampleSets, TokenForests for a format of ``source`` ``tree``, bytes for ``journal``. A format of one file
per episode gets one of them per call."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One format.

    ``writer``: ``"module:function"``. ``summary``: its part of the option's help. ``suffix``: of its files.
    ``per_episode``: one file per episode; else one file holds all. ``text``: stdout may be the file.
    ``source``: ``samples``, ``tree`` or ``journal``. ``counts``: what the writer's number is of. ``extra``: the
    extra of turnstile-rl that installs what it imports.
    """

    writer: str
    summary: str
    suffix: str
    per_episode: bool = False
    text: bool = False
    source: Literal["samples", "tree", "journal"] = "samples"
    counts: str = "samples"
    extra: str | None = None


FORMATS = {
    "jsonl": ExportFormat("turnstile.exporters.files:write_jsonl", "a JSON line per sample", ".jsonl", text=True),
    "safetensors": ExportFormat(
        "turnstile.exporters.files:write_safetensors", "arrays of an episode", ".safetensors", per_episode=True
    ),
    "parquet": ExportFormat(
        "turnstile.exporters.parquet:write_rows", "a row per sample", ".parquet", extra="parquet"
    ),
    "tree": ExportFormat(
        "turnstile.exporters.files:write_tree",
        "the token tree of an episode",
        ".tree.safetensors",
        per_episode=True,
        source="tree",
    ),
    "journal": ExportFormat(
        "turnstile.exporters.files:write_journal",
        "all that is recorded of an ended episode, for `turnstile ui FOLDER`",
        ".tsj",
        per_episode=True,
        source="journal",
        counts="episodes",
    ),
}


def writer_of(name: str) -> Writer:
    """The writer of a format. Raises InvalidRequest for an unknown format, and for one whose extra is missing."""
    if name not in FORMATS:
        raise errors.InvalidRequest(f"there is no format {name}; the formats are {', '.join(FORMATS)}")
    wanted = FORMATS[name]
    module, _, function = wanted.writer.partition(":")
    try:
        found: Writer = getattr(import_module(module), function)
    except ImportError as error:
        if wanted.extra is None:
            raise
        raise errors.InvalidRequest(
            f"--format {name} needs {error.name}: pip install 'turnstile-rl[{wanted.extra}]'"
        ) from error
    return found
