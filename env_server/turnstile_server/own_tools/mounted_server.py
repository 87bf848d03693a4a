"""One mounted MCP server: connected, asked for its tools, called, connected again, ended.

A task of its own holds the connection, because the client must be entered and left in one task while calls come
from others. What must hold: the tools are those that the server named first; a call gets an answer whatever the
server does; when the task has ended, no process of the server is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import mcp_types as mcp
from anyio.abc import TaskStatus
from mcp import Client, MCPError
from mcp.client._transport import TransportStreams
from mcp.client.session import IncomingMessage
from pydantic import ValidationError

from turnstile_server.own_tools.bounds import OwnToolBounds
from turnstile_server.own_tools.content import as_result
from turnstile_server.own_tools.http_streams import http_streams
from turnstile_server.own_tools.server_link import ServerLink
from turnstile_server.own_tools.stdio import MissingVariable, stdio_streams
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import ALL, ServerSpec
from turnstile_server.tools.protocol import Progress, ToolResult

_LOG = logging.getLogger(__name__)

_NEWS_S = 0.5
"""Time for the task that holds the connection to learn why it ended, before a call that failed by it answers."""

_MOST_PAGES = 100


class MountFailed(Exception):
    """The server cannot be started, or has not the tools that it is mounted for; the text says why."""


class MountedServer:
    """``run`` is its task. ``place``: where it is said, for messages."""

    def __init__(self, spec: ServerSpec, place: str, settings: ToolSettings) -> None:
        self._spec = spec
        self._settings = settings
        self._bounds = settings.bounds_of(OwnToolBounds)
        self.shown = f"{place}: MCP server {spec.name}"
        self.tools: tuple[mcp.Tool, ...] = ()
        """Those that are allowed, as the server named them when it was first connected. They never change."""
        self.up = anyio.Event()
        """Set while it is connected, and replaced when it is not."""
        self._client: Client | None = None
        self._link = ServerLink(settings)
        self._named: frozenset[str] = frozenset()
        """The names that it has now."""
        self._renamed = False
        """It said that its tools have changed, and was not asked again yet."""
        self._stop = anyio.Event()

    def stop(self) -> None:
        """Has ``run`` end the server and return."""
        self._stop.set()
        self._link.lost.set()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Connects, and reports its start when the tools are known. Raises MountFailed before that, never after.
        Cancelling it ends the server too."""
        first_s, longest_s = self._bounds.mount_restart_s, self._bounds.mount_max_restart_s
        pause_s = first_s
        while not self._stop.is_set():
            self._link = ServerLink(self._settings)
            began = time.monotonic()
            await self._connected(task_status)
            if not self.tools:
                raise MountFailed(f"{self.shown} cannot be used: {self._link.why()}")
            if self._stop.is_set():
                return
            _LOG.warning("%s is gone: %s", self.shown, self._link.why())
            if not self._spec.restarts:
                return
            if time.monotonic() - began > longest_s:
                pause_s = first_s
            with anyio.move_on_after(pause_s):
                await self._stop.wait()
            pause_s = min(2 * pause_s, max(first_s, longest_s))

    async def _connected(self, task_status: TaskStatus[None]) -> None:
        """One connection, from its beginning to its end; the link then knows why."""
        start_s = self._spec.start_timeout_s or self._settings.mount_start_timeout_s
        named = False
        try:
            with anyio.CancelScope(deadline=anyio.current_time() + start_s) as starting:
                # A command is spoken to in the old way: some servers leave at a message before `initialize`.
                mode = "legacy" if self._spec.command is not None else "auto"
                async with Client(self._streams(), mode=mode, message_handler=self._heard) as client:
                    first = not self.tools
                    await self._list(client, first=first)
                    starting.deadline, named = float("inf"), True
                    self._client = client
                    self.up.set()
                    if first:
                        task_status.started()
                    await self._link.lost.wait()
                    self._down()
                    starting.deadline = anyio.current_time() + self._bounds.mount_grace_s
            if starting.cancelled_caught and not named:
                self._link.lose(f"it did not name its tools within {start_s:g} s")
        except Exception as error:  # noqa: BLE001 - the boundary to another program: whatever its connection raises
            self._link.lose(_said(error))
        finally:
            self._down()

    def _down(self) -> None:
        """Calls are answered without it; whoever waits for ``up`` waits for the next connection."""
        self._client = None
        if self.up.is_set():
            self.up = anyio.Event()

    def _streams(self) -> AbstractAsyncContextManager[TransportStreams]:
        opened = stdio_streams if self._spec.command is not None else http_streams
        return opened(self._spec, self._settings, self._link)

    async def _heard(self, message: IncomingMessage) -> None:
        if isinstance(message, mcp.ToolListChangedNotification):
            self._renamed = True

    async def _list(self, client: Client, *, first: bool) -> None:
        """Asks the server for its tools. Raises MountFailed where the first list lacks what is allowed."""
        found = await _all_tools(client, self._bounds.mount_max_tools)
        self._named = frozenset(tool.name for tool in found)
        self._renamed = False
        if not first:
            gone = sorted({tool.name for tool in self.tools} - self._named)
            if gone:
                _LOG.warning("%s has no tools %s any more; calls of them fail", self.shown, ", ".join(gone))
            return
        missing = [name for name in self._spec.allow if name != ALL and name not in self._named]
        if missing:
            raise MountFailed(
                f"it has no tool {', '.join(map(repr, missing))} (allow); it has {', '.join(sorted(self._named))}"
            )
        kept = tuple(tool for tool in found if ALL in self._spec.allow or tool.name in self._spec.allow)
        if not kept:
            raise MountFailed("it has no tools")
        self.tools = kept

    async def call(self, name: str, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        """Calls one of ``tools``. Cancelling it tells the server so."""
        client, link = self._client, self._link
        if client is None:
            return self._error("is being started again" if self._spec.restarts else "is not running", link)
        try:
            if self._renamed:
                await self._list(client, first=False)
            if name not in self._named:
                return _failed(f"the tool {name!r} is gone: {self.shown} has {', '.join(sorted(self._named))} now")
            done = await client.call_tool(name, dict(arguments), progress_callback=progress.report)
        except MCPError as error:
            if error.code == mcp.CONNECTION_CLOSED:
                with anyio.move_on_after(_NEWS_S):
                    await link.lost.wait()
            if error.code == mcp.CONNECTION_CLOSED or "Session terminated" in error.message:
                link.lose(error.message)
                return self._error("failed during the call", link)
            return _failed(f"{name}: {error.message}")
        except (MountFailed, ValidationError, RuntimeError) as error:
            return _failed(f"{name}: {self.shown} gave an answer that cannot be used: {_said(error)}")
        return as_result(done)

    def _error(self, state: str, link: ServerLink) -> ToolResult:
        return _failed(f"{self.shown} {state}: {link.why()}")


def _failed(text: str) -> ToolResult:
    return ToolResult(text, is_error=True)


async def _all_tools(client: Client, most: int) -> Sequence[mcp.Tool]:
    found: list[mcp.Tool] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        found += page.tools
        if len(found) > most:
            raise MountFailed(f"it names more than {most} tools")
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise MountFailed(f"its list of tools has more than {_MOST_PAGES} pages")


def _said(error: BaseException) -> str:
    """The message of an error; of a group, that of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, MountFailed | MissingVariable):
        return str(error)
    if isinstance(error, MCPError):
        return error.message
    if isinstance(error, FileNotFoundError):
        return f"there is no program {error.filename}"
    return f"{type(error).__name__}: {error}"
