"""The shell policy finds an agent's shell by its schema: real agents' tools by name, and those to pass over."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from turnstile_server.settings import TaskSettings, ToolSettings
from turnstile_server.tasks.model import Task
from turnstile_server.testing.policy import PolicyInput, PromptMessage
from turnstile_server.testing.shell_policy import (
    ASIDE,
    SUBMIT_COMMAND,
    SUBMIT_MARK,
    ShellPolicy,
    endpoint_texts,
    shell_tool,
    solution_commands,
)
from turnstile_server.tools.toolbox import Toolbox

TEXT = {"type": "string"}


def tool(
    name: str, properties: dict[str, Any], required: list[str] | None = None, said: str = ""
) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required or list(properties)[:1]}
    return {name: {"name": name, "description": said, "parameters": schema}}


EDITOR = tool("text_editor", {"command": {"type": "string", "enum": ["view", "create"]}, "path": TEXT})
OTHERS = EDITOR | tool("Read", {"file_path": TEXT}) | tool("write_stdin", {"session_id": {"type": "integer"}})


@pytest.mark.parametrize(
    ("offered", "arguments"),
    [
        (tool("Bash", {"command": TEXT, "timeout": {"type": "number"}}), {"command": "ls"}),
        (tool("exec_command", {"cmd": TEXT, "workdir": TEXT}), {"cmd": "ls"}),
        (tool("developer__shell", {"command": TEXT}), {"command": "ls"}),
        (tool("sh", {"command": TEXT}), {"command": "ls"}),
        (tool("run_commands", {"commands": {"type": "array", "items": TEXT}}), {"commands": ["ls"]}),
        (
            tool("bash", {"command": TEXT, "description": TEXT}, ["command", "description"]),
            {"command": "ls", "description": "Runs a command."},
        ),
        (
            tool(
                "terminal",
                {
                    "command": TEXT,
                    "is_input": {"type": "boolean"},
                    "security_risk": {"type": "string", "enum": ["LOW", "HIGH"]},
                    "timeout_ms": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
                    "dir_path": TEXT,
                    "tags": {"type": "array", "items": TEXT},
                },
                ["command", "is_input", "security_risk", "timeout_ms", "dir_path", "tags"],
            ),
            {
                "command": "ls",
                "is_input": False,
                "security_risk": "LOW",
                "timeout_ms": 60_000,
                "dir_path": ".",
                "tags": [],
            },
        ),
        (tool("shell", {"command": {"type": "array", "items": TEXT}}), {"command": ["bash", "-c", "ls"]}),
        (tool("run_anything", {"cmd": TEXT}, said="Runs it in a bash shell."), {"cmd": "ls"}),
        (tool("run_shell_command", {"command": {"type": "STRING"}}), {"command": "ls"}),
    ],
)
def test_a_shell_is_found_among_other_tools_and_its_required_parameters_are_filled(
    offered: dict[str, Any], arguments: dict[str, Any]
) -> None:
    found = shell_tool(OTHERS | offered)
    assert found is not None
    assert [found.name] == list(offered)
    assert found.run("ls") == arguments


def test_a_known_name_goes_before_a_description_and_an_editor_is_no_shell() -> None:
    vague = tool("monitor", {"command": TEXT}, said="Watches a shell command.")
    found = shell_tool(vague | tool("Bash", {"command": TEXT}))
    assert found is not None
    assert found.name == "Bash"
    assert shell_tool(OTHERS) is None
    assert shell_tool(tool("ask", {"command": TEXT}, said="Asks the user.")) is None
    assert shell_tool({"odd": {"name": "odd"}}) is None


def test_the_tool_doors_shell_is_for_agents_that_have_none() -> None:
    texts = endpoint_texts(ToolSettings())
    (said,) = (one.description for one in Toolbox(ToolSettings()).all_tools if one.name == "bash")
    door = tool("mcp__turnstile__bash", {"command": TEXT}, said=f"(MCP) {said}")
    own = tool("run_shell_command", {"command": TEXT})
    for offered, name in ((door | own, "run_shell_command"), (door, "mcp__turnstile__bash")):
        found = shell_tool(offered, texts)
        assert found is not None
        assert found.name == name


def scene(*messages: PromptMessage, tools: dict[str, Any] | None = None) -> PolicyInput:
    offered = tool("Bash", {"command": TEXT}) if tools is None else tools
    calls = sum(message.text.count("<tool_call>") for message in messages if message.role == "assistant")
    return PolicyInput("", 0, offered, tuple(messages), calls_made=calls)


def test_commands_are_run_in_order_by_what_the_prompt_shows_then_it_closes() -> None:
    policy = ShellPolicy(["one", "two"])
    user, called = (
        PromptMessage("user", "Do it."),
        PromptMessage("assistant", "Step 1.\n<tool_call>\n{}\n</tool_call>"),
    )
    result = PromptMessage("user", "<tool_response>\nok\n</tool_response>")
    steps = [policy(scene(user, *[called, result] * count)) for count in range(3)]
    assert [step.arguments for step in steps] == [{"command": "one"}, {"command": "two"}, {}]
    assert (steps[2].tool, steps[2].text) == (None, "Done.")
    split = policy(scene(user, PromptMessage("assistant", "Step 1."), user, called, result))
    assert split.arguments == {"command": "two"}, "a turn that an agent shows as two is one call"
    assert policy(scene(user, tools={})).text == ASIDE


def test_an_agent_that_ends_by_a_command_is_given_it_once() -> None:
    policy = ShellPolicy(["one"])
    system = PromptMessage("system", f"To finish, run `echo {SUBMIT_MARK}`.")
    called = PromptMessage("assistant", "<tool_call>\n{}\n</tool_call>")
    assert policy(scene(system, called)).arguments == {"command": SUBMIT_COMMAND}
    assert policy(scene(system, called, called)).tool is None


PATCH = "--- a/one.txt\n+++ b/one.txt\n@@ -1 +1 @@\n-one\n+two `of them`"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("program", ["git", "patch"])
def test_a_solution_that_is_a_patch_is_applied(tmp_path: Path, *, program: str, reverse: bool) -> None:
    before, after = ("two `of them`\n", "one\n") if reverse else ("one\n", "two `of them`\n")
    (tmp_path / "one.txt").write_text(before)
    (tmp_path / "old.txt").write_text("")
    gold = {"delete": ["old.txt"], "patch": PATCH, "reverse": reverse}
    task = Task.model_validate({"id": "t", "instruction": "x", "answer": None, "gold": gold})
    hidden = "command() { false; }; " if program == "patch" else ""
    for command in solution_commands(task, TaskSettings()):
        subprocess.run(["sh", "-ec", f"{hidden}{command}"], cwd=tmp_path, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    assert (tmp_path / "one.txt").read_text() == after
