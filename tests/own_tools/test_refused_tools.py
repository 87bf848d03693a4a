"""What is refused when the server starts, each with the place and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_tools_support import OwnServer, functions, tool_file
from pydantic import ValidationError

from turnstile.models import TaskRef
from turnstile_server.errors import StartupError, Unprocessable
from turnstile_server.own_tools import tool
from turnstile_server.settings import Settings, ToolSettings
from turnstile_server.tasks.inline import task_from_ref
from turnstile_server.tasks.registry import load_tasks

GOOD = """
@tool(where="host")
def good() -> str:
    "Good."
    return "good"

def undecorated() -> str:
    "Says nothing of where."
    return "x"

@tool(where="host", timeout_s=10_000)
def patient() -> str:
    "Takes its time."
    return "x"

@tool(where="host")
def silent() -> str:
    return "x"

@tool(where="host")
def untyped(a) -> str:
    "No type."
    return "x"

@tool(where="host")
def many(*a: int) -> str:
    "Many."
    return "x"

@tool(where="host")
def unknown(a: "Missing") -> str:
    "Unknown type."
    return "x"

number = 3
"""


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("undecorated", {}, "it does not say where it runs: add `where: host` or `where: sandbox`"),
        ("good", {"where": "sandbox"}, "its decorator says where='host', its entry says 'sandbox'"),
        ("patient", {}, r"its timeout_s is 10000, above this server's ceiling of 600 \(tools.own_max_timeout_s\)"),
        ("silent", {}, "it has no docstring"),
        ("untyped", {}, "its parameter 'a' has no type annotation"),
        ("many", {}, r"its parameter \*a: int cannot be given by name"),
        ("unknown", {}, "its annotations cannot be read: name 'Missing' is not defined"),
        ("number", {}, "has no function 'number'"),
        ("missing", {}, "has no function 'missing'"),
        ("good", {"name": "a b"}, "'a b' is no name that model APIs accept"),
    ],
)
def test_a_function_that_cannot_be_a_tool(tmp_path: Path, name: str, more: dict[str, Any], said: str) -> None:
    path = tool_file(tmp_path, GOOD)
    with pytest.raises(StartupError, match=said) as raised:
        OwnServer(functions=functions(path, name, **more))
    assert f"the settings: function {path}:{name}" in raised.value.message


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("no_such_module:f", "the module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("/nowhere/tools.py:f", "there is no file /nowhere/tools.py"),
        ("{folder}/broken.py:f", "broken.py cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_file_or_module_that_cannot_be_imported(tmp_path: Path, function: str, said: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(StartupError, match=said):
        OwnServer(functions=[{"function": function.format(folder=tmp_path)}])


@pytest.mark.parametrize("name", ["reset", "step", "State", "CLOSE"])
def test_names_of_simulation_controls_are_refused_in_any_case(tmp_path: Path, name: str) -> None:
    path = tool_file(tmp_path, GOOD)
    with pytest.raises(StartupError, match=rf"'{name}' is a simulation control of OpenEnv") as raised:
        OwnServer(functions=functions(path, "good", name=name))
    assert str(path) in raised.value.message


def test_two_tools_of_one_name_are_refused_and_both_places_named(tmp_path: Path) -> None:
    path = tool_file(tmp_path, GOOD)
    with pytest.raises(StartupError) as twice:
        OwnServer(functions=[*functions(path, "good"), *functions(path, "undecorated", where="host", name="good")])
    assert f"one of the settings: function {path}:good" in twice.value.message
    assert f"one of the settings: function {path}:undecorated" in twice.value.message
    with pytest.raises(StartupError, match=r"'bash': one of Turnstile's built-in tools, one of the settings"):
        OwnServer(functions=functions(path, "good", name="bash"))
    with pytest.raises(StartupError, match=r"'good': one of the settings: .*, one of task t: "):
        OwnServer({"t": {"functions": functions(path, "good")}}, functions=functions(path, "good"))
    OwnServer({"t": {"functions": functions(path, "good")}, "u": {"functions": functions(path, "good")}})


def test_the_decorator_takes_host_or_sandbox_only() -> None:
    with pytest.raises(ValueError, match="where is 'host' or 'sandbox'"):
        tool(where="elsewhere")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        tool()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({}, "needs either `command` or `url`"),
        ({"command": "a", "url": "http://b", "where": "host"}, "needs either `command` or `url`"),
        (
            {"command": "a"},
            "it does not say where it runs; a mounted server runs beside Turnstile: say `where: host`",
        ),
        ({"command": "a", "where": "sandbox"}, "where: sandbox is for functions only"),
        ({"url": "http://b", "where": "host"}, "args, env, cwd and where are for a `command`"),
        ({"command": "a", "where": "host", "headers": {"a": "B"}}, "headers are for a `url`"),
        ({"command": "a", "where": "host", "env": ["A B"]}, "'A B' is neither NAME"),
        ({"command": "a", "where": "host", "allow": []}, "at least 1 item"),
        ({"command": "a", "where": "host", "allow": ["*", "b"]}, "stands for all tools"),
        ({"url": "file:///etc"}, "should match pattern"),
    ],
)
def test_a_mounted_server_that_is_said_wrongly(server: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ToolSettings(servers=[{"name": "s", "allow": ["x"], **server}])


TASK = """
id: mine
instruction: Do it.
tools:
  functions:
    - function: own.py:good
"""


def test_a_tasks_file_of_tools_is_found_beside_the_task_file(tmp_path: Path) -> None:
    tool_file(tmp_path, GOOD)
    (tmp_path / "task.yaml").write_text(TASK)
    (task,) = load_tasks([tmp_path])
    server = OwnServer({"mine": task.tools.model_dump()})
    assert len(server.catalog.of("mine")) == 1
    assert server.catalog.of("another") == ()


def test_a_wrong_field_of_a_tasks_tools_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(TASK + "      were: host\n")
    with pytest.raises(StartupError, match=r"task.yaml:7: tools.functions.0.were: there is no such field"):
        load_tasks([tmp_path])


def test_an_inline_task_brings_no_tools(tmp_path: Path) -> None:
    ref = TaskRef.model_validate({"instruction": "x", "tools": {"functions": [{"function": "os:getcwd"}]}})
    with pytest.raises(Unprocessable, match=r"task.tools: an inline task brings no tools.*tools.functions"):
        task_from_ref(ref, allow_inline=True)


def test_the_settings_take_functions_and_servers() -> None:
    settings = Settings(tools={"functions": [{"function": "a:b"}]})
    assert settings.tools.functions[0].function == "a:b"
