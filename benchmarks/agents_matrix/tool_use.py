"""Finds and calls an agent's tools for the scripted policy, without knowing the agent. Pure.

Tools are found by the names and schemas that agents offer: a shell, a sub-agent, the tool that ends the task.
Other required arguments are filled in by their schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from turnstile_server.settings import ToolSettings
from turnstile_server.testing.policy import PolicyInput, ToolUse
from turnstile_server.testing.shell_policy import endpoint_texts

Tools = Mapping[str, Mapping[str, Any]]

SHELLS = re.compile(
    r"(?i)(.*__)?(bash|shell|exec_command|run_shell_command|execute_command|run_commands?|run_terminal_cmd|terminal"
    r"|exec)"
)
COMMANDS = ("command", "cmd", "code", "script", "commands")
SUBAGENTS = re.compile(
    r"(?i)(.*__)?(agent|task|delegate|delegate_task|delegate_to_agent|spawn_agent|subagent|dispatch_agent|invoke_agent"
    r"|sessions_spawn)"
)
PROMPTS = ("prompt", "message", "instructions", "task", "objective", "goal", "query")
KINDS = ("general-purpose", "generalist", "worker", "general", "default")
"""Names of a general sub-agent, the likeliest first."""
NAMED = re.compile(r"<name>([\w-]+)</name>")
"""How a system prompt lists sub-agents."""
WAITS = re.compile(r"(?i)(.*__)?(wait|wait_agent)")
AGENT_ID = re.compile(r'\\?"(?:agent_id|agent_path|task_name)\\?"\s*:\s*\\?"([^"\\]+)')
ENDS = ("submit", "finish", "complete_task", "final_output")
OF_ENDPOINT = endpoint_texts(ToolSettings())
"""Descriptions of the MCP endpoint's tools: its `submit` ends no agent."""
ENDING_COMMAND = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def shell(tools: Tools, command: str) -> ToolUse | None:
    """``command`` run by the agent's shell tool; None where it has none."""
    for name, tool in _named(tools, SHELLS):
        properties = _properties(tool)
        field = next((one for one in COMMANDS if one in properties), None)
        if field is not None:
            listed = properties[field].get("type") == "array"
            words = [command] if field == "commands" else ["bash", "-lc", command]
            value = words if listed else command
            return ToolUse(tool=name, arguments=_filled(tool, {field: value}))
    return None


def misused_shell(tools: Tools) -> ToolUse | None:
    """A call of the shell tool whose arguments are JSON and break its schema."""
    use = shell(tools, "true")
    return None if use is None else ToolUse(tool=use.tool, arguments={"nothing": [1, 2]})


def subagent(call: PolicyInput, task: str) -> ToolUse | None:
    """A sub-agent set to ``task``; None where the agent offers none."""
    for name, tool in _named(call.tools, SUBAGENTS):
        properties = _properties(tool)
        field = next((one for one in PROMPTS if properties.get(one, {}).get("type") == "string"), None)
        if field is None:
            continue
        listed = NAMED.findall(call.prompt)
        told = f"{tool.get('description')} {properties}"
        kind = next((one for names in (listed, told) for one in KINDS if one in names), KINDS[0])
        given: dict[str, Any] = {field: task}
        given |= {one: kind for one in ("subagent_type", "agent_name", "agent_type") if one in properties}
        return ToolUse(tool=name, arguments=_filled(tool, given))
    return None


def waiting(call: PolicyInput) -> ToolUse | None:
    """Waits for sub-agents that were started in the background, where the agent has a tool for that."""
    ids = list(dict.fromkeys(AGENT_ID.findall(_heard(call))))
    for name, tool in _named(call.tools, WAITS):
        field = next((one for one in ("targets", "ids", "agent_ids") if one in _properties(tool)), None)
        return ToolUse(tool=name, arguments=_filled(tool, {} if field is None else {field: ids}))
    return None


def end(call: PolicyInput) -> ToolUse | None:
    """How this agent is told that all is done, where saying nothing more is not enough."""
    if ENDING_COMMAND in call.prompt:
        return shell(call.tools, f"echo {ENDING_COMMAND}")
    for name in ENDS:
        if name in call.tools and call.tools[name].get("description") not in OF_ENDPOINT:
            properties = _properties(call.tools[name])
            text = next((one for one, schema in properties.items() if schema.get("type") == "string"), None)
            return ToolUse(
                tool=name, arguments=_filled(call.tools[name], {} if text is None else {text: "It is done."})
            )
    return None


def _heard(call: PolicyInput) -> str:
    return "\n".join(message.text for message in call.messages if message.role != call.own_role)


def _named(tools: Tools, pattern: re.Pattern[str]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return [(name, tool) for name, tool in tools.items() if pattern.fullmatch(name)]


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    found = (tool.get("parameters") or {}).get("properties") or {}
    return {name: schema if isinstance(schema, dict) else {} for name, schema in found.items()}


def _filled(tool: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given``, and something of the right type for whatever else is required."""
    properties = _properties(tool)
    required = (tool.get("parameters") or {}).get("required") or ()
    return {**{name: _anything(name, properties.get(name, {})) for name in required}, **given}


def _anything(name: str, schema: Mapping[str, Any]) -> Any:
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    match schema.get("type"):
        case "boolean":
            return False
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "array":
            return []
        case "object":
            return {}
        case _:
            return f"a {name} of the matrix"
