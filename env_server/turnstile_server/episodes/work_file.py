"""The file in which the work of one episode is kept: what was handed to grading, and how the agent had ended.

A line of JSON, then the tar of the work folder, compressed by zlib. The tar is an agent's: it is never opened
here. Pure.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

from turnstile.models import EpisodeStatus, ErrorInfo
from turnstile_server.grading.protocol import Work
from turnstile_server.tasks.environment import EpisodeStart

VERSION = 1
SCORES = "world_scores"
"""The key of the environment's scores: the first environments were worlds."""
LEVEL = 1
"""The level of zlib: 90 MB/s and a third of the size for source text; 6 takes twice the time for a tenth less."""


@dataclass(frozen=True, slots=True)
class EndedWork:
    """A work, and how its agent had ended: the outcome before grading."""

    episode_id: str
    work: Work
    status: EpisodeStatus
    error: ErrorInfo | None
    start: EpisodeStart | None


def facts_of(episode_id: str) -> dict[str, Any]:
    """Facts of an episode for graders that are code, in every grading of its work."""
    return {"episode_id": episode_id}


def encode(ended: EndedWork) -> bytes:
    """The bytes of the file."""
    work, start = ended.work, ended.start
    head: dict[str, Any] = {
        "version": VERSION,
        "episode_id": ended.episode_id,
        "status": ended.status.value,
        "error": None if ended.error is None else ended.error.model_dump(mode="json"),
        "answer": work.answer,
        SCORES: None if work.environment_scores is None else dict(work.environment_scores),
        "start": None if start is None else {"instruction": start.instruction, "files": dict(start.files)},
        "archive_bytes": None if work.archive is None else len(work.archive),
    }
    archive = b"" if work.archive is None else zlib.compress(work.archive, LEVEL)
    return json.dumps(head).encode() + b"\n" + archive


def decode(data: bytes) -> EndedWork:
    """Raises ValueError for anything that ``encode`` did not give."""
    line, _, packed = data.partition(b"\n")
    try:
        head = json.loads(line)
        if head["version"] != VERSION:
            raise ValueError(f"it has version {head['version']}")
        start = head["start"]
        return EndedWork(
            head["episode_id"],
            Work(
                _unpacked(packed, head["archive_bytes"]),
                head["answer"],
                head[SCORES],
                facts=facts_of(head["episode_id"]),
            ),
            EpisodeStatus(head["status"]),
            None if head["error"] is None else ErrorInfo.model_validate(head["error"]),
            None if start is None else EpisodeStart(start["instruction"], start["files"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its head is damaged: {error}") from error


def _unpacked(packed: bytes, size: int | None) -> bytes | None:
    if size is None:
        return None
    try:
        archive = zlib.decompressobj().decompress(packed, size) if size else b""
    except zlib.error as error:
        raise ValueError(f"its archive is damaged: {error}") from error
    if len(archive) != size:
        raise ValueError(f"its archive is damaged: {len(archive)} bytes of {size}")
    return archive
