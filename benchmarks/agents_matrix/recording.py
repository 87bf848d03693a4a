"""Recordings of episodes: the requests of an agent and the completions of its model, enough to replay them.

A recording is self-contained. It has the requests byte for byte (except what named the machine or the episode, see
``redact``), the completions call by call, refusals, and their order. It has no token ids: a replay encodes the
text with its own tokenizer. On disk it is JSON lines under xz: a header, then one line per call. The window of xz,
several MiB, makes a history that is sent again and again nearly free.
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict

SUFFIX = ".jsonl.xz"

What = Literal["asked", "spoke", "ended", "gone"]
"""``asked``: a whole request has arrived. ``spoke``: the completion has ended. ``ended``: the whole answer was
sent. ``gone``: the caller has left. Some agents act on a reply while it is sent, so other calls come in
between."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Refusal(Part):
    """An error by its stable ``type``, as errors.py has it."""

    type: str
    message: str
    retry_after_s: float | None = None


class Said(Part):
    """One completion: text with control tokens, then how it ended. Both None: it was aborted."""

    text: str = ""
    finish: Literal["stop", "length"] | None = None
    refusal: Refusal | None = None


class Call(Part):
    """One request. ``path`` is that below ``/e/{episode_id}``; headers with keys or of the connection are left
    out. ``said`` None: the engine was not called. ``status`` 0: the caller had left."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: str
    said: Said | None
    status: int
    turn: str | None
    """Id of its turn, without the prefix; the reply's ids contain it, and agents send those back."""
    call_ids: tuple[str, ...]
    """The ids that the gate gave to the reply's tool calls."""


class Threads(Part):
    """The headers in which the agent names its conversations, as its spec had them."""

    name: str | None = None
    parent: str | None = None


class Header(Part):
    agent: str
    version: str
    fault: str
    recorded: str
    """The day, ISO 8601."""
    threads: Threads
    max_turns: int
    ended: str
    """How the episode ended: status and exit code."""
    events: tuple[tuple[What, int], ...]
    """What happened in which order, by the index of the call."""


class RecordedEpisode(Part):
    header: Header
    calls: tuple[Call, ...]


def write(recording: RecordedEpisode, path: Path) -> None:
    """Whole or not at all."""
    lines = [recording.header, *recording.calls]
    data = b"".join(orjson.dumps(line.model_dump()) + b"\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(lzma.compress(data, preset=9))
    partial.rename(path)


def read(path: Path) -> RecordedEpisode:
    first, *rest = lzma.decompress(path.read_bytes()).splitlines()
    return RecordedEpisode(
        header=Header.model_validate_json(first), calls=tuple(Call.model_validate_json(line) for line in rest)
    )


def redact(text: str, names: Mapping[str, str]) -> str:
    """``text`` with each name replaced by what it stands for, longest first."""
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    return text
