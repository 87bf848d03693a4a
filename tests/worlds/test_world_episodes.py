"""Whole episodes of worlds, played over MCP: what their code does right and wrong, and whose fault it is."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from turnstile.models import Episode, EpisodeRequest, EpisodeStatus, Fault, TaskRef
from turnstile_server.kinds.worlds.environment import WorldEnvironment
from turnstile_server.kinds.worlds.episode_world import Worlds
from turnstile_server.testing.world_play import WorldAgent, WorldServer, world_server
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SOURCE = Path(__file__).with_name("odd_worlds.py")
SETTINGS = {
    "worlds": {
        "reset_timeout_s": 1.0,
        "respond_timeout_s": 1.0,
        "grade_timeout_s": 1.0,
        "close_timeout_s": 0.2,
        "max_user_turns": 3,
        "max_message_chars": 5000,
    }
}


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[WorldServer]:
    async with world_server(SOURCE, SETTINGS) as running:
        yield running
        _module(running).RELEASE.set()


async def nothing(agent: WorldAgent) -> None:
    pass


def failed_by_the_task(episode: Episode, said: str) -> None:
    assert (episode.status, episode.reward) == (EpisodeStatus.FAILED, None)
    assert episode.error is not None
    assert (episode.error.type, episode.error.fault) == ("task_failed", Fault.TASK)
    assert said in episode.error.message


def scores_nothing(episode: Episode, said: str) -> None:
    """What an agent made fail is no way to have no reward."""
    assert episode.reward == 0.0
    assert episode.grading is not None
    assert any(said in line for line in episode.grading["summary"]), episode.grading["summary"]


async def test_an_episode_is_graded_by_the_state_that_its_tools_left(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        assert agent.tools == ("submit", "add", "add_slowly", "waits_and_adds")
        assert (await agent.call("add", number=3)).text == "3"
        assert (await agent.call("add", number=4)).structured == {"result": 7}

    episode = await server.play(agent, task="counter")
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 0.7)
    assert episode.reward_components == {"world": 0.7}
    assert episode.instruction == "Count to ten from seed 5."


async def test_the_episodes_seed_comes_before_the_tasks(server: WorldServer) -> None:
    episode = await server.play(nothing, task="counter", seed=11)
    assert episode.instruction == "Count to ten from seed 11."
    assert (episode.seed, episode.reward) == (11, 0.0)


async def test_calls_of_one_world_run_one_at_a_time_in_one_thread(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        async with anyio.create_task_group() as calls:
            for _ in range(5):
                calls.start_soon(lambda: agent.call("add_slowly", number=2))

    assert (await server.play(agent, task="counter")).reward == 1.0


async def test_episodes_at_the_same_time_do_not_see_each_other(server: WorldServer) -> None:
    rewards: dict[int, float | None] = {}

    async def one(number: int) -> None:
        async def agent(agent: WorldAgent) -> None:
            for _ in range(number):
                await agent.call("add")

        rewards[number] = (await server.play(agent, task="counter")).reward

    async with anyio.create_task_group() as episodes:
        for number in range(5):
            episodes.start_soon(one, number)
    assert rewards == {number: number / 10 for number in range(5)}


async def test_what_one_episode_does_to_its_parameters_no_other_sees(server: WorldServer) -> None:
    assert [(await server.play(nothing, task="shared")).reward for _ in range(2)] == [1.0, 1.0]


async def test_every_method_may_be_a_coroutine(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        assert (await agent.call("act")).text == "acted"
        first = await agent.submit("first")
        assert (first.user, first.text) == ("And?", "The user replies: And?")
        assert (await agent.submit("second")).user is None

    episode = await server.play(agent, task="async-all")
    assert episode.reward == 0.5
    assert episode.reward_components == {"answered": 1.0, "half": 0.5}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("reset-raises", "odd_worlds.py:ResetRaises: reset raised KeyError: 'no such level' (line"),
        ("reset-exits", "reset raised SystemExit: 3"),
        ("reset-blocks", "reset took longer than 1 s (worlds.reset_timeout_s)"),
        ("reset-async-blocks", "reset took longer than 1 s (worlds.reset_timeout_s)"),
        ("reset-gives-number", "reset returned a int; it returns text, a Start or None"),
        ("reset-gives-files", "needs_sandbox = False"),
        ("grade-raises", "grade raised ZeroDivisionError (line"),
        ("grade-blocks", "grade took longer than 1 s (worlds.grade_timeout_s)"),
        ("graded-nan", "grade returned nan, which is not a number from 0 to 1"),
        ("graded-inf", "grade returned inf"),
        ("graded-two", "grade returned 2,"),
        ("graded-minus", "grade returned -0.5"),
        ("graded-none", "grade returned None"),
        ("graded-text", "grade returned a str"),
        ("graded-empty", "grade returned no component"),
        ("graded-badname", "a component named 'a b'"),
        ("graded-badpart", "grade returned for 'bad' nan"),
    ],
)
async def test_a_world_that_fails_leaves_no_reward_and_the_fault_is_the_tasks(
    server: WorldServer, task: str, said: str
) -> None:
    failed_by_the_task(await server.play(nothing, task=task), said)


@pytest.mark.parametrize(
    ("task", "reward", "components"),
    [
        ("graded-true", 1.0, {"world": 1.0}),
        ("graded-int", 1.0, {"world": 1.0}),
        ("graded-parts", 0.25, {"paid": 1.0, "sent": 0.25}),
        ("not-graded", None, {}),
    ],
)
async def test_what_a_grade_may_be(
    server: WorldServer, task: str, reward: float | None, components: dict[str, float]
) -> None:
    episode = await server.play(nothing, task=task)
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, reward)
    assert episode.reward_components == components


async def test_what_a_tool_does_wrong_is_a_result_and_the_episode_goes_on(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        broken = await agent.call("breaks")
        assert broken.is_error
        assert "breaks failed: KeyError: 'secret of the world' (line" in broken.text
        refused = await agent.call("refuses")
        assert (refused.is_error, refused.text) == (True, "not today")
        assert "does not allow" in (await agent.call("wrong_result")).text
        assert "there is no tool" in (await agent.call("grade")).text
        assert "number" in (await agent.call("refuses", number=1)).text

    assert (await server.play(agent, task="bad-tools")).reward == 0.75


async def test_a_call_whose_caller_left_changes_nothing_and_the_next_one_runs(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        for _ in range(3):
            with anyio.move_on_after(0.03):
                await agent.call("waits_and_adds")
            assert (await agent.call("add", number=1)).is_error is False

    assert (await server.play(agent, task="counter")).reward == 0.3


async def test_a_tool_that_can_be_cancelled_delays_nothing(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        assert "took longer than its limit of 0.3 s" in (await agent.call("sleeps")).text
        assert (await agent.call("refuses")).text == "not today"

    assert (await server.play(agent, task="bad-tools")).reward == 0.75


async def test_a_tool_that_never_returns_costs_the_reward_and_nothing_else(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        assert "took longer than its limit of 0.3 s" in (await agent.call("blocks")).text
        later = await agent.call("refuses")
        assert (later.is_error, later.text) == (True, "refuses did not run: blocks has not returned yet")

    episode, other = None, None
    async with anyio.create_task_group() as both:

        async def stuck() -> None:
            nonlocal episode
            episode = await server.play(agent, task="bad-tools")

        async def free() -> None:
            nonlocal other
            other = await server.play(nothing, task="counter")

        both.start_soon(stuck)
        both.start_soon(free)
    assert episode is not None
    scores_nothing(episode, "an earlier call of blocks has not returned")
    assert other is not None
    assert other.reward == 0.0


async def test_a_user_speaks_until_the_bound_and_then_the_conversation_is_over(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        for number in range(3):
            assert (await agent.submit(str(number))).user == f"I heard {number}."
        for number in range(3, 5):
            answer = await agent.submit(str(number))
            assert (answer.user, answer.text) == (None, "The conversation is over.")

    episode = await server.play(agent, task="talker")
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 0.3)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raise", "respond raised ValueError: the user broke"),
        ("block", "respond took longer than 1 s (worlds.respond_timeout_s)"),
        ("number", "respond returned a int; it returns text or None"),
        ("long", "respond returned 5001 characters; the most is 5000 (worlds.max_message_chars)"),
    ],
)
async def test_a_user_whom_the_agent_breaks_ends_the_episode_with_0(
    server: WorldServer, answer: str, said: str
) -> None:
    async def agent(agent: WorldAgent) -> None:
        result = await agent.submit(answer)
        assert result.is_error

    episode = await server.play(agent, task="talker")
    assert episode.error is not None
    assert (episode.status, episode.error.fault) == (EpisodeStatus.FAILED, Fault.AGENT)
    assert said in episode.error.message
    assert episode.reward == 0.0


async def test_a_user_who_answers_nobody_is_the_tasks_fault(server: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        assert (await agent.submit("Hello?")).is_error

    failed_by_the_task(await server.play(agent, task="mute"), "respond raised ValueError: no voice")


@pytest.mark.parametrize("answer", [None, "", "forty-two", "4" * 5000], ids=["none", "empty", "text", "long"])
async def test_an_answer_that_no_grade_can_take_scores_0(server: WorldServer, answer: str | None) -> None:
    async def agent(agent: WorldAgent) -> None:
        if answer is not None:
            await agent.submit(answer)

    episode = await server.play(agent, task="only-numbers")
    scores_nothing(episode, "a world that no agent touched can be graded")
    scores_nothing(episode, "grade raised ValueError")


@pytest.mark.parametrize("task", ["close-raises", "close-blocks"])
async def test_a_world_that_cannot_be_closed_keeps_its_reward(server: WorldServer, task: str) -> None:
    assert (await server.play(nothing, task=task)).reward == 1.0


@pytest.mark.parametrize("task", ["counter", "async-all", "reset-raises", "grade-raises"])
async def test_a_world_is_closed_once_on_every_path(server: WorldServer, task: str) -> None:
    closed = _noted(server)
    episode = await server.play(nothing, task=task)
    assert closed.count(episode.episode_id) == 1


async def test_a_cancelled_episode_closes_its_world_and_has_no_reward(server: WorldServer) -> None:
    closed = _noted(server)
    created = await server.server.create(EpisodeRequest(task=TaskRef(id="counter")))
    await server.server.control.post(f"/episodes/{created.episode_id}/cancel")
    episode = await server.server.wait_for_end(created.episode_id)
    assert (episode.status, episode.reward) == (EpisodeStatus.CANCELLED, None)
    made = created.episode_id in _module(server).Counter.episodes
    assert closed.count(created.episode_id) == int(made)


async def test_an_episode_that_is_finished_before_its_world_is_there_has_no_reward(server: WorldServer) -> None:
    created = await server.server.create(EpisodeRequest(task=TaskRef(id="reset-blocks")))
    await server.server.control.post(f"/episodes/{created.episode_id}/finish")
    episode = await server.server.wait_for_end(created.episode_id)
    assert (episode.status, episode.reward) == (EpisodeStatus.FAILED, None)
    assert episode.error is not None
    assert (episode.error.fault, episode.error.type) == (Fault.CALLER, "finished_early")
    assert "finished before the episode ran" in episode.error.message


async def test_threads_of_worlds_that_return_end_with_their_episodes(server: WorldServer) -> None:
    episode = await server.play(nothing, task="counter")
    await wait_until(lambda: not _threads_of(episode))


async def test_worlds_that_never_return_count_until_there_is_no_room() -> None:
    settings = {"worlds": {**SETTINGS["worlds"], "max_open": 1, "reset_timeout_s": 0.2}}
    async with world_server(SOURCE, settings) as server:
        failed_by_the_task(await server.play(nothing, task="reset-blocks"), "reset took longer")
        refused = await server.play(nothing, task="counter")
        assert refused.error is not None
        assert (refused.error.type, refused.error.fault) == ("world_unavailable", Fault.INFRASTRUCTURE)
        assert "worlds.max_open" in refused.error.message
        _module(server).RELEASE.set()
        closed = _noted(server)
        worlds = server.server.backends.shared.get(Worlds, lambda: pytest.fail("no world was opened"))
        await wait_until(lambda: not worlds.open_worlds)
        assert "reset-blocks" in closed, "it is closed when its call has returned after all"
        assert (await server.play(nothing, task="counter")).reward == 0.0


async def test_a_server_stops_although_a_world_is_blocked() -> None:
    settings = {"worlds": {**SETTINGS["worlds"], "reset_timeout_s": 3600}}
    with anyio.fail_after(30):
        async with world_server(SOURCE, settings) as server:
            created = await server.server.create(EpisodeRequest(task=TaskRef(id="reset-blocks")))
            with anyio.fail_after(20):
                status = EpisodeStatus.QUEUED
                while status is EpisodeStatus.QUEUED:
                    reply = await server.server.control.get(f"/episodes/{created.episode_id}?wait=1")
                    status = EpisodeStatus(reply.json()["status"])
            assert status is EpisodeStatus.PREPARING
    _module(server).RELEASE.set()


PROGRAM = """
import sys
from turnstile_server.testing.world_play import play

async def nothing(agent):
    pass

print(play(sys.argv[1], nothing, task="grade-blocks", settings={"worlds": {"grade_timeout_s": 0.3}}).error.message)
"""


def test_a_process_ends_although_a_world_never_returned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, SOURCE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "grade took longer than 0.3 s" in done.stdout


def _threads_of(episode: Episode) -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name == f"world-{episode.episode_id}"]


def _module(server: WorldServer) -> Any:
    """The file of the worlds, as this server imported it."""
    environment = server.server.backends.tasks.get("counter").environment
    assert isinstance(environment, WorldEnvironment)
    return sys.modules[environment.definition.world_class.__module__]


def _noted(server: WorldServer) -> list[str]:
    closed: list[str] = _module(server).CLOSED
    return closed
