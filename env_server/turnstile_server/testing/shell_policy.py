"""A policy for any agent that can run shell commands, and a task's known solution as such commands. Pure.

The policy finds the shell tool by its schema, so it knows no agent by name. It keeps no state: it reads from the
prompt which command is next. So a retry gets the same completion, and a request that offers no shell (a title, a
summary) gets a short text.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile_server.errors import TaskFailed
from turnstile_server.settings import TaskSettings, ToolSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import FilesProblem, read_files
from turnstile_server.testing.policy import PolicyInput, Step
from turnstile_server.tools.toolbox import Toolbox

COMMAND_NAMES = ("command", "cmd", "script", "commands")
"""Names of the parameter that holds the command, likeliest first."""

SHELL_NAMES = (
    "bash",
    "shell",
    "exec_command",
    "run_shell_command",
    "execute_bash",
    "terminal",
    "exec",
    "run_command",
    "run_commands",
    "execute_command",
    "run_terminal_cmd",
    "sh",
)
"""Names of the tool, without a prefix that ends in `__`, `.`, `/` or `:`."""

SUBMIT_MARK = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMIT_COMMAND = f"echo {SUBMIT_MARK}"
"""Some agents end only by this command, alone; their prompt says so."""

DONE = "Done."
ASIDE = "A short task"
"""The reply to calls that offer no shell: titles, summaries."""

_PATCH = "/tmp/solution.patch"
CHARACTERS_PER_COMMAND = 6000
"""A longer file is written by several commands, so that no completion comes near a limit."""


@dataclass(frozen=True, slots=True)
class ShellTool:
    """A tool that runs a command. ``listed``: its parameter is a list: of words, as in argv, or of whole commands
    where it is named `commands`."""

    name: str
    parameter: str
    listed: bool
    others: Mapping[str, Any]
    """Values for the other required parameters."""

    def run(self, command: str) -> dict[str, Any]:
        """The arguments of a call that runs ``command``."""
        listed = [command] if self.parameter == "commands" else ["bash", "-c", command]
        return {self.parameter: listed if self.listed else command, **self.others}


class ShellPolicy:
    """Runs ``commands`` in order, one per turn, then says ``closing``.

    ``fallback``: descriptions of tools that are used only if the agent has no other shell (``endpoint_texts``).
    """

    def __init__(self, commands: Sequence[str], *, closing: str = DONE, fallback: Collection[str] = ()) -> None:
        self._commands = tuple(commands)
        self._closing = closing
        self._fallback = tuple(fallback)

    def __call__(self, call: PolicyInput) -> Step:
        tool = shell_tool(call.tools, self._fallback)
        if tool is None:
            return Step(text=ASIDE)
        made, due = call.calls_made, list(self._commands)
        if any(SUBMIT_MARK in message.text for message in call.messages if message.role != call.own_role):
            due.append(SUBMIT_COMMAND)
        if made >= len(due):
            return Step(text=self._closing)
        return Step(text=f"Step {made + 1}.", tool=tool.name, arguments=tool.run(due[made]))


def endpoint_texts(settings: ToolSettings) -> frozenset[str]:
    """Descriptions of the MCP endpoint's tools. Agents that offer these tools rename them but keep the texts."""
    return frozenset(tool.description for tool in Toolbox(settings).all_tools)


def shell_tool(tools: Mapping[str, Mapping[str, Any]], fallback: Collection[str] = ()) -> ShellTool | None:
    """The one of ``tools`` (by name, each with its JSON schema ``parameters``) that runs shell commands."""
    found: list[tuple[bool, int, ShellTool]] = []
    for spec in tools.values():
        tool, description = _as_shell(spec), str(spec.get("description", ""))
        rank = None if tool is None else _rank(tool.name, description)
        if tool is not None and rank is not None:
            found.append((any(text in description for text in fallback), rank, tool))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _as_shell(spec: Mapping[str, Any]) -> ShellTool | None:
    schema = spec.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(properties, Mapping):
        return None
    for name in COMMAND_NAMES:
        listed = _takes_command(properties.get(name))
        if listed is not None:
            required = schema.get("required") or ()
            others = {key: fitting(key, properties.get(key)) for key in required if key != name}
            return ShellTool(str(spec["name"]), name, listed, others)
    return None


def _takes_command(schema: Any) -> bool | None:
    """False: text; True: a list of words; None: no command."""
    if not isinstance(schema, Mapping) or "enum" in schema:  # an editor's `command: view | create | …`
        return None
    kind = _type(schema)
    if kind == "string":
        return False
    items = schema.get("items")
    return True if kind == "array" and isinstance(items, Mapping) and _type(items) == "string" else None


def _rank(name: str, description: str) -> int | None:
    """Lower is likelier; None if neither name nor description mentions a shell."""
    last = re.split(r"__|[./:]", name)[-1].lower()
    if last in SHELL_NAMES:
        return SHELL_NAMES.index(last)
    return len(SHELL_NAMES) if re.search(r"\b(shell|bash|terminal)\b", description, re.IGNORECASE) else None


def fitting(name: str, schema: Any) -> Any:
    """A harmless value of a parameter's type."""
    schema = schema if isinstance(schema, Mapping) else {}
    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    match _type(schema):
        case "boolean":
            return False
        case "integer" | "number":
            return _number(name, schema)
        case "array":
            return []
        case "object":
            return {}
        case _:
            return "." if re.search(r"dir|path|cwd|folder", name, re.IGNORECASE) else "Runs a command."


def _number(name: str, schema: Mapping[str, Any]) -> float | int:
    if "timeout" in name.lower():
        milliseconds = "milli" in str(schema.get("description", "")).lower() or name.lower().endswith("ms")
        wanted = 60_000 if milliseconds else 60
    else:
        wanted = 1
    least, most = schema.get("minimum", wanted), schema.get("maximum", wanted)
    return min(max(wanted, least), most) if isinstance(least, int | float) else wanted


def _type(schema: Mapping[str, Any]) -> str | None:
    """The JSON type; of several, the first that is not null."""
    for part in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kinds = part.get("type") if isinstance(part, Mapping) else None
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if isinstance(kind, str) and kind.lower() != "null":
                return kind.lower()
    return None


def solution_files(task: Task, settings: TaskSettings) -> dict[str, bytes]:
    """The files of a task's known solution by path. Raises TaskFailed if it has none."""
    if task.gold is None:
        raise TaskFailed(f"the task {task.id} has no known solution (gold)")
    try:
        return {} if task.gold.files is None else read_files(task.gold.files, settings)
    except FilesProblem as error:
        raise TaskFailed(f"the known solution of {task.id} cannot be read: {error}") from error


def solution_commands(task: Task, settings: TaskSettings) -> list[str]:
    """The known solution as commands for `/bin/sh` in the work folder.

    Raises TaskFailed if there is none, or if it is an answer, which no shell can give.
    """
    if task.answer is not None or (task.gold is not None and task.gold.answer is not None):
        raise TaskFailed(f"the task {task.id} wants an answer through the tool `submit`; a shell cannot give it")
    commands = [
        command for path, data in solution_files(task, settings).items() for command in write_commands(path, data)
    ]
    return [*commands, *change_commands(task), *script_commands(task, settings)]


def script_commands(task: Task, settings: TaskSettings) -> list[str]:
    """Commands that run the solution's script, if it has one. Raises TaskFailed."""
    script = task.gold.script if task.gold is not None else None
    if script is None:
        return []
    try:
        files = read_files(script.files, settings)
    except FilesProblem as error:
        raise TaskFailed(f"the known solution of {task.id} cannot be read: {error}") from error
    written = [line for path, data in files.items() for line in write_commands(f"/solution/{path}", data)]
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in script.env.items())
    program = shlex.quote(f"/solution/{script.program}")
    return [*written, f"chmod +x {program}; {env} {program}".strip()]


def change_commands(task: Task) -> list[str]:
    """Commands that remove what the known solution removes, and apply its patch."""
    if task.gold is None:
        return []
    commands = [f"rm -rf -- {shlex.join(task.gold.delete)}"] if task.gold.delete else []
    if task.gold.patch is not None:
        patch = task.gold.patch if task.gold.patch.endswith("\n") else f"{task.gold.patch}\n"
        reverse = "-R " if task.gold.reverse else ""
        commands += write_commands(_PATCH, patch.encode())
        commands.append(
            f"if command -v git > /dev/null; then git apply --whitespace=nowarn {reverse}{_PATCH}; "
            f"else patch -p1 -N {reverse}< {_PATCH}; fi && rm {_PATCH}"
        )
    return commands


def write_commands(path: str, data: bytes) -> Iterator[str]:
    """Commands that write ``data`` to ``path``.

    The file is written as text if a here-document reproduces it exactly and nothing in it looks like a command
    substitution, else in base64: some agents refuse such a command by sight, even where a shell would substitute
    nothing.
    """
    target = shlex.quote(path)
    folder = path.rpartition("/")[0]
    prepare = f"mkdir -p {shlex.quote(folder)} && " if folder else ""
    text = text_of(data)
    if text is None or not text.endswith("\n") or any(mark in text for mark in ("\r", "`", "$(")):
        encoded = base64.b64encode(data).decode()
        size = CHARACTERS_PER_COMMAND
        cuts = [encoded[i : i + size] for i in range(0, len(encoded), size)] or [""]
        pieces = [f"base64 -d {{arrow}} {target} <<'END'\n{piece}\nEND" for piece in cuts]
    else:
        end = "END"
        while end in text:
            end += "_"
        pieces = [f"cat {{arrow}} {target} <<'{end}'\n{piece}{end}" for piece in _pieces(text)]
    for index, piece in enumerate(pieces):
        arrow = ">>" if index else ">"
        yield (prepare if index == 0 else "") + piece.replace("{arrow}", arrow, 1)


def text_of(data: bytes) -> str | None:
    """None if the bytes are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _pieces(text: str) -> list[str]:
    """``text`` in pieces of whole lines, each at most CHARACTERS_PER_COMMAND unless one line is longer."""
    pieces = [""]
    for line in [f"{one}\n" for one in text.split("\n")[:-1]]:
        if pieces[-1] and len(pieces[-1]) + len(line) > CHARACTERS_PER_COMMAND:
            pieces.append("")
        pieces[-1] += line
    return pieces
