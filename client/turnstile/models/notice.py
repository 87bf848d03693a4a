"""A notice in ``GET /events``: something that whoever runs the server should know, and that is no episode's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnstile.models.base import Model

NoticeType = Literal["wrong_keys", "retention"]


class Notice(Model):
    """Data of ``event: notice``. Each type comes at a bounded rate: it counts what was since the last one."""

    type: NoticeType
    """``wrong_keys``: requests came with a wrong key. ``retention``: bounds of the disk deleted episodes, or could
    not make room."""
    message: str
    """One sentence, for people."""
    at: float
    """Unix seconds."""
    counts: dict[str, int] = Field(default_factory=dict)
    """What it counts, by name."""
