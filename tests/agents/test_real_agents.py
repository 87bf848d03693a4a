"""Real agents from their registries, each in a Docker sandbox of its own, solve a shipped task by their own tools.

A policy writes what a model would sample; all else is real. What each does to its history is in expected.yaml.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml
from anyio import to_thread
from network_witness import Witness, witnessed

from turnstile.models import EpisodeStatus, Limits
from turnstile_server.agents.registry import load_registry
from turnstile_server.rehearsal.rig import Rehearsed, rehearsing
from turnstile_server.rehearsal.shell_policy import ShellPolicy, door_texts
from turnstile_server.rehearsal.solution import solution_commands
from turnstile_server.rehearsal.watched import Watch
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import Settings
from turnstile_server.tasks.loader import load_tasks

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.docker, pytest.mark.timeout(900)]

TASK = "fix-cart-discount"
EXPECTED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("expected.yaml").read_text())
REQUIRED = {"claude-code", "codex", "gemini-cli", "goose", "mini-swe-agent", "opencode", "pi", "qwen-code"}


@dataclass
class Seen:
    """One episode, and the witness of its sandbox."""

    told: Rehearsed
    witness: Witness = field(default_factory=Witness)


async def played(agent: str, model: Path, image: str) -> Seen:
    task = (await to_thread.run_sync(load_tasks, ())).get(TASK)
    settings = Settings(model=model, sandboxes={"kind": "docker", "docker_image": image})
    commands = solution_commands(task, settings.tasks)
    policy = ShellPolicy(commands, door=door_texts(settings.tools))
    witnesses: list[Witness] = []
    async with AsyncExitStack() as stack:

        async def created(sandbox: Sandbox) -> None:
            pid = await to_thread.run_sync(process_of, sandbox.sandbox_id)
            witnesses.append(await stack.enter_async_context(witnessed(pid)))

        async with rehearsing(settings, policy, watch=Watch(created)) as rehearsal:
            told = await rehearsal.play(agent, TASK, limits=Limits(wall_s=600.0, max_turns=30))
    (witness,) = witnesses
    return Seen(told, witness)


def process_of(sandbox_id: str) -> int:
    client = docker.from_env()
    try:
        (container,) = client.containers.list(filters={"label": f"turnstile.sandbox={sandbox_id}"})
        return int(container.attrs["State"]["Pid"])
    finally:
        client.close()


def test_the_agents_that_people_use_are_among_those_that_are_played() -> None:
    assert EXPECTED.keys() >= REQUIRED
    assert EXPECTED.keys() <= {spec.name for spec in load_registry()}


@pytest.mark.parametrize("agent", sorted(EXPECTED))
async def test_it_solves_a_task_all_its_tokens_are_accounted_for_and_nobody_else_hears_of_it(
    agent: str, tiny_model: Path, agents_image: str
) -> None:
    seen = await played(agent, tiny_model, agents_image)
    told, expected = seen.told, EXPECTED[agent]
    episode, stats = told.episode, told.samples.stats
    assert (episode.status, episode.error) == (EpisodeStatus.COMPLETED, None), episode.agent_output
    assert episode.reward == 1.0, episode.agent_output
    assert told.tool_calls >= 1
    assert told.accounted
    assert told.audit.passed
    assert stats.sampled_tokens > 0
    assert stats.discarded == {}
    shape = {
        "dialect": {turn.dialect for turn in told.turns},
        "tools": {call.name for turn in told.turns for call in turn.reply.tool_calls},
        "turns": stats.turns,
        "breaks": stats.breaks,
        "cosmetic": stats.cosmetic,
        "untrained": stats.untrained,
        "refused": {f"{one.method} {one.path} {one.status}" for one in told.requests if one.status >= 400},
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
        "names": set(expected.get("names", ())),
        "contacts": set(expected.get("contacts", ())),
    }
