"""The states of an episode's work folder, turn by turn (``docs/replay.md``)."""

from __future__ import annotations

from typing import Literal

from turnstile.models.base import Model

ReplayMoment = Literal["begin", "turn", "end"]
"""Before an agent begins, between the tool calls of a turn and the next model call, after the agent has ended."""


class ReplayFile(Model):
    """A file of the work folder at one state."""

    path: str
    mode: str
    """As git has it: ``100644``, ``100755`` (executable), ``120000`` (a link, whose content is its target),
    ``040000`` (a folder that is not looked into), ``000000`` (a pipe, a socket, a device)."""
    size: int
    digest: str | None
    """SHA-256 of its content, by which the content is fetched; None: the content is not kept."""
    left_out: str | None
    """The reason that the content is not kept."""


class ReplayChange(Model):
    """A file that a state has otherwise than the state before."""

    path: str
    change: Literal["added", "changed", "removed"]
    before: ReplayFile | None
    """None: it was added."""
    after: ReplayFile | None
    """None: it was removed."""


class ReplayState(Model):
    """One state of the work folder."""

    state: int
    """Its number, from 0 on."""
    moment: ReplayMoment
    turn_id: str | None
    """The turn whose tool calls lie between the state before and this one; None: before any turn."""
    seq: int | None
    """The ``seq`` of that turn."""
    at_s: float
    """Seconds since the episode was created."""
    files: int
    """In the work folder."""
    changes: tuple[ReplayChange, ...]
    """By path. None at state 0: what the task gave is in the listing of that state."""
    further: int
    """Paths that were not looked at, because the folder has too many (``episodes.replay_paths``)."""
    missed: str | None
    """The reason that the folder could not be looked at; then the changes show at a later state."""
    snapshot_id: str | None
    """The latest snapshot of the turn, at which the episode can be forked; None: there is none."""


class ReplayReport(Model):
    """Answer to ``GET /episodes/{id}/replay``: the states in order."""

    episode_id: str
    states: tuple[ReplayState, ...]


class ReplayListing(Model):
    """Answer to ``GET /episodes/{id}/replay/files?state=N``: all files of the work folder at one state, by
    path."""

    episode_id: str
    state: int
    files: tuple[ReplayFile, ...]
    further: int
    """Paths that were not looked at."""
