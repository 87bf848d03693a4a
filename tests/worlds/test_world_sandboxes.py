"""Worlds beside a real sandbox, and agents that the server launches into one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mcp
import pytest
from typer.testing import CliRunner, Result

from local import ROOT
from turnstile.cli.app import app
from turnstile.models import EpisodeStatus, Fault
from turnstile_server.sandboxes.protocol import Sandbox, SandboxSpec
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import PolicyInput, Step
from turnstile_server.testing.server import PlayedEpisode, scripted_server
from turnstile_server.testing.world_play import WorldAgent, WorldServer, world_server

pytestmark = pytest.mark.anyio

SOURCE = Path(__file__).with_name("sandbox_worlds.py")
LOCAL = {"sandboxes": {"kind": "local"}}


@pytest.fixture(scope="module", params=["local", pytest.param("docker", marks=pytest.mark.docker)])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[WorldServer]:
    settings = LOCAL
    if request.param == "docker":
        settings = {"sandboxes": {"kind": "docker", "docker_image": request.getfixturevalue("docker_image")}}
    async with world_server(SOURCE, settings) as running:
        yield running


@pytest.mark.parametrize("task", ["notes", "notes-tested"])
async def test_a_world_looks_at_the_sandbox_that_its_agent_worked_in(server: WorldServer, task: str) -> None:
    async def agent(agent: WorldAgent) -> None:
        assert agent.instruction == "Write word-4 into word.txt."
        assert {"bash", "read_file", "submit", "peek", "stamp"} <= set(agent.tools)
        assert "read me" in (await agent.call("read_file", path="given/notes.txt")).text
        missing = await agent.call("peek")
        assert missing.is_error
        assert "peek failed: OSError" in missing.text
        await agent.call("bash", command="echo word-4 > word.txt; sleep 12345 >/dev/null 2>&1 &")
        assert (await agent.call("peek")).text == "word-4\n"
        assert (await agent.call("stamp")).text == "stampedread me"

    episode = await server.play(agent, task=task, seed=4)
    assert episode.reward == 1.0, episode
    assert set(episode.reward_components) == ({"world"} if task == "notes" else {"world", "tests"})


async def test_an_agent_that_does_nothing_in_its_sandbox_scores_zero(server: WorldServer) -> None:
    async def nothing(agent: WorldAgent) -> None:
        pass

    assert (await server.play(nothing, task="notes")).reward == 0.0


@pytest.mark.parametrize(
    "left",
    ["{", "[]", '{"total": null}', '{"total": 1e9}', '{"total": NaN}', "\\377", "[" * 100_000],
    ids=["half", "a list", "null", "too much", "nan", "no text", "deep"],
)
async def test_a_file_that_grade_does_not_expect_scores_zero_and_says_why(server: WorldServer, left: str) -> None:
    async def agent(agent: WorldAgent) -> None:
        await agent.call("bash", command=f"printf '{left}' > out.json")

    episode = await server.play(agent, task="parsing")
    assert (episode.status, episode.reward, episode.error) == (EpisodeStatus.COMPLETED, 0.0, None)
    assert "after it had looked into the agent's sandbox" in episode.grading["summary"][0]


@pytest.mark.parametrize(
    "command", ["true", "mkdir yes.txt", "mkfifo yes.txt", "echo yes > yes.txt; chmod 000 yes.txt", "chmod 000 ."]
)
async def test_a_file_that_the_agent_did_not_leave_readable_scores_zero(server: WorldServer, command: str) -> None:
    async def agent(agent: WorldAgent) -> None:
        await agent.call("bash", command=command)

    episode = await server.play(agent, task="trusting")
    assert (episode.status, episode.reward, episode.error) == (EpisodeStatus.COMPLETED, 0.0, None)
    assert "yes.txt" in episode.grading["summary"][0]


async def test_a_sandbox_that_dies_is_no_fault_of_the_task(
    server: WorldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = server.server.backends.sandboxes
    create, made = provider.create, []

    async def remembered(spec: SandboxSpec) -> Sandbox:
        made.append(await create(spec))
        return made[-1]

    monkeypatch.setattr(provider, "create", remembered)

    async def agent(agent: WorldAgent) -> None:
        await made[0].destroy()
        with contextlib.suppress(mcp.MCPError):  # the episode may have ended already
            await agent.call("stamp")

    episode = await server.play(agent, task="notes")
    assert (episode.status, episode.reward) == (EpisodeStatus.FAILED, None)
    assert episode.error is not None
    assert episode.error.fault is Fault.INFRASTRUCTURE


def validated(*arguments: str) -> Result:
    """In a thread of its own: fixtures of other suites may keep a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        command = ["tasks", "validate", *arguments, "--sandbox", "local"]
        return thread.submit(CliRunner().invoke, app, command, env={"COLUMNS": "200"}).result()


@pytest.mark.slow
def test_validate_plays_the_solution_in_a_sandbox() -> None:
    result = validated(str(SOURCE))
    assert result.exit_code == 0, result.output
    assert "4 of 4 tasks are sound." in result.output


# Agents that the server launches


async def launched(source: Path, task: str, policy: object) -> PlayedEpisode:
    settings = Settings.model_validate({**LOCAL, "tasks": {"sources": (str(source),)}})
    async with scripted_server(settings, policy) as server:  # type: ignore[arg-type]
        return await server.play("plain-loop", task)


@pytest.mark.slow
async def test_a_launched_agent_buys_in_the_shop_and_has_no_shell() -> None:
    def policy(call: PolicyInput) -> Step:
        assert "bash" not in call.tools
        assert "submit" in call.tools
        if call.turn == 0:
            return Step(tool="show_customer")
        if call.turn == 1:
            order = re.findall(r'"id": (\d+),\s+"status": "open"', call.prompt)[-1]
            return Step(tool="cancel_order", arguments={"order_id": int(order)})
        return Step(text="It is cancelled.")

    played = await launched(ROOT / "examples" / "shop" / "shop.py", "shop-cancel-1", policy)
    assert played.episode.reward == 1.0, played.episode
    assert played.accounted
    assert len(played.turns) == 3
    assert played.episode.instruction is not None
    assert played.episode.instruction in played.turns[0].new_messages[-1].content


@pytest.mark.slow
async def test_a_launched_agent_talks_to_the_user_in_plain_text() -> None:
    def policy(call: PolicyInput) -> Step:
        wanted = re.findall(r"It is the (\w+)\.", call.prompt)
        if not wanted:
            return Step(text="What would you like to give back?")
        if "W" not in "".join(re.findall(r'"id": "(W\d+)"', call.prompt)):
            return Step(tool="list_orders")
        (order,) = re.findall(rf'"id": "(W\d+)",\s+"item": "{wanted[0]}"', call.prompt)
        if "Yes, please" not in call.prompt:
            return Step(text=f"Shall I refund {order}?")
        if "is refunded" not in call.prompt:
            return Step(tool="refund", arguments={"order_id": order})
        return Step(text="It is done.")

    played = await launched(ROOT / "examples" / "worlds" / "refund_desk.py", "refund-2", policy)
    assert played.episode.reward == 1.0, played.episode
    assert played.episode.reward_components == {"state": 1.0, "policy": 1.0}
    assert played.episode.stats.breaks == {}
    said = [message.content for turn in played.turns for message in turn.new_messages if message.role == "user"]
    assert "Yes, please refund it." in said
