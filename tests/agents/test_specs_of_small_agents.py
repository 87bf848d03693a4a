"""What the specs of Pi, OpenCode, Qwen Code, OpenClaw, Hermes, aider, OpenHands and `shell` say: without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from turnstile_server.agents.ending import read_ending
from turnstile_server.agents.launch import (
    PLACEHOLDERS,
    AgentLaunch,
    LaunchContext,
    build_launch,
    placeholder_errors,
)
from turnstile_server.agents.registry import load_registry
from turnstile_server.agents.shipped import SPECS
from turnstile_server.agents.spec import AgentSpec

INSTRUCTION = "Mend {this} \"file\": 'now'\n- [x"
DOOR = "http://127.0.0.1:8001/e/ep_1"
AGENTS = ("pi", "opencode", "qwen-code", "openclaw", "hermes", "aider", "openhands", "cline", "continue", "shell")


def launched(name: str, home: str = "/home/agent", workdir: str = "/workspace", **env: str) -> AgentLaunch:
    return build_launch(load_registry().get(name), occasion(home, workdir, env))


def occasion(home: str, workdir: str, env: dict[str, str]) -> LaunchContext:
    return LaunchContext(
        episode_id="ep_1",
        episode_key="key-1",
        agent_url="http://127.0.0.1:8001",
        instruction=INSTRUCTION,
        workdir=workdir,
        home=home,
        install="there",
        max_turns=7,
        env=env,
        max_output_bytes=1000,
    )


def test_what_a_spec_may_hold_is_what_an_episode_fills() -> None:
    spec = AgentSpec(
        name="all", version="1", summary="s", user="agent", command=tuple(f"{{{name}}}" for name in PLACEHOLDERS)
    )
    assert placeholder_errors(spec) == []
    argv = build_launch(spec, occasion("/home/agent", "/workspace", {})).command.argv
    assert len(argv) == len(PLACEHOLDERS)
    assert all(argv)


@pytest.mark.parametrize("name", AGENTS)
def test_the_instruction_comes_by_file_or_standard_input(name: str) -> None:
    made = launched(name)
    assert INSTRUCTION not in " ".join(made.command.argv)
    by_file = "/home/agent/instruction.md" in " ".join([*made.command.argv, *made.command.env.values()])
    assert by_file or made.command.stdin.decode() == INSTRUCTION


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("pi", ".pi/agent/models.json"),
        ("opencode", "turnstile/opencode.json"),
        ("qwen-code", "mcp.json"),
        ("cline", ".cline/data/settings/cline_mcp_settings.json"),
        ("cline", ".cline/data/settings/global-settings.json"),
        ("openclaw", "openclaw.json"),
        ("aider", "aider/models.json"),
    ],
)
def test_its_configuration_is_json_whatever_the_task_says(name: str, path: str) -> None:
    text = launched(name).files[f"/home/agent/{path}"]
    assert isinstance(json.loads(text), dict)
    assert INSTRUCTION not in text


@pytest.mark.parametrize(
    ("name", "path"),
    [("hermes", ".hermes/config.yaml"), ("aider", "aider/settings.yml"), ("continue", "config.yaml")],
)
def test_its_configuration_is_yaml(name: str, path: str) -> None:
    assert isinstance(yaml.safe_load(launched(name).files[f"/home/agent/{path}"]), dict)


def test_where_each_finds_the_model() -> None:
    def json_of(name: str, path: str) -> dict[str, dict[str, dict[str, dict[str, str]]]]:
        found: dict[str, dict[str, dict[str, dict[str, str]]]] = json.loads(launched(name).files[path])
        return found

    assert json_of("pi", "/home/agent/.pi/agent/models.json")["providers"]["turnstile"]["baseUrl"] == f"{DOOR}/v1"
    opencode = json_of("opencode", "/home/agent/turnstile/opencode.json")
    assert opencode["provider"]["turnstile"]["options"] == {"baseURL": f"{DOOR}/v1", "apiKey": "key-1"}
    openclaw = json_of("openclaw", "/home/agent/openclaw.json")
    assert openclaw["models"]["providers"]["turnstile"]["baseUrl"] == f"{DOOR}/v1"
    cline = json_of("cline", "/home/agent/.cline/data/settings/providers.json")
    assert cline["providers"]["openai-compatible"]["settings"]["baseUrl"] == f"{DOOR}/v1"
    (model,) = yaml.safe_load(launched("continue").files["/home/agent/config.yaml"])["models"]
    assert (model["apiBase"], model["apiKey"]) == (f"{DOOR}/v1", "key-1")
    hermes = yaml.safe_load(launched("hermes").files["/home/agent/.hermes/config.yaml"])
    assert hermes["model"]["base_url"] == f"{DOOR}/v1"
    assert hermes["agent"]["max_turns"] == 7
    for name in ("qwen-code", "openhands", "shell"):
        assert launched(name).command.env["OPENAI_BASE_URL"] == f"{DOOR}/v1"


def test_qwen_codes_loop_detection_is_graded_and_its_other_errors_are_failures() -> None:
    rules = load_registry().get("qwen-code").end
    loop = (
        "Loop detection halted the run (consecutive_identical_tool_calls: the model repeated the same tool call "
        "with identical arguments). This is an always-on guard and cannot be disabled via "
        "`model.skipLoopDetection`."
    )

    def log(message: str) -> str:
        return json.dumps({"type": "result", "is_error": True, "error": {"message": message}})

    found, other = read_ending(rules, log(loop)), read_ending(rules, log("401 bad key"))
    assert found is not None
    assert not found.failed
    assert other is not None
    assert (other.failed, other.reason) == (True, "401 bad key")
    assert read_ending(rules, json.dumps({"type": "result", "is_error": False})) is None


def run_agent(made: AgentLaunch, folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], **made.command.env}
    return subprocess.run(
        made.command.argv, env=env, cwd=folder, input=stdin, capture_output=True, text=True, check=False
    )


def test_shell_runs_the_episodes_command_with_its_addresses_and_its_exit_code(tmp_path: Path) -> None:
    command = 'cat; printf \' %s %s %s\' "$ANTHROPIC_BASE_URL" "$GEMINI_API_KEY" "$TOOL_URL"; exit 3'
    ended = run_agent(launched("shell", TURNSTILE_COMMAND=command), tmp_path, "Do it.")
    assert (ended.returncode, ended.stdout) == (3, f"Do it. {DOOR} key-1 {DOOR}/mcp")


def test_shell_without_a_command_says_what_is_missing(tmp_path: Path) -> None:
    ended = run_agent(launched("shell"), tmp_path)
    assert ended.returncode == 64
    assert "TURNSTILE_COMMAND" in ended.stderr


def test_aider_is_shown_text_that_is_not_hidden_and_not_too_much_of_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "pkg").mkdir(parents=True)
    (work / ".git").mkdir()
    (work / "pkg" / "a.py").write_text("a = 1\n")
    (work / "readme").write_text("Read me.\n")
    (work / ".env").write_text("KEY=1\n")
    (work / ".git" / "config").write_text("x\n")
    (work / "image").write_bytes(b"\x89PNG\0")
    (work / "latin").write_bytes(b"\xe9\n")
    (work / "large").write_text("x" * (65 << 10))
    (work / "link").symlink_to("/etc/passwd")
    for index in range(5):
        (work / f"z{index}").write_text("x" * (60 << 10))
    asks = "from pathlib import Path; from shown_files import shown_files; print(*shown_files(Path('work')))"
    ended = subprocess.run(
        [sys.executable, "-B", "-c", asks],
        env={"PYTHONPATH": str(SPECS / "aider")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == [f"work/{name}" for name in ("pkg/a.py", "readme", "z0", "z1", "z2", "z3")]
