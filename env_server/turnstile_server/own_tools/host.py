"""Functions that run in the server's process, and the context that they get.

A context leads to the call's own episode only, and is of no use after the call.
"""

from __future__ import annotations

import inspect
import json
import logging
import posixpath
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar, get_args

import anyio

from turnstile_server.errors import Gone
from turnstile_server.own_tools.bounds import OwnToolBounds
from turnstile_server.own_tools.declare import CommandOutput, EpisodeState, LogLevel, ToolSandbox
from turnstile_server.own_tools.signature import FunctionSignature
from turnstile_server.own_tools.threads import ToolThreads
from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.sandboxes.shell import shell_argv
from turnstile_server.settings import ToolSettings
from turnstile_server.threads import LoopCaller
from turnstile_server.tools.functions import cut_middle, decoded
from turnstile_server.tools.protocol import EpisodeTools, Progress, ServedTool, ToolResult, ToolSpec

T = TypeVar("T")

_NEWS_S = 1.0
"""Time for a client to take news of progress; then the call goes on without."""

_LOG = logging.getLogger(__name__)
_LOGS_KEPT = 64
"""Log messages of one call that wait to be sent; of more the oldest are lost."""


class HostFunctions:
    """The host functions of one place (settings or task). Implements OwnTools: each episode gets a state of its
    own, shared by these functions."""

    def __init__(
        self, place: str, functions: Sequence[FunctionSignature], threads: ToolThreads, settings: ToolSettings
    ) -> None:
        self.place = place
        self._functions = functions
        self._threads = threads
        self._settings = settings
        self._bounds = settings.bounds_of(OwnToolBounds)

    @asynccontextmanager
    async def open(self, episode: EpisodeTools) -> AsyncIterator[Sequence[ServedTool]]:
        state = EpisodeState()
        try:
            yield [HostFunction(function, state, self._threads, self._settings) for function in self._functions]
        finally:
            with anyio.CancelScope(shield=True):
                for close in state.ended():
                    await self._close(episode.episode_id, close)

    async def _close(self, episode_id: str, close: Callable[[], object]) -> None:
        """A state that cannot be closed keeps no episode from ending."""
        try:
            with anyio.fail_after(self._bounds.own_close_timeout_s):
                if inspect.iscoroutinefunction(close):
                    await close()
                    return
                returned = await self._threads.run(episode_id, close, closing=True)
                if inspect.isawaitable(returned):  # such as of `lambda: connection.aclose()`
                    await returned
        except Exception:  # noqa: BLE001 - the boundary to a user's code: logged, and the others are still closed
            _LOG.exception("the state of own tools could not be closed", extra={"episode_id": episode_id})


class HostFunction:
    """A function of the user's as a tool. Implements ServedTool."""

    def __init__(
        self, signature: FunctionSignature, state: EpisodeState, threads: ToolThreads, settings: ToolSettings
    ) -> None:
        self._signature = signature
        self._state = state
        self._threads = threads
        self._settings = settings

    @property
    def spec(self) -> ToolSpec:
        return self._signature.spec

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, object], progress: Progress) -> ToolResult:
        signature = self._signature
        given = signature.arguments(arguments)
        async with HostCall.open(episode, self._state, progress, self._settings) as context:
            if signature.context_parameter is not None:
                given[signature.context_parameter] = context
            function = partial(signature.function, **given)
            if inspect.iscoroutinefunction(signature.function):
                returned = await function()
            else:
                returned = await self._threads.run(episode.episode_id, function)
                if inspect.isawaitable(returned):
                    returned = await returned
        return signature.result(returned)


class HostCall:
    """Implements ToolContext for one call."""

    def __init__(self, episode: EpisodeTools, state: EpisodeState, settings: ToolSettings) -> None:
        self.episode_id = episode.episode_id
        self._state = state
        sandbox = episode.sandbox
        self._sandbox = None if sandbox is None else _CallSandbox(sandbox, settings, self._check)
        self._open = True
        self._loop = LoopCaller()
        self._news: tuple[float, float | None, str | None] | None = None
        self._logs: deque[tuple[LogLevel, object, str | None]] = deque(maxlen=_LOGS_KEPT)
        self._has_news = anyio.Event()

    @staticmethod
    @asynccontextmanager
    async def open(
        episode: EpisodeTools, state: EpisodeState, progress: Progress, settings: ToolSettings
    ) -> AsyncIterator[HostCall]:
        """Sends news of progress while the block runs; the last of it before the block is left."""
        call = HostCall(episode, state, settings)
        refused: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call._report, progress)
            try:
                yield call
            except Exception as error:  # noqa: BLE001 - raised below: the task group would wrap it
                refused = error
            finally:
                call._open = False
                tasks.cancel_scope.cancel()
        if refused is not None:
            raise refused
        await call._send(progress)

    @property
    def state(self) -> EpisodeState:
        return self._state

    @property
    def sandbox(self) -> ToolSandbox | None:
        return self._sandbox

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        if self._open:
            self._loop.call(self._note, (progress, total, message))

    def log(self, level: LogLevel, data: object, logger: str | None = None) -> None:
        json.dumps(data)  # what is no JSON is the tool's mistake, and raised in the tool
        if level not in get_args(LogLevel):
            raise ValueError(f"there is no log level {level!r}; the levels are {', '.join(get_args(LogLevel))}")
        if self._open:
            self._loop.call(self._note_log, (level, data, logger))

    def wait_for(self, work: Callable[[], Awaitable[T]]) -> T:
        self._check()

        async def done() -> T:
            return await work()

        return self._loop.wait_for(done())

    def _check(self) -> None:
        if not self._open:
            raise Gone("this call of the tool is over; its context is of no use any more")

    def _note(self, news: tuple[float, float | None, str | None]) -> None:
        self._news = news
        self._has_news.set()

    def _note_log(self, said: tuple[LogLevel, object, str | None]) -> None:
        self._logs.append(said)
        self._has_news.set()

    async def _report(self, progress: Progress) -> None:
        """Only the latest news and the latest logs are kept, so a tool that reports in a tight loop costs no
        memory."""
        while True:
            await self._has_news.wait()
            self._has_news = anyio.Event()
            await self._send(progress)

    async def _send(self, progress: Progress) -> None:
        while self._logs:
            await progress.log(*self._logs.popleft())
        news, self._news = self._news, None
        if news is not None:
            with anyio.move_on_after(_NEWS_S, shield=True):  # the end of the call does not take it back
                await progress.report(*news)


class _CallSandbox:
    """Implements ToolSandbox while its call runs."""

    def __init__(self, sandbox: Sandbox, settings: ToolSettings, check: Callable[[], None]) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._check = check

    @property
    def workdir(self) -> str:
        return self._sandbox.workdir

    async def run(self, command: str, *, timeout_s: float = 60.0, stdin: bytes = b"") -> CommandOutput:
        self._check()
        most = self._settings.max_output_chars
        done = await self._sandbox.exec(
            Command(shell_argv(command), timeout_s=timeout_s, max_output_bytes=4 * most, stdin=stdin)
        )
        stdout, stderr = (cut_middle(decoded(data), most) for data in (done.stdout, done.stderr))
        return CommandOutput(done.exit_code, stdout, stderr)

    async def read(self, path: str) -> bytes:
        self._check()
        return await self._sandbox.read(self._absolute(path), self._settings.max_file_bytes)

    async def write(self, path: str, data: bytes) -> None:
        self._check()
        await self._sandbox.write(self._absolute(path), data)

    def _absolute(self, path: str) -> str:
        return posixpath.join(self._sandbox.workdir, path)
