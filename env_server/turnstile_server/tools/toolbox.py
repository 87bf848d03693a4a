"""The five tools as models see them, and the path of one tool call.

Agents call them over MCP, trainers over OpenEnv. Holds: whatever a model sends gets a result that it can read;
results and running calls are bounded; cancelling a call stops its command; writes to files of one episode run one
after another, so that no edit is lost. Nothing here knows of reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import anyio

from turnstile_server.errors import FileProblem
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
    WrongArguments,
    parsed,
    schema,
)
from turnstile_server.tools.functions import ToolResult, bash, edit_file, read_file, write_file
from turnstile_server.tools.protocol import EpisodeTools

SUBMIT = "submit"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model sees it; ``input_schema`` is a JSON Schema of an object."""

    name: str
    description: str
    input_schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _SandboxTool(Generic[ArgumentsT]):
    name: str
    arguments: type[ArgumentsT]
    run: Callable[[Sandbox, ArgumentsT, ToolSettings], Awaitable[ToolResult]]
    writes: bool = False

    async def __call__(
        self, sandbox: Sandbox, arguments: Mapping[str, Any], settings: ToolSettings, writing: anyio.Lock
    ) -> ToolResult:
        checked = parsed(self.name, self.arguments, arguments)
        if not self.writes:
            return await self.run(sandbox, checked, settings)
        async with writing:
            return await self.run(sandbox, checked, settings)


_TOOLS: tuple[_SandboxTool[Any], ...] = (
    _SandboxTool("bash", BashArguments, bash),
    _SandboxTool("read_file", ReadFileArguments, read_file),
    _SandboxTool("write_file", WriteFileArguments, write_file, writes=True),
    _SandboxTool("edit_file", EditFileArguments, edit_file, writes=True),
)


@dataclass(slots=True)
class _RunningCalls:
    """What the running calls of one episode share."""

    calls: int = 0
    writing: anyio.Lock = field(default_factory=anyio.Lock)


class Toolbox:
    """The tools of every episode. Keeps only what running calls of one episode share."""

    def __init__(self, settings: ToolSettings) -> None:
        self._settings = settings
        self._in_use: dict[str, _RunningCalls] = {}
        self._tools = {tool.name: tool for tool in _TOOLS}
        self._submit = _spec(SUBMIT, SubmitArguments, settings)
        self._all = (*(_spec(tool.name, tool.arguments, settings) for tool in _TOOLS), self._submit)

    @property
    def all_tools(self) -> tuple[ToolSpec, ...]:
        """All five tools; an episode may have fewer."""
        return self._all

    def tools_of(self, episode: EpisodeTools) -> tuple[ToolSpec, ...]:
        """The tools of an episode; ``submit`` alone where it has no sandbox."""
        return (self._submit,) if episode.sandbox is None else self._all

    async def call(self, episode: EpisodeTools, name: str, arguments: Mapping[str, Any] | None) -> ToolResult:
        """Runs a tool. Cancelling the call stops its command.

        A mistake of the model, and a file or a command that did not let it do what it wanted, is a result with
        ``is_error``. Raises Gone when the episode has ended, Conflict while its sandbox is still being prepared,
        SandboxFailed when its sandbox died.
        """
        episode.check_open()
        most = self._settings.max_calls_per_episode
        in_use = self._in_use.setdefault(episode.episode_id, _RunningCalls())
        if in_use.calls >= most:
            return _error(f"{most} tool calls are running, which is the limit; wait for one to end")
        in_use.calls += 1
        try:
            return await self._run(episode, name, arguments or {}, in_use.writing)
        except WrongArguments as error:
            return _error(str(error))
        except FileProblem as error:
            return _error(error.message)
        finally:
            in_use.calls -= 1
            if not in_use.calls:
                del self._in_use[episode.episode_id]

    async def _run(
        self, episode: EpisodeTools, name: str, arguments: Mapping[str, Any], writing: anyio.Lock
    ) -> ToolResult:
        if name == SUBMIT:
            return await self._submit_answer(episode, parsed(name, SubmitArguments, arguments).answer)
        tool = self._tools.get(name)
        if tool is None or episode.sandbox is None:
            raise WrongArguments(
                f"there is no tool {name!r}; the tools are "
                + ", ".join(known.name for known in self.tools_of(episode))
            )
        return await tool(episode.sandbox, arguments, self._settings, writing)

    async def _submit_answer(self, episode: EpisodeTools, answer: str) -> ToolResult:
        most = self._settings.max_answer_chars
        if len(answer) > most:
            raise WrongArguments(f"the answer has {len(answer)} characters; the most is {most}")
        await episode.submit(answer)
        return ToolResult("Your answer was received.")


def _error(text: str) -> ToolResult:
    return ToolResult(text, is_error=True)


def _spec(name: str, arguments: type[Arguments], settings: ToolSettings) -> ToolSpec:
    about = {
        "bash": (
            "Runs a command with bash in the working directory and returns its output (standard output and error "
            "together) and its exit status. Every call is a new shell: variables and the current directory do not "
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
    return ToolSpec(name, about[name], schema(arguments))
