"""What the tool door asks of whoever owns the episodes."""

from __future__ import annotations

from typing import Protocol

from turnstile_server.sandboxes.protocol import Sandbox


class EpisodeTools(Protocol):
    """One running episode, as its tools see it. Nothing here knows of reward."""

    @property
    def episode_id(self) -> str: ...

    @property
    def sandbox(self) -> Sandbox | None:
        """None where the episode has none: then ``submit`` is the only tool."""
        ...

    async def submit(self, answer: str) -> None:
        """Keeps the answer (the last one counts). It does not end the episode; the agent's end does, or, for an
        agent whose spec says so, its submission."""
        ...

    def check_open(self) -> None:
        """Raises Gone when the episode has ended, Conflict while its sandbox is not there yet."""
        ...

    async def ended(self) -> None:
        """Returns when tools are no longer served: what the door holds for the episode is then released, and
        calls that run are stopped."""
        ...


class ToolDirectory(Protocol):
    def open_tools(self, episode_id: str, key: str) -> EpisodeTools:
        """The running episode that ``key`` opens. Raises NotFound, Unauthorized, Gone, as the gate's does.

        ``key`` opens one episode only, also when its id is used again."""
        ...
