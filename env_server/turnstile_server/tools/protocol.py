"""What the MCP endpoint needs of the owner of the episodes."""

from __future__ import annotations

from typing import Protocol

from turnstile_server.sandboxes.protocol import Sandbox


class EpisodeTools(Protocol):
    """One running episode, as its tools see it. It says nothing of reward."""

    @property
    def episode_id(self) -> str: ...

    @property
    def sandbox(self) -> Sandbox | None:
        """None where the episode has no sandbox: then ``submit`` is the only tool."""
        ...

    async def submit(self, answer: str) -> None:
        """Keeps the answer; the last one counts.

        It ends the episode only for an agent whose spec says ``ends_on_submit``. Raises what ``check_open``
        raises.
        """
        ...

    def check_open(self) -> None:
        """Raises Gone when the episode has ended, Conflict while its sandbox is still being prepared."""
        ...

    async def stop_requested(self) -> None:
        """Returns when tools are no longer served.

        The endpoint then releases what it holds for the episode and stops running calls.
        """
        ...


class ToolDirectory(Protocol):
    """Finds the episode of a request."""

    def open_tools(self, episode_id: str, key: str) -> EpisodeTools:
        """The running episode that ``key`` opens.

        Raises NotFound (unknown id), Unauthorized (wrong key), Gone (ended or deleted). A key opens one episode
        only, even when its id is used again.
        """
        ...
