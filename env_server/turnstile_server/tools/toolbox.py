"""The built-in tools as models see them, and the path of one tool call, built-in or own.

Agents call tools over MCP, trainers over OpenEnv. Holds: whatever a model sends gets a result that it can read;
results and running calls are bounded; cancelling a call stops its command; writes to files of one episode run one
after another, so that no edit is lost. Nothing here knows of reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import anyio
import mcp_types as mcp

from turnstile_server.errors import Conflict, FileProblem
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.arguments import (
    Arguments,
    ArgumentsT,
    BashArguments,
    EditFileArguments,
    ReadFileArguments,
    SubmitArguments,
    WriteFileArguments,
    json_size,
    parsed,
    schema,
)
from turnstile_server.tools.functions import bash, edit_file, read_file, write_file
from turnstile_server.tools.guard import guarded_call
from turnstile_server.tools.protocol import (
    NO_PROGRESS,
    EpisodeTools,
    Progress,
    ServedTool,
    ToolResult,
    ToolSpec,
    WrongArguments,
)
from turnstile_server.tools.results import (
    BashResult,
    EditFileResult,
    ReadFileResult,
    Result,
    SubmitResult,
    TalkResult,
    WriteFileResult,
    output_schema,
)

SUBMIT = "submit"


@dataclass(slots=True)
class _RunningCalls:
    """The state that the running calls of one episode share."""

    calls: int = 0
    writing: anyio.Lock = field(default_factory=anyio.Lock)


_Run = Callable[[Sandbox, ArgumentsT, ToolSettings, Progress], Awaitable[ToolResult]]


@dataclass(frozen=True, slots=True)
class _SandboxTool(Generic[ArgumentsT]):
    spec: ToolSpec
    arguments: type[ArgumentsT]
    run: _Run[ArgumentsT]
    settings: ToolSettings

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        assert episode.sandbox is not None  # without one, `_tools_of` has no such tool
        checked = parsed(self.spec.name, self.arguments, arguments)
        return await self.run(episode.sandbox, checked, self.settings, progress)


@dataclass(frozen=True, slots=True)
class _Submit:
    spec: ToolSpec
    settings: ToolSettings

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        answer = parsed(SUBMIT, SubmitArguments, arguments).answer
        most = self.settings.max_answer_chars
        if len(answer) > most:
            raise WrongArguments(f"the answer has {len(answer)} characters; the most is {most}")
        said = await episode.submit(answer)
        if not episode.has_user:
            return ToolResult("Your answer was received.", structured=SubmitResult(received=True).model_dump())
        text = "The conversation is over." if said is None else f"The user replies: {said}"
        return ToolResult(text, structured=TalkResult(received=True, user=said).model_dump())


_HINTS: dict[str, tuple[str, type[Result], bool, bool, bool]] = {
    "bash": ("Run a command", BashResult, False, True, False),
    "read_file": ("Read a file", ReadFileResult, True, False, True),
    "write_file": ("Write a file", WriteFileResult, False, True, True),
    "edit_file": ("Edit a file", EditFileResult, False, True, False),
    SUBMIT: ("Submit the answer", SubmitResult, False, False, True),
}
"""Title, result, and whether a tool only reads, may destroy, and may be repeated without further effect."""
_TALK = (
    "Sends a message to the user; the result is the user's reply. Go on until the result says that the "
    "conversation is over."
)
"""``submit`` where a simulated user answers."""
_WRITERS = frozenset({"write_file", "edit_file"})
"""Tools that change files: one after another in an episode."""


class Toolbox:
    """The tools of every episode. Keeps only what running calls of one episode share."""

    def __init__(self, settings: ToolSettings, own: Sequence[ToolSpec] = ()) -> None:
        """``own``: tools of the server's settings, to be listed where there is no episode yet."""
        self._settings = settings
        self._own = tuple(own)
        self._in_use: dict[str, _RunningCalls] = {}
        self._paused: dict[str, anyio.Event] = {}
        """By episode: set when its calls may go on."""

        def tool(name: str, arguments: type[ArgumentsT], run: _Run[ArgumentsT]) -> _SandboxTool[ArgumentsT]:
            return _SandboxTool(_spec(name, arguments, settings), arguments, run, settings)

        submit = _spec(SUBMIT, SubmitArguments, settings)
        self._submit: ServedTool = _Submit(submit, settings)
        hints = mcp.ToolAnnotations(title="Talk to the user", read_only_hint=False, open_world_hint=False)
        talk = replace(submit, description=_TALK, title=hints.title, annotations=hints)
        self._talk: ServedTool = _Submit(replace(talk, output_schema=output_schema(TalkResult)), settings)
        self._builtin: tuple[ServedTool, ...] = (
            tool("bash", BashArguments, bash),
            tool("read_file", ReadFileArguments, read_file),
            tool("write_file", WriteFileArguments, write_file),
            tool("edit_file", EditFileArguments, edit_file),
            self._submit,
        )

    @property
    def all_tools(self) -> tuple[ToolSpec, ...]:
        """The built-in tools and those of the server's settings. An episode may have fewer (without a sandbox),
        and its task's beside them."""
        return (*(tool.spec for tool in self._builtin), *self._own)

    def tools_of(self, episode: EpisodeTools) -> tuple[ToolSpec, ...]:
        """The tools of an episode: the built-in ones (``submit`` alone where it has no sandbox), then its own."""
        return tuple(tool.spec for tool in self._tools_of(episode))

    def _tools_of(self, episode: EpisodeTools) -> tuple[ServedTool, ...]:
        builtin = (self._submit,) if episode.sandbox is None else self._builtin
        if episode.has_user:
            builtin = (*builtin[:-1], self._talk)
        return (*builtin, *episode.own_tools)

    @contextmanager
    def paused(self, episode_id: str) -> Iterator[None]:
        """Tool calls of the episode wait while the block runs. Raises Conflict where one runs already."""
        if episode_id in self._in_use or episode_id in self._paused:
            raise Conflict(f"a tool call of episode {episode_id} runs: ask between two turns")
        pause = self._paused[episode_id] = anyio.Event()
        try:
            yield
        finally:
            del self._paused[episode_id]
            pause.set()

    async def call(
        self,
        episode: EpisodeTools,
        name: str,
        arguments: Mapping[str, Any] | None,
        progress: Progress = NO_PROGRESS,
    ) -> ToolResult:
        """Runs a tool. Cancelling the call stops its command.

        A mistake of the model, and a file or a command that did not let it do what it wanted, is a result with
        ``is_error``. Raises Gone when the episode has ended, Conflict while it is still being prepared,
        SandboxFailed when its sandbox died.
        """
        with episode.recorded(name, json_size(arguments or {})) as span:
            result = await self._called(episode, name, arguments, progress)
            span.note(bytes_out=result.size)
            span.error = "tool_error" if result.is_error else None
            return result

    async def _called(
        self, episode: EpisodeTools, name: str, arguments: Mapping[str, Any] | None, progress: Progress
    ) -> ToolResult:
        while (pause := self._paused.get(episode.episode_id)) is not None:
            await pause.wait()
        episode.check_open()
        most = self._settings.max_calls_per_episode
        in_use = self._in_use.setdefault(episode.episode_id, _RunningCalls())
        if in_use.calls >= most:
            return _error(f"{most} tool calls are running, which is the limit; wait for one to end")
        in_use.calls += 1
        try:
            return await self._run(episode, name, arguments or {}, progress, in_use.writing)
        except WrongArguments as error:
            return _error(str(error))
        except FileProblem as error:
            return _error(error.message)
        finally:
            in_use.calls -= 1
            if not in_use.calls:
                del self._in_use[episode.episode_id]

    async def _run(
        self,
        episode: EpisodeTools,
        name: str,
        arguments: Mapping[str, Any],
        progress: Progress,
        writing: anyio.Lock,
    ) -> ToolResult:
        tools = {tool.spec.name: tool for tool in self._tools_of(episode)}
        if name not in tools:
            raise WrongArguments(f"there is no tool {name!r}; the tools are {', '.join(tools)}")
        tool = tools[name]
        if tool in episode.own_tools:
            return await guarded_call(tool, episode, arguments, progress, self._settings)
        if name not in _WRITERS:
            return await tool.call(episode, arguments, progress)
        async with writing:
            return await tool.call(episode, arguments, progress)


def _error(text: str) -> ToolResult:
    return ToolResult(text, is_error=True)


def _spec(name: str, arguments: type[Arguments], settings: ToolSettings) -> ToolSpec:
    outputs = (
        "standard output, then standard error"
        if settings.separate_stderr
        else "standard output and error together"
    )
    about = {
        "bash": (
            f"Runs a command with bash in the working directory and returns its output ({outputs}) "
            "and its exit status. Every call is a new shell: variables and the current directory do not "
            f"carry over, files do. A command is killed after {settings.command_timeout_s:g} seconds, or after "
            f"timeout_s (at most {settings.max_command_timeout_s:g}). Of more than {settings.max_output_chars} "
            "characters of output the middle is left out. There is no network."
        ),
        "read_file": (
            "Reads a text file and returns its lines, each with its number and a tab before it. Of a long file "
            f"the first {settings.max_file_chars} characters; read on with offset."
        ),
        "write_file": "Writes a text file: makes it (and its folders) or replaces all of it.",
        "edit_file": (
            "Replaces text in a file. `old` must be exactly what is in the file (blanks and line ends included, "
            "the line numbers of read_file not) and must occur once, unless replace_all is true."
        ),
        SUBMIT: "Hands in your final answer. If you call it more than once, the last answer counts.",
    }
    title, result, read_only, destructive, idempotent = _HINTS[name]
    hints = mcp.ToolAnnotations(
        title=title,
        read_only_hint=read_only,
        destructive_hint=destructive,
        idempotent_hint=idempotent,
        open_world_hint=False,  # a sandbox reaches nothing outside
    )
    return ToolSpec(name, about[name], schema(arguments), title, output_schema(result), hints)
