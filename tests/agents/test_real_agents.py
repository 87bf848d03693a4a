"""Real agents from their registries, each in a sandbox of its own, solve a shipped task by their own tools.

A policy writes what a model would sample; all else is real. What each does to its history is in expected.yaml.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml
from anyio import to_thread
from network_witness import Witness, process_in, witnessed
from solved import assert_solved

from turnstile.models import EpisodeStatus, Limits
from turnstile_server.agents.registry import load_registry
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import Settings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.testing.policy import Policy, PolicyInput, Step
from turnstile_server.testing.recording import Recording
from turnstile_server.testing.server import PlayedEpisode, scripted_server
from turnstile_server.testing.shell_policy import ShellPolicy, endpoint_texts, solution_commands
from turnstile_server.tools.toolbox import SUBMIT, Toolbox

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(900)]

TASK = "fix-cart-discount"
EXPECTED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("expected.yaml").read_text())
QUESTION = "count-errors"
WITH_TOOL_DOOR = sorted(name for name, row in EXPECTED.items() if row.get("tool_door"))
REQUIRED = {
    "claude-code",
    "cline",
    "codex",
    "continue",
    "gemini-cli",
    "goose",
    "mini-swe-agent",
    "opencode",
    "pi",
    "qwen-code",
}


@dataclass
class Seen:
    """One episode, and the witness of its sandbox."""

    told: PlayedEpisode
    witness: Witness = field(default_factory=Witness)


IN_DOCKER = pytest.param("docker", marks=pytest.mark.docker)


@pytest.fixture(params=["local", IN_DOCKER])
def settings(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Settings]:
    """In bubblewrap the agents see this machine's programs, with a uid for each user if the tests run as root."""
    with tempfile.TemporaryDirectory(prefix="ta-") as run_dir:
        sandboxes: dict[str, Any] = {"kind": request.param, "run_dir": Path(run_dir)}
        if request.param == "docker":
            sandboxes["docker_image"] = request.getfixturevalue("agents_image")
        yield Settings(model=tiny_model, sandboxes=sandboxes)


def solving(task: Task, settings: Settings) -> Policy:
    return ShellPolicy(solution_commands(task, settings.tasks), fallback=endpoint_texts(settings.tools))


def answering(task: Task, settings: Settings) -> Policy:
    """Hands the known answer in through the MCP endpoint, however the agent calls its tools."""
    (said,) = (tool.description for tool in Toolbox(settings.tools).all_tools if tool.name == SUBMIT)
    answer = task.gold.answer if task.gold is not None else None

    def policy(scene: PolicyInput) -> Step:
        names = [name for name, tool in scene.tools.items() if said in str(tool.get("description", ""))]
        if not names or scene.calls_made:
            return Step(text="Done.")
        return Step(tool=names[0], arguments={"answer": answer})

    return policy


async def play_episode(
    agent: str, settings: Settings, task_id: str, policy_of: Callable[[Task, Settings], Policy]
) -> Seen:
    task = (await to_thread.run_sync(load_tasks, ())).get(task_id)
    policy = policy_of(task, settings)
    witnesses: list[Witness] = []
    async with AsyncExitStack() as stack:

        async def created(sandbox: Sandbox) -> None:
            pid = await to_thread.run_sync(process_of, sandbox.sandbox_id, settings)
            witnesses.append(await stack.enter_async_context(witnessed(pid)))

        async with scripted_server(settings, policy, recording=Recording(created)) as server:
            told = await server.play(agent, task_id, limits=Limits(wall_s=600.0, max_turns=30))
    (witness,) = witnesses
    return Seen(told, witness)


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A picture of one pixel."""


def looking(task: Task, settings: Settings) -> Policy:
    """Writes a picture, looks at it by Claude Code's own tool, and solves the task after that."""
    write = f"echo {PNG} | base64 -d > /tmp/a.png"
    solve = ShellPolicy([write, "true", *solution_commands(task, settings.tasks)])

    def policy(scene: PolicyInput) -> Step:
        if "Read" in scene.tools and scene.calls_made == 1:
            return Step(tool="Read", arguments={"file_path": "/tmp/a.png"})
        return solve(scene)

    return policy


def process_of(sandbox_id: str, settings: Settings) -> int:
    """A process in the sandbox's network name space."""
    if settings.sandboxes.kind == "local":
        assert settings.sandboxes.run_dir is not None
        return process_in(settings.sandboxes.run_dir, sandbox_id)
    client = docker.from_env()
    try:
        (container,) = client.containers.list(filters={"label": f"turnstile.sandbox={sandbox_id}"})
        return int(container.attrs["State"]["Pid"])
    finally:
        client.close()


def test_the_agents_that_people_use_are_among_those_that_are_played() -> None:
    assert EXPECTED.keys() >= REQUIRED
    registry = load_registry()
    assert {name for name in EXPECTED if registry.get(name).uses_tools} == set(WITH_TOOL_DOOR)
    assert {name: registry.get(name).dialect for name in EXPECTED} == {
        name: row["dialect"] for name, row in EXPECTED.items()
    }


@pytest.mark.parametrize("agent", sorted(EXPECTED))
async def test_it_solves_a_task_all_its_tokens_are_accounted_for_and_nobody_else_hears_of_it(
    agent: str, settings: Settings
) -> None:
    seen = await play_episode(agent, settings, TASK, solving)
    told, expected = seen.told, EXPECTED[agent]
    stats = told.samples.stats
    assert_solved(told)
    assert stats.sampled_tokens > 0
    assert stats.discarded == {}
    shape = {
        "dialect": {turn.dialect for turn in told.turns},
        "tools": {call.name for turn in told.turns for call in turn.reply.tool_calls},
        "turns": stats.turns,
        "breaks": stats.breaks,
        "cosmetic": stats.cosmetic,
        "untrained": stats.untrained,
        "refused": set(told.refused),
        "names": seen.witness.names,
        "contacts": seen.witness.contacts,
    }
    assert shape == {
        "dialect": {expected["dialect"]},
        "tools": {expected["tool"]},
        "turns": expected["turns"],
        "breaks": expected.get("breaks", {}),
        "cosmetic": expected.get("cosmetic", {}),
        "untrained": expected.get("untrained", {}),
        "refused": set(expected.get("refused", ())),
        "names": set(expected.get("names", ()) if settings.sandboxes.kind == "docker" else ()),
        "contacts": set(expected.get("contacts", ())),
    }


@pytest.mark.parametrize("settings", [IN_DOCKER], indirect=True)
@pytest.mark.parametrize("agent", WITH_TOOL_DOOR)
async def test_it_hands_in_an_answer_through_the_tool_door(agent: str, settings: Settings) -> None:
    seen = await play_episode(agent, settings, QUESTION, answering)
    episode = seen.told.episode
    assert (episode.status, episode.error, episode.reward) == (EpisodeStatus.COMPLETED, None, 1.0), (
        episode.agent_output
    )
    assert seen.told.accounted
    assert set(seen.told.refused) == set(EXPECTED[agent].get("refused", ()))
    assert seen.told.samples.stats.breaks == EXPECTED[agent].get("breaks", {})
    assert seen.witness.contacts == set()


async def test_a_picture_that_claude_code_looks_at_is_a_text_on_the_same_path(settings: Settings) -> None:
    seen = await play_episode("claude-code", settings, TASK, looking)
    assert_solved(seen.told)
    stats = seen.told.samples.stats
    assert (stats.breaks, stats.roots, stats.cosmetic["image_omitted"]) == ({}, 1, 1)
    assert any("[image omitted]" in one.content for turn in seen.told.turns for one in turn.new_messages)
