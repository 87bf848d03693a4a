"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class JournalBounds(Bounds):
    """Bounds of the journal's writer."""

    group_window_s: float = 0.0
    """Extra wait to gather appends into one fsync; 0: only appends that are queued already share one."""
    soon_window_s: float = 0.1
    """Records whose writing is not waited for (deliveries) are written after this at the latest."""
    inline_bytes: int = 64 << 10
    """`durability = process`: records up to this size are written by the event loop itself, which saves the way
    through the writer's thread; 0: none."""
    inline_stall_s: float = 0.005
    """After a write of the event loop itself that took longer than this, records go through the writer's thread
    for `inline_pause_s`."""
    inline_pause_s: float = 10.0
    """See `inline_stall_s`."""
    index_lag_s: float = 0.25
    """The index is updated after an append within this time."""
    reserve_bytes: int = 1 << 20
    """Disk space (at most 1/64 of the file system) that is kept so that episodes can be deleted on a full disk; 0:
    none."""
    check_interval_s: float = 1.0
    """How often the journal looks whether its disk takes records."""
