"""Which episodes are deleted because they are old, or because they take too much of the disk. Pure.

What must hold: an episode that has not ended is never deleted; the bounds of the disk, which hold by default,
never delete an episode that no trainer has fetched, unless the settings say so; no bound of size deletes one that
ended or was fetched a moment ago (``fresh``). To refuse new episodes is better
than to lose sampled ones in silence.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.journal.index import LastState
from turnstile_server.settings import JournalSettings

DAY_S = 86_400.0
MOST_KEPT_FREE = 10
"""``retention_free_bytes`` never asks for more than this part of the file system: a tenth."""


def expired(
    states: Sequence[LastState],
    sizes: Mapping[str, int],
    now: float,
    retention_days: float | None,
    retention_bytes: int | None,
    fresh: Container[str] = (),
) -> list[str]:
    """Episodes that the operator's own bounds delete, oldest first. ``states`` is ordered by age, ``now`` is Unix
    seconds.

    An episode that has not ended is never deleted, but its bytes count. An episode that ended at an unknown time
    has no age: only ``retention_bytes`` deletes it. ``retention_bytes`` bounds living bytes, and deletes none of
    ``fresh``.
    """
    ended = [state for state in states if state.ended_at is not None]
    chosen: dict[str, None] = {}
    if retention_days is not None:
        deadline = now - retention_days * DAY_S
        for state in ended:
            if state.ended_at is not None and state.ended_at < deadline:
                chosen[state.episode_id] = None
    if retention_bytes is not None:
        living = sum(size for episode_id, size in sizes.items() if episode_id not in chosen)
        for state in ended:
            if living <= retention_bytes:
                break
            if state.episode_id not in chosen and state.episode_id not in fresh:
                chosen[state.episode_id] = None
                living -= sizes.get(state.episode_id, 0)
    return list(chosen)


@dataclass(frozen=True, slots=True)
class DiskBounds:
    """The bounds of the disk in bytes; None: off."""

    most: int | None
    """Most bytes that the journal may take."""
    free: int | None
    """Bytes that are to stay free on its file system."""

    @classmethod
    def of(cls, settings: JournalSettings, total: int) -> DiskBounds:
        """``total``: bytes of the file system."""
        most = int(settings.retention_share * total) if settings.retention_share else None
        free = None
        if settings.retention_free_bytes:
            # Above the floor of the appends, so that space is made before turns are refused.
            free = max(min(settings.retention_free_bytes, total // MOST_KEPT_FREE), 2 * settings.min_free_bytes)
            free = min(free, total // 2)
        return cls(most, free)

    def sentence(self, directory: Path, used: int, total: int, settings: JournalSettings) -> str:
        """The bounds as a sentence, for the log and the terminal."""
        takes = f"the journal in {directory} takes {_size(used)} of {_size(total)}"
        if self.most is None and self.free is None:
            return f"{takes}; no bound of the disk is set (journal.retention_share, journal.retention_free_bytes)"
        bounds = [f"over {_size(self.most)}"] if self.most is not None else []
        bounds += [f"with less than {_size(self.free)} free"] if self.free is not None else []
        which = "that a trainer has fetched" if settings.retention_spares_unexported else "fetched or not"
        return (
            f"{takes}; {' or '.join(bounds)} the oldest ended episodes {which} are deleted (journal.retention_*)"
        )

    def excess(self, used: int, free: int) -> int:
        """Bytes that the journal takes too many."""
        over = used - self.most if self.most is not None else 0
        missing = self.free - free if self.free is not None else 0
        return max(over, min(missing, used), 0)


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class Room:
    """The result of the bounds of the disk: the episodes to delete, and what is left over that they must not
    delete."""

    delete: list[str]
    short: int = 0
    """Bytes over a bound that only episodes hold which run or were not fetched."""
    waiting: int = 0
    """Ended episodes that nobody has fetched."""
    fresh: int = 0
    """Ended episodes that would go, if they had not ended or been fetched a moment ago."""


def make_room(
    states: Sequence[LastState],
    sizes: Mapping[str, int],
    excess: int,
    fresh: Container[str] = (),
    *,
    spare_unexported: bool,
) -> Room:
    """The oldest ended episodes that hold ``excess`` bytes, without ``fresh``. ``states`` is ordered by age."""
    chosen: list[str] = []
    waiting = resting = 0
    for state in states:
        if state.ended_at is None:
            continue
        if spare_unexported and not state.exported:
            waiting += 1
        elif state.episode_id in fresh:
            resting += 1
        elif excess > 0:
            chosen.append(state.episode_id)
            excess -= sizes.get(state.episode_id, 0)
    return Room(chosen, max(excess, 0), waiting, resting)
