"""Which task an episode is about."""

from __future__ import annotations

from pydantic import ConfigDict

from turnstile.models.base import Model


class TaskRef(Model):
    """A task of the server by ``id``, or one that the request brings along: ``{"instruction": "…"}`` is enough.

    The further fields of an inline task are those of a task file (``docs/tasks.md``).
    """

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    instruction: str | None = None
