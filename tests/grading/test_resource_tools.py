"""Rows whose resource server has tools: an agent calls them in the session in which its work is verified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nemo_server import NemoServer, Verdict
from openai.types.responses import Response

from bounded import bounded
from turnstile.models import EpisodeStatus, Fault
from turnstile_server.settings import GradingSettings
from turnstile_server.testing.world_play import WorldAgent, WorldServer, world_server

pytestmark = pytest.mark.anyio

COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "add 1 then add 2 then get the count"}],
        "tools": [
            {"type": "function", "name": "increment_counter", "description": "Adds.", "parameters": COUNT},
            {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}},
        ],
    },
    "initial_count": 3,
    "expected_count": 6,
    "id": "counter",
}
"""As those of nemo-gym's example of a session with a state."""


class Counters(NemoServer):
    """That example's server: a counter for each session, judged by its value."""

    def __init__(self) -> None:
        super().__init__(self._judged)
        self.counts: dict[str, int] = {}
        self.tools = {"increment_counter": self._increment, "get_counter_value": self._value}

    def _increment(self, session: str | None, arguments: dict[str, Any]) -> Verdict:
        if arguments["count"] > 100:
            return Verdict({"detail": "too much"}, status=422)
        assert session in self.sessions
        self.counts[session] = self.counts.get(session, 3) + arguments["count"]
        return Verdict({"success": True})

    def _value(self, session: str | None, arguments: dict[str, Any]) -> Verdict:
        assert session in self.sessions
        return Verdict({"count": self.counts.get(session, 3)})

    def _judged(self, body: dict[str, Any]) -> Verdict:
        session = self.verified_in[-1]
        assert session is not None
        return Verdict({"reward": float(self.counts.get(session, 3) == body["expected_count"])})


@pytest.fixture
def server() -> Iterator[Counters]:
    with Counters().serving() as made:
        yield made


def source_of(server: NemoServer, folder: Path) -> str:
    (folder / "rows.jsonl").write_text(json.dumps(ROW))
    return f"rows:{folder}/rows.jsonl?verifier={server.url}"


SETTINGS = {"grading": bounded(GradingSettings, retries=1, retry_pause_s=0), "tools": {"own_timeout_s": 2.0}}


async def solve(agent: WorldAgent) -> None:
    assert {"increment_counter", "get_counter_value", "submit"} <= set(agent.tools)
    for count in (1, 2):
        assert json.loads((await agent.call("increment_counter", count=count)).text) == {"success": True}
    assert (await agent.call("get_counter_value")).text == '{"count": 6}'
    await agent.submit("It is 6.")


async def idle(agent: WorldAgent) -> None:
    await agent.submit("6")


@pytest.mark.slow
async def test_calls_change_the_session_in_which_the_work_is_verified(server: Counters, tmp_path: Path) -> None:
    async with world_server(source_of(server, tmp_path), SETTINGS) as played:
        ended = [await played.play(agent) for agent in (solve, idle)]
    assert [episode.reward for episode in ended] == [1.0, 0.0]
    assert all(episode.status is EpisodeStatus.COMPLETED for episode in ended)
    assert len(server.seeds) == len(set(server.sessions)) == 2
    assert server.verified_in == server.sessions
    response = Response.model_validate(server.verified[0]["response"], strict=True)
    kinds = [item.type for item in response.output]
    assert kinds == ["function_call", "function_call_output"] * 3 + ["message"]
    assert [json.loads(item.arguments) for item in response.output if item.type == "function_call"] == [
        {"count": 1},
        {"count": 2},
        {},
    ]
    assert response.output_text == "It is 6."


async def test_what_a_tool_answers_is_told_whatever_its_status(server: Counters, tmp_path: Path) -> None:
    async def agent(agent: WorldAgent) -> None:
        wrong = await agent.call("increment_counter", count=10**6)
        assert (wrong.is_error, "too much" in wrong.text) == (True, True)
        await solve(agent)

    async with world_server(source_of(server, tmp_path), SETTINGS) as played:
        assert (await played.play(agent)).reward == 1.0


@pytest.mark.slow
async def test_a_call_that_takes_too_long_ends_alone(server: Counters, tmp_path: Path) -> None:
    server.tools["get_counter_value"] = lambda session, arguments: Verdict(hangs=True)

    async def agent(agent: WorldAgent) -> None:
        assert (await agent.call("get_counter_value")).is_error
        await agent.call("increment_counter", count=3)

    async with world_server(source_of(server, tmp_path), SETTINGS) as played:
        episode = await played.play(agent)
        assert episode.reward == 1.0, episode.error


@pytest.mark.slow
async def test_an_episode_has_so_many_bytes_of_calls_and_what_it_did_before_is_verified(
    server: Counters, tmp_path: Path
) -> None:
    server.tools["get_counter_value"] = lambda session, arguments: Verdict({"count": "x" * 5_000})

    async def agent(agent: WorldAgent) -> None:
        await agent.call("increment_counter", count=3)
        assert not (await agent.call("get_counter_value")).is_error
        refused = await agent.call("increment_counter", count=1)
        assert (refused.is_error, "too large together" in refused.text) == (True, True)

    settings = {**SETTINGS, "grading": bounded(GradingSettings, max_resource_session_bytes=4_000)}
    async with world_server(source_of(server, tmp_path), settings) as played:
        assert (await played.play(agent)).reward == 1.0


async def test_a_call_without_an_answer_leaves_no_reward(server: Counters, tmp_path: Path) -> None:
    server.tools["get_counter_value"] = lambda session, arguments: Verdict({"count": 3}, cut=True)

    async def agent(agent: WorldAgent) -> None:
        assert (await agent.call("get_counter_value")).is_error
        await agent.submit("3")

    async with world_server(source_of(server, tmp_path), SETTINGS) as played:
        episode = await played.play(agent)
    assert (episode.status, episode.reward) == (EpisodeStatus.FAILED, None)
    assert episode.error is not None
    assert (episode.error.type, episode.error.fault) == ("grader_unavailable", Fault.INFRASTRUCTURE)
    assert "/get_counter_value" in episode.error.message
    assert server.verified == []


@pytest.mark.parametrize(
    ("seeded", "status", "kind"),
    [
        (Verdict(status=500), 503, "tools_unavailable"),
        (Verdict(hangs=True), 503, "tools_unavailable"),
        (Verdict({"mcp": {"url_path": "/mcp"}}), 422, "task_failed"),
        (Verdict(status=422), 422, "task_failed"),
    ],
)
async def test_an_episode_without_a_session_fails_before_its_agent_begins(
    seeded: Verdict, status: int, kind: str, server: Counters, tmp_path: Path
) -> None:
    server.seeded = seeded
    settings = {**SETTINGS, "grading": {"resource_server_timeout_s": 0.5}}
    async with world_server(source_of(server, tmp_path), settings) as played:
        episode = await played.play(idle)
    assert (episode.status, episode.reward) == (EpisodeStatus.FAILED, None)
    assert episode.error is not None
    assert episode.error.type == kind
    assert server.verified == []


async def refused(played: WorldServer, path: str, body: dict[str, Any]) -> str:
    reply = await played.server.control.post(path, json=body)
    assert reply.status_code == 422, reply.text
    return reply.text


async def test_what_needs_the_session_of_an_ended_episode_is_refused(server: Counters, tmp_path: Path) -> None:
    async with world_server(source_of(server, tmp_path), SETTINGS) as played:
        episode = await played.play(idle)
        at = f"/episodes/{episode.episode_id}"
        assert "session of the episode" in await refused(played, f"{at}/regrade", {"regrade_id": "r"})
        wanted = {"task": {"id": "counter"}, "snapshots": "every_turn"}
        assert "tools of a resource server" in await refused(played, "/episodes", wanted)
