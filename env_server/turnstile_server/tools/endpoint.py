"""The MCP endpoint: a standard MCP server for each episode at ``/e/{episode_id}/mcp``.

It is opened by the episode's key. Streamable HTTP by the official SDK, in every protocol version it knows: those
that begin with ``initialize`` and have sessions (``DELETE`` ends one), and 2026-07-28, which has none. What the
endpoint itself refuses is a JSON-RPC error with a fitting HTTP status; ``data.type`` is the error's type of
``errors.py``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from types import TracebackType
from typing import Any

import anyio
import anyio.abc
import mcp_types as mcp
import orjson
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import Server
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from turnstile_server.errors import (
    InvalidRequest,
    NotFound,
    ServerStopping,
    TooManyCalls,
    TurnstileError,
    WrongKey,
)
from turnstile_server.http.agent_app import TOOL_PATH
from turnstile_server.http.exchange import AgentExchange, CallerGone, episode_key, split_path
from turnstile_server.http.intake import Intake
from turnstile_server.http.json_values import count_values, has_few_values
from turnstile_server.http.origins import OriginRules
from turnstile_server.http.stopping import Stopping
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.bounds import McpBounds
from turnstile_server.tools.mcp_request import McpRequest, request_of
from turnstile_server.tools.progress import CallProgress
from turnstile_server.tools.protocol import EpisodeTools, Progress, ToolDirectory, ToolResult
from turnstile_server.tools.sessions import EpisodeSessions
from turnstile_server.tools.toolbox import Toolbox

_LOG = logging.getLogger(__name__)


class McpEndpoint:
    """An ASGI application. Use as an async context manager: it owns the sessions of all episodes."""

    def __init__(
        self,
        directory: ToolDirectory,
        toolbox: Toolbox,
        settings: ToolSettings,
        origins: OriginRules,
        intake: Intake,
        stopping: Stopping,
        wrong_keys: WrongKeys,
    ) -> None:
        """``intake``: of the agent listener; the model API shares it."""
        self._directory = directory
        self._toolbox = toolbox
        self._settings = settings
        self._bounds = settings.bounds_of(McpBounds)
        self._origins = origins
        self._intake = intake
        self._stopping = stopping
        self._wrong_keys = wrong_keys
        self._counting = anyio.Lock()
        self._requests: Counter[str] = Counter()
        """Requests in flight, by episode key, from before their bodies are read."""
        self._schemas = {tool.name: tool.input_schema for tool in toolbox.all_tools}
        # The SDK logs sessions that agents open, and requests that it refuses: agents could fill the disk with it.
        logging.getLogger("mcp.server").setLevel(logging.ERROR)
        self._server = self._make_server(settings.instructions)
        self._plain_server = self._make_server("")
        self._sessions: dict[str, EpisodeSessions] = {}
        """By episode key: an id may be used again after its episode, a key is not."""
        self._tasks: anyio.abc.TaskGroup = anyio.create_task_group()

    @property
    def episodes_served(self) -> int:
        """Episodes that have sessions."""
        return len(self._sessions)

    @property
    def sessions_open(self) -> int:
        return sum(sessions.open for sessions in self._sessions.values())

    @property
    def requests_in_flight(self) -> int:
        return sum(sessions.in_flight for sessions in self._sessions.values())

    async def __aenter__(self) -> McpEndpoint:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = AgentExchange(scope, receive, send, self._settings, "tools", self._intake)
        with contextlib.suppress(CallerGone):
            try:
                self._origins.check(scope)
                await self._serve(exchange, scope, receive, send)
            except TurnstileError as error:
                if isinstance(error, WrongKey):
                    with contextlib.suppress(ServerStopping), self._stopping.interruptible():
                        await self._wrong_keys.slow("tools", scope)
                await exchange.refuse(error, _refusal(error))

    async def _serve(self, exchange: AgentExchange, scope: Scope, receive: Receive, send: Send) -> None:
        key, episode = self._admitted(exchange)
        started = completed = False

        async def noted(message: Message) -> None:
            nonlocal started, completed
            started = True
            completed = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            with self._in_flight(key), self._stopping.interruptible():
                with exchange.reserving(episode.episode_id):
                    body = await exchange.body()
                    await self._check_values(body)
                await self._serve_body(key, episode, body, scope, receive, noted)
        except ServerStopping:
            if not started:
                raise
            if not completed:  # the stream ends in order: its client comes back for the rest
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    @contextlib.contextmanager
    def _in_flight(self, key: str) -> Iterator[None]:
        """Bounds the requests of an episode, before a byte of their bodies is read."""
        most = self._bounds.max_requests_per_episode
        if self._requests[key] >= most:
            raise TooManyCalls(
                f"the episode has {most} MCP requests in flight, its limit",
                retry_after_s=1.0,
            )
        self._requests[key] += 1
        try:
            yield
        finally:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]

    async def _check_values(self, body: bytes) -> None:
        """Before the SDK reads the body, which takes up to ten microseconds of the event loop for each value."""
        most = self._bounds.max_body_values
        if has_few_values(body, most):
            return
        async with self._counting:  # the event loop serves others between two of them
            if count_values(body, most) > most:
                raise InvalidRequest(
                    f"the body has more than {most} JSON values; send long data as text, or in parts"
                )

    async def _serve_body(
        self, key: str, episode: EpisodeTools, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        episode.check_open()
        sessions = self._sessions.get(key)
        if sessions is None:
            server = self._plain_server if episode.plain_tools else self._server
            sessions = self._sessions[key] = EpisodeSessions(server, self._settings)
            self._tasks.start_soon(self._keep, key, sessions, episode)
        await sessions.serve(episode, scope, body, receive, send)

    def _admitted(self, exchange: AgentExchange) -> tuple[str, EpisodeTools]:
        """The key, and the episode that it opens. Raises NotFound, Unauthorized, WrongKey, Gone."""
        episode_id, rest = split_path(exchange.path)
        if not episode_id or rest.rstrip("/") != TOOL_PATH:
            raise NotFound(f"tools are served at /e/{{episode_id}}{TOOL_PATH}")
        key = episode_key(exchange.headers)
        episode = self._directory.open_tools(episode_id, key)
        exchange.admit()
        episode.check_open()  # before the body is read, which would be for nothing
        return key, episode

    async def _keep(self, key: str, sessions: EpisodeSessions, episode: EpisodeTools) -> None:
        try:
            await sessions.run(episode)
        except Exception:  # noqa: BLE001 - one episode's fault must not end the sessions of the others
            _LOG.exception("the MCP endpoint of an episode failed", extra={"episode_id": episode.episode_id})
        finally:
            self._sessions.pop(key, None)

    def _make_server(self, instructions: str) -> Server[Any]:
        server: Server[Any] = Server(
            "turnstile",
            version=version("turnstile-rl"),
            instructions=instructions or None,
            get_tool_input_schema=self._schemas.get,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )
        # As a handler, not as the constructor's argument, which warns that 2026-07-28 has no such method.
        server.add_request_handler("logging/setLevel", mcp.SetLevelRequestParams, _set_log_level)
        server.middleware.append(_note_version)
        return server

    def _text_alone(self, episode: EpisodeTools) -> bool:
        return episode.plain_tools or not self._settings.structured_results

    async def _list_tools(
        self, context: ServerRequestContext[Any, Request], params: mcp.PaginatedRequestParams | None
    ) -> mcp.ListToolsResult:
        episode = _request(context).episode
        tools = self._toolbox.tools_of(episode)
        text_alone = self._text_alone(episode)
        return mcp.ListToolsResult(tools=[tool.as_mcp(text_alone=text_alone) for tool in tools])

    async def _call_tool(
        self, context: ServerRequestContext[Any, Request], params: mcp.CallToolRequestParams
    ) -> mcp.CallToolResult:
        request = _request(context)
        result = ToolResult("the call was stopped", is_error=True)
        with request.running_call(str(context.request_id)):
            result = await self._run_tool(request.episode, params, _progress_of(context))
        return result.as_mcp(text_alone=self._text_alone(request.episode))

    async def _run_tool(
        self, episode: EpisodeTools, params: mcp.CallToolRequestParams, progress: Progress
    ) -> ToolResult:
        try:
            return await self._toolbox.call(episode, params.name, params.arguments, progress)
        except TurnstileError as error:
            return ToolResult(error.message, is_error=True)
        except Exception:  # noqa: BLE001 - the boundary: an agent gets a result whatever is broken here
            _LOG.exception("a tool failed", extra={"episode_id": episode.episode_id})
            return ToolResult("the tool failed; the server's log says why", is_error=True)


def _request(context: ServerRequestContext[Any, Request]) -> McpRequest:
    assert context.request is not None  # every message of this transport comes with its HTTP request
    return request_of(context.request.scope)


async def _note_version(ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
    session = _request(ctx).session
    if session is not None and ctx.method != "initialize":
        session.version = ctx.protocol_version
    return await call_next(ctx)


async def _set_log_level(
    context: ServerRequestContext[Any, Request], params: mcp.SetLevelRequestParams
) -> mcp.EmptyResult:
    session = _request(context).session
    assert session is not None  # a method of the versions with sessions
    session.log_level = params.level
    return mcp.EmptyResult()


def _progress_of(context: ServerRequestContext[Any, Request]) -> Progress:
    session = _request(context).session
    return CallProgress(context, None if session is None else session.log_level)


def _refusal(error: TurnstileError) -> bytes:
    """The error as a JSON-RPC error that answers no particular request."""
    data: dict[str, Any] = {"type": error.type}
    if error.detail is not None:
        data["detail"] = error.detail
    fault = {"code": mcp.INVALID_REQUEST, "message": error.message, "data": data}
    return orjson.dumps({"jsonrpc": "2.0", "id": None, "error": fault}, default=str)
