"""Functions that run in the episode's sandbox: their text alone, by the image's python3, as the agent's user.

The function goes in as text and its arguments as JSON, both on standard input; its result comes out as JSON on
standard output. Nothing of the server is imported there, and nothing of the function's own module: it must import
what it uses. What comes out is as little to be trusted as anything from a sandbox, so it is bounded and checked.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import symtable
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from turnstile_server.http.json_values import count_values, has_few_values
from turnstile_server.own_tools.bounds import OwnToolBounds
from turnstile_server.own_tools.signature import FunctionSignature, UnusableFunction
from turnstile_server.sandboxes.protocol import Command
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.functions import cut_middle, decoded
from turnstile_server.tools.protocol import EpisodeTools, Progress, ServedTool, ToolResult, ToolSpec

_RUNNER = """\
import asyncio, dataclasses, inspect, json, os, sys, traceback
job = json.loads(sys.stdin.buffer.read().decode())
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
def plain(value):
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError("a sandbox tool returned a %s, which is not JSON" % type(value).__name__)
try:
    scope = {"__name__": "__tool__"}
    exec(compile(job["source"], "<tool>", "exec"), scope)
    value = scope[job["name"]](**job["arguments"])
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    done = json.dumps({"result": value}, default=plain, allow_nan=False)
except BaseException as error:
    done = json.dumps({"error": traceback.format_exception_only(type(error), error)[-1].strip()})
sys.stdout.flush()
answers.write(done.encode())
answers.close()
"""
"""Prints of the tool go to standard error. Runs on Python 3.8 and later."""

_HEAD = "from __future__ import annotations\n"
"""Annotations are not evaluated in the sandbox: their names are of the function's module."""

_NO_PROGRAM = 127


class SandboxFunctions:
    """The sandbox functions of one place (settings or task). Implements OwnTools. Like the built-in tools, they
    are there only where the episode has a sandbox."""

    def __init__(self, place: str, functions: Sequence[SandboxFunction]) -> None:
        self.place = place
        self._functions = functions

    @asynccontextmanager
    async def open(self, episode: EpisodeTools) -> AsyncIterator[Sequence[ServedTool]]:
        yield () if episode.sandbox is None else self._functions


class SandboxFunction:
    """A function of the user's as a tool. Implements ServedTool.

    Raises UnusableFunction where its text cannot stand alone."""

    def __init__(self, signature: FunctionSignature, settings: ToolSettings) -> None:
        if signature.context_parameter is not None:
            raise UnusableFunction("it takes a ToolContext, which is for where: host; a sandbox has none")
        self._signature = signature
        self._settings = settings
        self._source = standalone_source(signature.function)

    @property
    def spec(self) -> ToolSpec:
        return self._signature.spec

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        name, settings = self.spec.name, self._settings
        assert episode.sandbox is not None  # without one, `SandboxFunctions.open` gives no tool
        job = {
            "source": self._source,
            "name": self._signature.function.__name__,
            "arguments": self._signature.json_arguments(arguments),
        }
        # No time-out of its own: whoever calls a tool keeps its time, and cancelling the call kills the command.
        done = await episode.sandbox.exec(
            Command(
                ("python3", "-I", "-c", _RUNNER),
                max_output_bytes=settings.own_max_result_bytes,
                stdin=json.dumps(job).encode(),
            )
        )
        printed = cut_middle(decoded(done.stderr).strip(), settings.own_max_text_chars)
        if done.exit_code == _NO_PROGRAM:
            return _failed(name, "cannot run: the sandbox's image has no python3", printed)
        if done.dropped_bytes:
            return _failed(name, f"returned more than {settings.own_max_result_bytes} bytes", printed)
        most = settings.bounds_of(OwnToolBounds).own_max_result_values
        if not has_few_values(done.stdout, most) and count_values(done.stdout, most) > most:
            return _failed(name, f"returned more than {most} JSON values", printed)
        try:
            answer = json.loads(done.stdout)
        except (ValueError, RecursionError):
            return _failed(name, f"ended without a result (exit code {done.exit_code})", printed)
        if not isinstance(answer, dict) or answer.keys() not in ({"result"}, {"error"}):
            return _failed(name, "gave an answer that cannot be read", printed)
        if "error" in answer:
            return _failed(name, f"failed: {str(answer['error'])[: settings.own_max_text_chars]}", printed)
        return self._signature.result(answer["result"])


def _failed(name: str, why: str, printed: str) -> ToolResult:
    return ToolResult(f"{name} {why}" + (f"\nIt printed:\n{printed}" if printed else ""), is_error=True)


def standalone_source(function: Callable[..., Any]) -> str:
    """The text of a function without its decorators.

    Raises UnusableFunction where it would not run alone: it uses a name of its module, or of a function around it.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise UnusableFunction(f"its text cannot be read: {error}") from error
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        raise UnusableFunction("it is not written as a `def`")
    definition.decorator_list = []
    source = _HEAD + ast.unparse(definition)
    foreign = sorted(_foreign_names(source) - {function.__name__})
    if foreign:
        raise UnusableFunction(
            f"in the sandbox there is only the function's own text, and it uses {', '.join(foreign)} from "
            "outside: import or define that inside the function"
        )
    return source


def _foreign_names(source: str) -> set[str]:
    """Names that the text takes from its module, and that Python does not have by itself."""
    found: set[str] = set()
    tables = [symtable.symtable(source, "<tool>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outside = table.get_type() == "module"
        found |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or (outside and not symbol.is_assigned()))
        }
    return {name for name in found if not hasattr(builtins, name)}
