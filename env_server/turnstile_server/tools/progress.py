"""Progress of a running call: from a command's output to the MCP notifications of its client.

Holds: the numbers of one call only grow, as MCP asks; a client that did not ask gets nothing; a report never fails
the call that it is of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import anyio
import mcp_types as mcp
from mcp.server.connection import allowed_log_levels
from mcp.server.context import ServerRequestContext

from turnstile_server.errors import TurnstileError
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox
from turnstile_server.tools.protocol import Progress

_LEVELS: tuple[mcp.LoggingLevel, ...] = get_args(mcp.LoggingLevel)
"""From the least severe to the most."""
MESSAGE_CHARS = 1000
"""Longest message; a longer one is cut."""


class CallProgress:
    """A ``Progress`` that sends notifications to the client of an MCP call.

    ``level``: the least level of log messages that its session wants. None: its protocol version says so with each
    request (2026-07-28).
    """

    def __init__(self, context: ServerRequestContext[Any, Any], level: mcp.LoggingLevel | None) -> None:
        self._context = context
        self._levels = (
            allowed_log_levels(context.protocol_version, context.meta)
            if level is None
            else frozenset(_LEVELS[_LEVELS.index(level) :])
        )
        self._said: float | None = None

    @property
    def wanted(self) -> bool:
        return self._context.meta is not None and self._context.meta.get("progress_token") is not None

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        if not self.wanted or (self._said is not None and progress <= self._said):
            return
        self._said = progress
        shown = None if message is None else message[:MESSAGE_CHARS]
        await self._context.session.report_progress(progress, total, shown)

    async def log(self, level: mcp.LoggingLevel, data: Any, logger: str | None = None) -> None:
        if level not in self._levels:
            return
        params = mcp.LoggingMessageNotificationParams(level=level, data=data, logger=logger)
        await self._context.session.send_notification(
            mcp.LoggingMessageNotification(params=params), related_request_id=self._context.request_id
        )


async def run_reporting(sandbox: Sandbox, command: Command, progress: Progress, every_s: float) -> ExecResult:
    """Runs the command. While it runs, reports the seconds since its start and its latest line, each ``every_s``.

    Raises SandboxFailed. Cancelling it kills the command.
    """
    if not progress.wanted:
        return await sandbox.exec(command)
    latest: list[bytes] = []

    def keep(line: bytes) -> None:
        latest[:] = [line]

    async def report() -> None:
        started = anyio.current_time()
        while True:
            await anyio.sleep(every_s)
            message = latest[0].decode("utf-8", "replace") if latest else None
            await progress.report(round(anyio.current_time() - started, 3), None, message)

    failure: TurnstileError | None = None
    result: ExecResult | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(report)
        try:
            result = await sandbox.exec(replace(command, on_line=keep, line_s=every_s))
        except TurnstileError as error:  # as itself, not in the task group's exception group
            failure = error
        tasks.cancel_scope.cancel()
    if result is None:
        raise failure or AssertionError("unreachable")
    return result
