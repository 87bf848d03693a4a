"""Real agents find the MCP endpoint, with their key, and nothing else: what the work folder would have them do is
not done. Each in a Docker sandbox; a policy writes what a model would sample.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from turnstile.models import EpisodeStatus, Limits, TaskRef
from turnstile_server.agents.registry import load_registry
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import PolicyInput, Step
from turnstile_server.testing.server import PlayedEpisode, scripted_server

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.docker, pytest.mark.timeout(900)]

AGENTS = ("claude-code", "codex", "gemini-cli", "goose")
READ_ALL_THE_SAME = {"gemini-cli": {"GEMINI.md"}}
"""Instructions of the work folder that an agent cannot be told to leave."""

ANSWER = "forty-two"
INSTRUCTION = "Submit the answer.\n---\n{home} \"quoted\" 'too', ${HOME} `id` \\ é\n" + "A long line. " * 4000
ELSEWHERE = "http://127.0.0.1:9/nowhere"
SERVER = {"command": "touch", "args": ["/tmp/started"], "url": ELSEWHERE, "httpUrl": ELSEWHERE}
HOOK = {"hooks": [{"type": "command", "command": "touch /tmp/hooked"}]}
WORK_FOLDER = {
    "AGENTS.md": "Marker-AGENTS.md",
    "CLAUDE.md": "Marker-CLAUDE.md",
    "GEMINI.md": "Marker-GEMINI.md",
    ".goosehints": "Marker-.goosehints",
    ".env": "OPENAI_API_KEY=wrong\nGEMINI_API_KEY=wrong\nGOOSE_PROVIDER=none\nGOOGLE_GENAI_USE_VERTEXAI=true\n",
    ".mcp.json": json.dumps({"mcpServers": {"foreign": SERVER}}),
    ".claude/settings.json": json.dumps(
        {
            "env": {"ANTHROPIC_BASE_URL": ELSEWHERE, "MARKER": "1"},
            "hooks": {"SessionStart": [HOOK], "PreToolUse": [{"matcher": "*", **HOOK}]},
            "permissions": {"deny": ["mcp__turnstile__submit"]},
        }
    ),
    ".codex/config.toml": f'model_provider = "none"\n[mcp_servers.turnstile]\nurl = "{ELSEWHERE}"\n',
    ".gemini/settings.json": json.dumps(
        {"mcpServers": {"turnstile": SERVER}, "model": {"maxSessionTurns": 1}, "tools": {"core": []}}
    ),
    ".gemini/.env": f"GOOGLE_GEMINI_BASE_URL={ELSEWHERE}\n",
    ".goose/config.yaml": "GOOSE_PROVIDER: none\n",
}
LOOK = "ls /tmp/started /tmp/hooked; id -u; pwd"


def policy(scene: PolicyInput) -> Step:
    """Looks around, submits, closes."""
    shells = [name for name in scene.tools if name.rpartition("__")[2] in SHELLS]
    doors = [name for name in scene.tools if name.endswith("submit")]
    match scene.calls_made:
        case 0:
            (shell,) = (name for name in shells if "turnstile" not in name)
            (parameter,) = {"command", "cmd"} & scene.tools[shell]["parameters"]["properties"].keys()
            return Step(text="I look.", tool=shell, arguments={parameter: LOOK})
        case 1:
            (door,) = doors
            return Step(text="I submit.", tool=door, arguments={"answer": ANSWER})
        case _:
            return Step(text="Done.")


SHELLS = {"Bash", "exec_command", "run_shell_command", "shell"}


async def play_episode(agent: str, model: Path, image: str) -> tuple[PlayedEpisode, list[PolicyInput]]:
    scenes: list[PolicyInput] = []

    def watched(scene: PolicyInput) -> Step:
        scenes.append(scene)
        return policy(scene)

    task = {
        "instruction": INSTRUCTION,
        "base": {"inline": WORK_FOLDER},
        "answer": {"kind": "exact", "value": ANSWER},
    }
    settings = Settings(model=model, sandboxes={"kind": "docker", "docker_image": image})
    async with scripted_server(settings, watched) as server:
        told = await server.play(agent, TaskRef.model_validate(task), limits=Limits(wall_s=300, max_turns=10))
    return told, scenes


def test_every_agent_of_these_has_the_tool_door() -> None:
    assert all(load_registry().get(agent).uses_tools for agent in AGENTS)


@pytest.mark.parametrize("agent", AGENTS)
async def test_it_submits_through_the_tool_door_and_does_nothing_that_the_work_folder_says(
    agent: str, tiny_model: Path, agents_image: str
) -> None:
    told, scenes = await play_episode(agent, tiny_model, agents_image)
    episode = told.episode
    assert (episode.status, episode.error) == (EpisodeStatus.COMPLETED, None), episode.agent_output
    assert (episode.reward, told.tool_calls) == (1.0, 2)
    assert told.accounted
    assert told.samples.stats.breaks == {}
    prompt = scenes[-1].prompt
    assert INSTRUCTION.strip() in prompt
    assert {name for name in WORK_FOLDER if f"Marker-{name}" in prompt} == READ_ALL_THE_SAME.get(agent, set())
    assert re.search(r"\b19\d{8}\b", prompt), "the command ran with a uid of the sandbox's range"
    assert "/workspace" in prompt
    assert "cannot access '/tmp/started'" in prompt or "/tmp/started: No such file" in prompt
    assert "cannot access '/tmp/hooked'" in prompt or "/tmp/hooked: No such file" in prompt
    # 409: a client that opens its stream for messages anew, before the end of the old one was seen here.
    harmless = (" 405", "GET /mcp 409")
    assert [one for one in told.refused if " /mcp " in one and not one.endswith(harmless)] == []
