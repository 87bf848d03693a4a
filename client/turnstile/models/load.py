"""How full a server is, which of several a client places new episodes by."""

from __future__ import annotations

from turnstile.models.base import Model


class ServerLoad(Model):
    """Answer to ``GET /load`` and ``POST /drain``. Of several worker processes the numbers are summed."""

    server_id: str
    """The server's identity: that of its data directory, so it stays when the server is started at another
    address."""
    release: str
    """Turnstile's version there."""
    node: str
    """Name of the machine, or of the container: its host's name."""
    draining: bool
    """It takes no new episodes, and ends once the open ones have ended."""
    drained: bool
    """It drains, no episode is open, and what ended meanwhile was fetched, or had its time: it ends now."""
    refusal: str | None
    """Reason why it takes no new episodes; None: it does."""
    open: int
    """Episodes that have not ended."""
    max_open: int
    """Episodes open at once (``episodes.max_open``)."""
    queued: int
    """Episodes that wait for a place."""
    running: int
    """Episodes that are prepared or run; those of external agents without a sandbox need no place."""
    max_running: int
    """Places (``episodes.max_running``)."""
    grading: int
    """Episodes whose work is judged, or waits for it."""
    gradings_waiting: int
    """Works that wait for one of the ``grading_places``."""
    grading_places: int
    sandboxes_in_use: int | None
    """Lent, being made or being removed; None where the server has no pool of sandboxes."""
    sandboxes_warm: int | None
    """Ready and not lent."""
    max_sandboxes: int | None
    """Sandboxes at once (``sandboxes.max_open``)."""
    memory_available_bytes: int | None
    """Memory of the machine, or of the container, that is not in use; None where it cannot be read."""
    memory_bytes: int | None
    images: tuple[str, ...] = ()
    """Images of the latest sandboxes, the last one first: they need not be fetched again."""

    @property
    def free(self) -> int:
        """Places without an episode; below 0, so many episodes wait for one."""
        return self.max_running - self.running - self.queued
