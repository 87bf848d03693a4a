"""What an agent sent to its model door in one episode, and what its model said: enough to play it again.

A recording is self-contained: requests byte for byte (but for what named the machine or the episode, see
``redact``), the model's words call by call, refusals, and the order of it all. It has no token ids: a replay
encodes the words with the tokenizer it has. On disk it is JSON lines under xz, whose window of several MiB makes
a history that is sent again and again nearly free: a header, then one line per call.
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
"""``asked``: a request had arrived whole. ``spoke``: the model had said its last word. ``ended``: the answer had
left whole. ``gone``: the caller had left. Some agents act on a reply that still comes: calls lie between."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Refusal(Part):
    """An error by its stable ``type``, as errors.py has it."""

    type: str
    message: str
    retry_after_s: float | None = None


class Said(Part):
    """What the model said in one call: text with control tokens, then how it ended. Both None: it was aborted."""

    text: str = ""
    finish: Literal["stop", "length"] | None = None
    refusal: Refusal | None = None


class Call(Part):
    """One request. ``path`` is that below ``/e/{episode_id}``; headers that carry keys or the transport are left
    out. ``said`` None: the engine was not asked. ``status`` 0: nobody was there to be answered."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: str
    said: Said | None
    status: int
    turn: str | None
    """The turn it became, without the prefix: it is in the reply's ids, which agents send back."""
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


class Recording(Part):
    header: Header
    calls: tuple[Call, ...]


def write(recording: Recording, path: Path) -> None:
    """Whole or not at all."""
    lines = [recording.header, *recording.calls]
    data = b"".join(orjson.dumps(line.model_dump()) + b"\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(lzma.compress(data, preset=9))
    partial.rename(path)


def read(path: Path) -> Recording:
    first, *rest = lzma.decompress(path.read_bytes()).splitlines()
    return Recording(
        header=Header.model_validate_json(first), calls=tuple(Call.model_validate_json(line) for line in rest)
    )


def redact(text: str, names: Mapping[str, str]) -> str:
    """``text`` with each name replaced by what it stands for, longest first."""
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    return text
