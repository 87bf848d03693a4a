"""The seam to episodes: all that the control door needs of whoever owns them.

The door translates HTTP; it holds no episode state and decides nothing about an episode's life. Every method
raises NotFound for an unknown or deleted episode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from turnstile.models import (
    AuditReport,
    Episode,
    EpisodeCreated,
    EpisodePage,
    EpisodeRequest,
    EpisodeStatus,
    SampleSet,
    TokenForest,
    Turn,
)


class EpisodeService(Protocol):
    async def create(self, request: EpisodeRequest) -> tuple[EpisodeCreated, bool]:
        """The new episode and True; or, when ``idempotency_key`` repeats an earlier creation with the same
        body, that episode and False. Raises Conflict for a reused id or for a key repeated with another body,
        Unprocessable for a limit above its ceiling (the field's name in the message), TooManyCalls at the
        bound of open episodes."""
        ...

    async def get(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        """The episode now; with ``wait_s`` > 0 at its next change of status, at most that much later. An
        ended episode is given at once."""
        ...

    async def page(
        self, *, status: EpisodeStatus | None, group_id: str | None, before: int | None, limit: int
    ) -> EpisodePage:
        """At most ``limit`` episodes, newest first; ``before`` is the cursor that the page before gave."""
        ...

    async def finish(self, episode_id: str) -> Episode:
        """Ends an external episode's agent and grades. Repeating it gives the same episode."""
        ...

    async def cancel(self, episode_id: str) -> Episode:
        """Ends an open episode as ``cancelled``; an ended one is given as it is."""
        ...

    async def delete(self, episode_id: str) -> None:
        """Removes the episode and its turns; an open one is cancelled first."""
        ...

    async def turns(self, episode_id: str) -> Sequence[Turn]:
        """All turns, in commit order."""
        ...

    async def samples(self, episode_id: str, *, include_untrained: bool = False) -> SampleSet:
        """``include_untrained`` adds the rows whose mask is 0 throughout (superseded retries and the like)."""
        ...

    async def tree(self, episode_id: str, *, include_untrained: bool = False) -> TokenForest:
        """The same rows with each token once."""
        ...

    async def audit(self, episode_id: str) -> AuditReport:
        """Re-scores the recorded tokens on the engine and checks every invariant."""
        ...

    def subscribe(self) -> AsyncIterator[Episode]:
        """Every change of status from now on. Bounded: the iterator of a reader that is too slow ends, and so
        do all at shutdown."""
        ...
