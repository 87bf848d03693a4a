"""The seams of the tools: what a tool is, what it gives back, and what it needs of its episode.

Built-in tools and a user's own tools are all ``ServedTool``s. Adding own tools to an episode is one ``OwnTools``;
the owner task of the episode opens it when the episode is prepared and releases it at the end, on every path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import mcp_types as mcp

from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.spans import OpenSpan


class WrongArguments(Exception):
    """The model called a tool with wrong arguments; the text tells it how to call the tool."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model sees it.

    ``input_schema`` and ``output_schema`` are JSON Schemas of objects. ``timeout_s``: seconds that a call of an
    own tool may take; None is ``tools.own_timeout_s``. Built-in tools keep time themselves.
    """

    name: str
    description: str
    input_schema: dict[str, Any]
    title: str | None = None
    output_schema: dict[str, Any] | None = None
    annotations: mcp.ToolAnnotations | None = None
    timeout_s: float | None = None

    def as_mcp(self, *, text_alone: bool = False) -> mcp.Tool:
        """The tool as MCP lists it. ``text_alone``: without its output schema."""
        return mcp.Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=self.input_schema,
            output_schema=None if text_alone else self.output_schema,
            annotations=self.annotations,
        )


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool, as the model gets it.

    ``text`` is always the plain-text form (OpenEnv, logs). ``is_error``: the tool could not do what was asked; a
    command that ran and failed is no error of the tool. ``structured``: the result as ``output_schema`` describes
    it. ``content``: replaces the one text block over MCP (images, audio, resources).
    """

    text: str
    is_error: bool = False
    structured: Mapping[str, Any] | None = None
    content: tuple[mcp.ContentBlock, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of its text, and of what it has in its place."""
        if not self.content:
            return len(self.text.encode(errors="surrogatepass"))
        return sum(len(block.model_dump_json()) for block in self.content)

    def as_mcp(self, *, text_alone: bool = False) -> mcp.CallToolResult:
        """The result as MCP has it. ``text_alone``: without its structured content."""
        structured = None if text_alone or self.structured is None else dict(self.structured)
        return mcp.CallToolResult(
            content=list(self.content) or [mcp.TextContent(text=self.text)],
            structured_content=structured,
            is_error=self.is_error,
        )


class Progress(Protocol):
    """The progress and the log messages of a running call, for its caller."""

    @property
    def wanted(self) -> bool:
        """True if the caller hears of progress. Where it does not, a tool may spare the work."""
        ...

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """``progress`` grows from call to call. Never raises: a caller that left needs no news."""
        ...

    async def log(self, level: mcp.LoggingLevel, data: Any, logger: str | None = None) -> None:
        """A log message for the caller: JSON, and the name of what logs. Never raises."""
        ...


class NoProgress:
    """For callers that take no progress."""

    wanted = False

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        return

    async def log(self, level: mcp.LoggingLevel, data: Any, logger: str | None = None) -> None:
        return


NO_PROGRESS = NoProgress()


class ServedTool(Protocol):
    """A tool of an episode."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        """Runs the tool. Cancelling the call stops what it runs.

        Raises WrongArguments and FileProblem, which the model gets as results, and SandboxFailed, which is no
        fault of the model. Any other exception of an own tool is logged, and is a result with ``is_error``.
        """
        ...


class EpisodeTools(Protocol):
    """One running episode, as its tools see it. It says nothing of reward."""

    @property
    def episode_id(self) -> str: ...

    def recorded(self, tool: str, bytes_in: int) -> AbstractContextManager[OpenSpan]:
        """Records a call of a tool, around the block. ``bytes_in``: of its arguments."""
        ...

    @property
    def sandbox(self) -> Sandbox | None:
        """None where the episode has no sandbox: then ``submit`` is the only built-in tool."""
        ...

    @property
    def own_tools(self) -> Sequence[ServedTool]:
        """The tools beside the built-in ones: the same from the start of the episode to its end."""
        ...

    @property
    def has_user(self) -> bool:
        """True if a simulated user answers what is submitted."""
        ...

    @property
    def plain_tools(self) -> bool:
        """True if the agent gets text alone: no structured content, output schemas and server instructions, which
        it would show to its model."""
        ...

    async def submit(self, answer: str) -> str | None:
        """Keeps the answer; the last one counts. Returns what the simulated user says to it; None where there is
        no user, or the conversation is over.

        Where it returns None it ends the episode, for an agent whose spec says ``ends_on_submit`` and no other.
        Raises what ``check_open`` raises, and TaskFailed where the user cannot be played.
        """
        ...

    def check_open(self) -> None:
        """Raises Gone when the episode has ended, Conflict while it is still being prepared."""
        ...

    async def stop_requested(self) -> None:
        """Returns when tools are no longer served.

        The endpoint then releases what it holds for the episode and stops running calls.
        """
        ...


class OwnTools(Protocol):
    """Some of an episode's own tools: of the server, of the task, of a world."""

    @property
    def place(self) -> str:
        """The place where they are defined, in words for an error message: ``the task shop``."""
        ...

    def open(self, episode: EpisodeTools) -> AbstractAsyncContextManager[Sequence[ServedTool]]:
        """The tools of one episode, and what they hold until it ends.

        Entered and left in one task, after the sandbox is prepared. It is left after the grading, when no call
        runs any more. Entering may raise a TurnstileError, which then fails the episode with its fault.
        """
        ...


class SessionTools(OwnTools, Protocol):
    """Tools of a grader, which judges what was done with them."""

    @property
    def session(self) -> object | None:
        """The object that the grader judges by, from ``open`` until its block is left; else None."""
        ...


class ToolDirectory(Protocol):
    """Finds the episode of a request."""

    def open_tools(self, episode_id: str, key: str) -> EpisodeTools:
        """The running episode that ``key`` opens.

        Raises NotFound (unknown id), WrongKey, Gone (ended or deleted). A key opens one episode
        only, even when its id is used again.
        """
        ...
