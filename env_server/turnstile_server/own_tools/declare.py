"""The names that a user's tool file imports: ``@tool`` and ``ToolContext``. Imports nothing heavy, and no other
part of the server."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, Protocol, TypeVar

DECLARED = "__turnstile_tool__"
"""Attribute of a function that ``@tool`` marked."""

LogLevel = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class ToolDeclaration:
    """The arguments of ``@tool``."""

    where: Literal["host", "sandbox"]
    name: str | None
    title: str | None
    timeout_s: float | None
    read_only: bool | None
    destructive: bool | None
    idempotent: bool | None
    open_world: bool | None


def tool(
    *,
    where: Literal["host", "sandbox"],
    name: str | None = None,
    title: str | None = None,
    timeout_s: float | None = None,
    read_only: bool | None = None,
    destructive: bool | None = None,
    idempotent: bool | None = None,
    open_world: bool | None = None,
) -> Callable[[FunctionT], FunctionT]:
    """Declares a function as a tool. The function itself is not changed.

    ``where``: ``"host"`` runs it in the server's process, ``"sandbox"`` in the episode's sandbox. ``timeout_s``:
    time for one call. The last four are MCP's hints for clients (``readOnlyHint`` and so on).
    """
    if where not in ("host", "sandbox"):
        raise ValueError(f"@tool(where={where!r}): where is 'host' or 'sandbox'")
    declared = ToolDeclaration(where, name, title, timeout_s, read_only, destructive, idempotent, open_world)

    def mark(function: FunctionT) -> FunctionT:
        setattr(function, DECLARED, declared)
        return function

    return mark


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """The end of a command in the sandbox: its exit code (137 after a time-out) and its output as text."""

    exit_code: int
    stdout: str
    stderr: str


class ToolSandbox(Protocol):
    """The sandbox of the tool's own episode. Everything in it runs as the agent's user."""

    @property
    def workdir(self) -> str: ...

    async def run(self, command: str, *, timeout_s: float = 60.0, stdin: bytes = b"") -> CommandOutput:
        """Runs a command with bash in the work folder; output beyond ``tools.max_output_chars`` is left out."""
        ...

    async def read(self, path: str) -> bytes:
        """A file, at most ``tools.max_file_bytes``. A relative path starts in the work folder."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Makes a file, with its folders, or replaces it."""
        ...


class EpisodeState(SimpleNamespace):
    """The state that the host tools of one episode keep between calls, as attributes. Made empty for each episode.

    Calls may overlap: hold ``lock`` around what must not. ``at_end`` registers what is to be closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self._at_end: list[Callable[[], object]] = []

    def at_end(self, close: Callable[[], object]) -> None:
        """Has ``close`` called when the episode has ended and was graded: the latest first, each once. It may be
        async; if not, it runs in a worker thread."""
        self._at_end.append(close)

    def ended(self) -> list[Callable[[], object]]:
        """The functions that ``at_end`` registered, in the order in which to call them. The owner of the state
        calls this once, at the end."""
        closing, self._at_end = self._at_end[::-1], []
        return closing


class ToolContext(Protocol):
    """A host tool gets one for each call, if it has a parameter with this annotation. The model sees nothing of
    it.

    It leads to the tool's own episode only.
    """

    @property
    def episode_id(self) -> str: ...

    @property
    def state(self) -> EpisodeState: ...

    @property
    def sandbox(self) -> ToolSandbox | None:
        """None where the episode has no sandbox."""
        ...

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tells the client how far the call is. Never waits; from any thread."""
        ...

    def log(self, level: LogLevel, data: object, logger: str | None = None) -> None:
        """Sends the client a log message: JSON, and the name of what logs. Never waits; from any thread.

        Raises ValueError for an unknown level, TypeError for what is no JSON.
        """
        ...

    def wait_for(self, work: Callable[[], Awaitable[T]]) -> T:
        """For tools that are not async: runs ``work`` (such as ``lambda: context.sandbox.read(path)``) on the
        server's event loop and waits for its result."""
        ...
