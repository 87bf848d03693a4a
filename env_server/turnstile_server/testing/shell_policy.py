"""A policy for any agent that can run shell commands: it finds the tool by its schema and runs given commands.

No agent is known here. It keeps no state: what is due is read off the prompt, so a retry gets the same completion
and a sub-agent or a title request is told apart by the tools that it offers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile_server.settings import ToolSettings
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
    "execute_command",
    "run_terminal_cmd",
)
"""Names of the tool, without what stands before a `__`, `.`, `/` or `:`."""

SUBMIT_MARK = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMIT_COMMAND = f"echo {SUBMIT_MARK}"
"""Some agents have no end but this command, alone; they say so in their prompt."""

DONE = "Done."
ASIDE = "A short task"
"""Said in calls that offer no shell: titles, summaries."""


@dataclass(frozen=True, slots=True)
class ShellTool:
    """``listed``: the parameter is a list of words, as in argv."""

    name: str
    parameter: str
    listed: bool
    others: Mapping[str, Any]
    """What the other required parameters are given."""

    def run(self, command: str) -> dict[str, Any]:
        return {self.parameter: ["bash", "-c", command] if self.listed else command, **self.others}


class ShellPolicy:
    """Runs ``commands``, one per turn, in the order given, then says ``closing``. ``door``: descriptions of tools
    that are used only by an agent that has no shell of its own (``door_texts``)."""

    def __init__(self, commands: Sequence[str], *, closing: str = DONE, door: Collection[str] = ()) -> None:
        self._commands = tuple(commands)
        self._closing = closing
        self._door = tuple(door)

    def __call__(self, scene: PolicyInput) -> Step:
        tool = shell_tool(scene.tools, self._door)
        if tool is None:
            return Step(text=ASIDE)
        made, due = scene.calls_made, list(self._commands)
        if any(SUBMIT_MARK in message.text for message in scene.messages if message.role != scene.own_role):
            due.append(SUBMIT_COMMAND)
        if made >= len(due):
            return Step(text=self._closing)
        return Step(text=f"Step {made + 1}.", tool=tool.name, arguments=tool.run(due[made]))


def door_texts(settings: ToolSettings) -> frozenset[str]:
    """How the tool door's tools describe themselves: agents that offer them change their names, not this."""
    return frozenset(tool.description for tool in Toolbox(settings).all_tools)


def shell_tool(tools: Mapping[str, Mapping[str, Any]], door: Collection[str] = ()) -> ShellTool | None:
    """The one of ``tools`` (by name, each with its JSON schema ``parameters``) that runs shell commands."""
    found: list[tuple[bool, int, ShellTool]] = []
    for spec in tools.values():
        tool, said = _as_shell(spec), str(spec.get("description", ""))
        rank = None if tool is None else _rank(tool.name, said)
        if tool is not None and rank is not None:
            found.append((any(text in said for text in door), rank, tool))
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


def _rank(name: str, said: str) -> int | None:
    """None where neither name nor description speaks of a shell."""
    last = re.split(r"__|[./:]", name)[-1].lower()
    if last in SHELL_NAMES:
        return SHELL_NAMES.index(last)
    return len(SHELL_NAMES) if re.search(r"\b(shell|bash|terminal)\b", said, re.IGNORECASE) else None


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
