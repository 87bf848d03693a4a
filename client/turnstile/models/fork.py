"""Snapshots of a running episode, and episodes that begin at one (``docs/fork.md``)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnstile.models.base import ClientId, Model, check_json

MAX_FORKS = 256

SnapshotMode = Literal["on_request", "every_turn"]
"""When snapshots of an episode are taken: by ``POST …/snapshot`` alone, or after every turn too."""


class ForkOrigin(Model):
    """The origin of a forked episode: it began below a turn of another one."""

    episode_id: str
    turn_id: str | None
    """Its tree continues this turn; None: the other episode had none yet."""
    snapshot_id: str | None = None
    """The snapshot of the files that its sandbox began with; None: it has no sandbox."""
    instruction: str | None = None
    """The message that told its agent to go on; None: the agent is external."""


class SnapshotInfo(Model):
    """The files of an episode's sandbox at one time."""

    snapshot_id: str
    episode_id: str
    turn_id: str | None
    """The latest turn at that time; None: there was none."""
    at: float
    """Unix time."""
    bytes: int
    """Bytes that it takes on the server's disk."""
    processes: tuple[str, ...] = ()
    """Command lines of the processes that ran in the sandbox. A fork does not have them."""
    taken: SnapshotMode = "on_request"
    """The snapshot mode for which it was taken."""


class SnapshotList(Model):
    """Answer to ``GET /episodes/{id}/snapshots``, oldest first."""

    snapshots: tuple[SnapshotInfo, ...]


class ForkRequest(Model):
    """Body of ``POST /episodes/{id}/fork``: where to begin, and what the new episodes have of their own."""

    turn_id: str | None = None
    """Begin after this turn: with its latest snapshot where the episode has a sandbox."""
    snapshot_id: str | None = None
    """Begin with this snapshot, after its turn."""
    n: int = Field(default=1, ge=1, le=MAX_FORKS)
    episode_ids: tuple[ClientId, ...] = ()
    """Ids of the new episodes, ``n`` of them; none: the server makes them."""
    group_id: ClientId | None = None
    """None: the group of the episode that is forked."""
    metadata: dict[str, Any] | None = None
    """None: that of the episode that is forked."""
    instruction: str | None = Field(default=None, min_length=1)
    """The message that tells an agent launched by the server to go on; None: ``Continue.``"""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of a launched agent. The other episode's is in no record, and not in a fork."""
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=200)
    """The same key with the same body gives the same episodes."""

    @field_validator("metadata")
    @classmethod
    def _metadata_is_json(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        if metadata is not None:
            check_json(metadata)
        return metadata

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.turn_id is None) == (self.snapshot_id is None):
            raise ValueError("name `turn_id` or `snapshot_id`, one of the two")
        if self.episode_ids and len(set(self.episode_ids)) != self.n:
            raise ValueError(f"episode_ids names {len(set(self.episode_ids))} different ids for n = {self.n}")
        return self
