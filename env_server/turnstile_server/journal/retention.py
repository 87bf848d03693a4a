"""Which ended episodes retention deletes. Pure: no clock, no disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnstile_server.journal.index import State

DAY_S = 86_400.0


def expired(
    states: Sequence[State],
    sizes: Mapping[str, int],
    now: float,
    retention_days: float | None,
    retention_bytes: int | None,
) -> list[str]:
    """Episodes to delete, oldest first. ``states`` is ordered by age, ``now`` is Unix seconds.

    An episode that has not ended is never deleted, but its bytes count. One that ended at an unknown time has no
    age: only ``retention_bytes`` deletes it. ``retention_bytes`` bounds living bytes; the disk gets them back
    when the segments that hold them have no other episode.
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
            if state.episode_id not in chosen:
                chosen[state.episode_id] = None
                living -= sizes.get(state.episode_id, 0)
    return list(chosen)
