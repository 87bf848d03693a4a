"""``turnstile mcp``: the tools of an episode as an MCP server on standard input and output."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Annotated

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import httpx
import typer

from turnstile import errors
from turnstile._mcp_bridge import McpBridge
from turnstile._retry import ClientSettings
from turnstile._transport import client_arguments
from turnstile.cli.connection import DEFAULT_URL, DataDirOption, KeyOption, key_from
from turnstile.cli.output import FAILED, USAGE, echo, fail, reported
from turnstile.client import AsyncClient, AsyncNewEpisodeHandle
from turnstile.models import EpisodeStatus

MAX_LINE_BYTES = 16 << 20
"""Longest message from the client; a longer one is refused, and is the last."""
_READ_BYTES = 1 << 16
_CONNECT_S = 10.0
_LOOK_S = 0.2
_NOT_YET = frozenset({EpisodeStatus.QUEUED, EpisodeStatus.PREPARING})


class AtEnd(StrEnum):
    """The action on the episode when the client closes standard input."""

    FINISH = "finish"
    CANCEL = "cancel"
    KEEP = "keep"


def mcp(
    tool_url: Annotated[
        str | None, typer.Option("--tool-url", help="Tools of a running episode: its `tool_url`.")
    ] = None,
    episode_key: Annotated[
        str | None,
        typer.Option(
            "--episode-key", envvar="TURNSTILE_EPISODE_KEY", help="Key of that episode.", show_default=False
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Create an episode of this task id (or instruction) instead.")
    ] = None,
    at_end: Annotated[
        AtEnd | None,
        typer.Option(
            "--at-end",
            help="With --task, when standard input ends: finish (grade it), cancel or keep the episode.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="With --task: the episode's seed.")] = None,
    url: Annotated[
        str, typer.Option("--url", envvar="TURNSTILE_URL", help="With --task: the server's URL.")
    ] = DEFAULT_URL,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Serve the tools of an episode as an MCP server on standard input and output.

    Either of a running episode (--tool-url and its key), or of one that is created for this (--task). What there
    is to say of the episode goes to standard error.
    """
    if (tool_url is None) is (task is None):
        fail("name either --tool-url, of a running episode, or --task, to create one", USAGE)
    if task is None and (at_end is not None or seed is not None):
        fail("--at-end and --seed are for --task; an episode that was there before is left as it is", USAGE)
    if tool_url is not None and not episode_key:
        fail("--tool-url needs --episode-key, or TURNSTILE_EPISODE_KEY", USAGE)
    with reported():
        if task is not None:
            anyio.run(_play, task, seed, at_end or AtEnd.FINISH, url, key or key_from(data_dir))
        else:
            anyio.run(_serve, tool_url or "", episode_key or "")


async def _play(task: str, seed: int | None, at_end: AtEnd, url: str, key: str | None) -> None:
    async with AsyncClient(url, key=key) as client, await client.create_episode(task, seed=seed) as episode:
        _tell(f"episode {episode.episode_id}; its model API: {episode.model_url}")
        while (await episode.status()).status in _NOT_YET:  # noqa: ASYNC110 - the server's state, not ours
            await anyio.sleep(_LOOK_S)
        if episode.tool_url is None:
            fail(f"episode {episode.episode_id} has no tools", FAILED)
        await _serve(episode.tool_url, episode.episode_key or "")
        await _end(episode, at_end)


async def _end(episode: AsyncNewEpisodeHandle, at_end: AtEnd) -> None:
    if at_end is AtEnd.KEEP:
        return
    try:
        ended = await (episode.finish() if at_end is AtEnd.FINISH else episode.cancel())
    except errors.Gone:
        ended = await episode.status()  # it ended by itself: a limit, or `submit`
    reward = "" if ended.reward is None else f", reward {ended.reward:g}"
    _tell(f"episode {episode.episode_id} {ended.status}{reward}")


async def _serve(tool_url: str, episode_key: str) -> None:
    """Serves until standard input ends, nobody reads standard output, or the process is asked to end."""
    write_lock = anyio.Lock()

    async def write(line: bytes) -> None:
        async with write_lock:
            try:
                await anyio.to_thread.run_sync(_write, line)
            except BrokenPipeError:
                serving.cancel()

    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    arguments = {**client_arguments(ClientSettings()), "limits": httpx.Limits(max_connections=None)}
    headers = {"authorization": f"Bearer {episode_key}"}
    async with (
        httpx.AsyncClient(headers=headers, timeout=timeout, **arguments) as http,
        _stopped_by_signals() as serving,
        _lines() as lines,
    ):
        await McpBridge(http, tool_url, write).run(lines)


def _write(line: bytes) -> None:
    """By the descriptor, so that Python has nothing left to write when nobody reads any more."""
    view = memoryview(line)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


@asynccontextmanager
async def _stopped_by_signals() -> AsyncIterator[anyio.CancelScope]:
    """Leaves the block when a client ends the process instead of closing standard input; gives its scope."""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    return

        tasks.start_soon(watch)
        yield tasks.cancel_scope
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _lines() -> AsyncIterator[AsyncIterator[bytes]]:
    """The lines of standard input.

    A thread reads them, and the end of the program does not wait for it, because such a read cannot be stopped. It
    reads the descriptor: Python's own object would be locked at the end, which Python takes for a fatal error.
    """
    send, receive = anyio.create_memory_object_stream[bytes](0)
    token = anyio.lowlevel.current_token()

    def read() -> None:
        rest = b""
        try:
            while data := os.read(sys.stdin.fileno(), _READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    anyio.from_thread.run(send.send, line, token=token)
                if len(rest) > MAX_LINE_BYTES:
                    break
            anyio.from_thread.run(send.send, rest, token=token)
            anyio.from_thread.run_sync(send.close, token=token)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.RunFinishedError):
            return  # the program ends, and wants no more lines

    threading.Thread(target=read, name="turnstile mcp: standard input", daemon=True).start()
    async with receive:
        yield receive


def _tell(sentence: str) -> None:
    echo(f"turnstile: {sentence}", err=True)
