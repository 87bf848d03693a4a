"""The formats that ship: each constant is an entry point of ``turnstile.exporters``.

Their modules are imported when they write. What one needs installed is an extra of the package, named in its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeAlias

Writer: TypeAlias = Callable[[Iterable[Any], BinaryIO], int]
"""Takes SampleSets, TokenForests for a format of ``source`` ``tree``, bytes for ``journal``. A format of one file
per episode gets one of them per call."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One format.

    ``writer``: a ``Writer``, or ``"module:function"``, which is imported when it is used. ``summary``: its part
    of the option's help. ``suffix``: of its files. ``per_episode``: one file per episode; else one file holds
    all. ``text``: stdout may be the file. ``source``: ``samples``, ``tree`` or ``journal``. ``counts``: what the
    writer's number is of. ``extra``: the extra of turnstile-rl that installs what it imports.
    """

    writer: str | Writer
    summary: str
    suffix: str
    per_episode: bool = False
    text: bool = False
    source: Literal["samples", "tree", "journal"] = "samples"
    counts: str = "samples"
    extra: str | None = None


JSONL = ExportFormat("turnstile.exporters.sample_files:write_jsonl", "a JSON line per sample", ".jsonl", text=True)

SAFETENSORS = ExportFormat(
    "turnstile.exporters.sample_files:write_safetensors", "arrays of an episode", ".safetensors", per_episode=True
)

PARQUET = ExportFormat("turnstile.exporters.parquet:write_rows", "a row per sample", ".parquet", extra="parquet")

TREE = ExportFormat(
    "turnstile.exporters.sample_files:write_tree",
    "the token tree of an episode",
    ".tree.safetensors",
    per_episode=True,
    source="tree",
)

JOURNAL = ExportFormat(
    "turnstile.exporters.sample_files:write_journal",
    "all that is recorded of an ended episode, for `turnstile ui FOLDER`",
    ".tsj",
    per_episode=True,
    source="journal",
    counts="episodes",
)
