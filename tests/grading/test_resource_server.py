"""Rows that a NeMo-Gym resource server verifies: what it is sent, what its answers mean, and servers that fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grading_support import grader
from nemo_server import NemoServer, Verdict, exact
from openai.types.responses import Response

from bounded import bounded
from turnstile.models import EpisodeStatus, Fault
from turnstile.models.evidence import grade_in_words
from turnstile_server.grading.errors import GraderFailed, GraderUnavailable, RewardInvalid
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.testing.world_play import WorldAgent, world_server

pytestmark = pytest.mark.anyio

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "6*7?"}], "model": "policy", "tools": []},
    "expected_answer": "42",
    "options": [{"A": "41"}, {"B": "42"}],
    "uuid": "sum-1",
}


@pytest.fixture
def server() -> Iterator[NemoServer]:
    with NemoServer().serving() as made:
        yield made


@pytest.fixture
def task(server: NemoServer, tmp_path: Path) -> Task:
    return task_of(server, tmp_path)


def task_of(server: NemoServer, folder: Path, options: str = "") -> Task:
    (folder / "rows.jsonl").write_text(json.dumps(ROW))
    (found,) = load_tasks([f"rows:{folder}/rows.jsonl?verifier={server.url}{options}"])
    return found


async def graded(task: Task, answer: str | None = "42", retries: int = 0, timeout_s: float = 20) -> Grade:
    made = grader(None, retries=retries, retry_pause_s=0, resource_server_timeout_s=timeout_s)
    return await made.grade(task, Work(answer=answer))


async def test_the_server_gives_the_reward_for_the_submitted_answer(server: NemoServer, task: Task) -> None:
    right = await graded(task)
    assert (right.reward, right.components) == (1.0, {"resource_server": 1.0})
    assert right.detail["resource_server"] == {"server": server.url, "reported": {"matched": True}}
    wrong = await graded(task, "41")
    assert wrong.reward == 0.0
    assert wrong.detail["summary"] == ["resource_server: the resource server gives 0"]
    assert grade_in_words(wrong.detail, wrong.components) == "resource_server: the resource server gave 0"


async def test_it_is_sent_the_whole_row_and_a_response_that_the_official_client_takes(
    server: NemoServer, task: Task
) -> None:
    await graded(task, "it is\n42 €")
    [sent] = server.verified
    assert {name: value for name, value in sent.items() if name != "response"} == ROW
    assert server.seeds == [ROW]
    response = Response.model_validate(sent["response"], strict=True)
    assert (response.output_text, response.model, response.status) == ("it is\n42 €", "policy", "completed")
    [message] = response.output
    assert message.type == "message"


async def test_nothing_submitted_is_an_empty_text(server: NemoServer, task: Task) -> None:
    assert (await graded(task, None)).reward == 0.0
    assert Response.model_validate(server.verified[0]["response"]).output_text == ""


async def test_each_work_is_verified_in_the_session_that_was_opened_for_it(server: NemoServer, task: Task) -> None:
    for _ in range(2):
        await graded(task)
    assert server.verified_in == server.sessions
    assert len(set(server.sessions)) == 2


async def test_half_a_character_in_an_answer_costs_nobody_the_reward(server: NemoServer, task: Task) -> None:
    assert (await graded(task, "42\ud83d")).reward == 0.0
    assert Response.model_validate(server.verified[0]["response"]).output_text == "42?"


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (Verdict(status=500, raw=b"Internal Server Error"), "500: Internal Server Error"),
        (Verdict(status=503), "503"),
        (Verdict(status=429), "429"),
        (Verdict(raw=b"<html>"), "not JSON"),
        (Verdict(raw=b"\xff{}"), "not JSON"),
        (Verdict(raw=b"[" * 100_000), "not JSON"),
        (Verdict(raw=b"[1.0]"), "no object"),
        (Verdict(raw=b'"' + b"x" * (5 << 20) + b'"'), "more than"),
        (Verdict({"reward": 1.0}, cut=True), "/verify"),
    ],
)
async def test_a_server_that_fails_is_asked_again_and_then_there_is_no_reward(
    verdict: Verdict, said: str, server: NemoServer, task: Task
) -> None:
    server.verify = lambda body: verdict
    with pytest.raises(GraderUnavailable, match=said) as failed:
        await graded(task, retries=1)
    assert failed.value.fault == Fault.INFRASTRUCTURE
    assert len(server.seeds) == len(server.verified) == 2
    answers = [verdict, Verdict({"reward": 1.0})]
    server.verify = lambda body: answers.pop(0)
    assert (await graded(task, retries=1)).reward == 1.0


async def test_a_session_that_cannot_be_opened_is_no_reward(server: NemoServer, task: Task) -> None:
    server.seeded = Verdict(status=500)
    with pytest.raises(GraderUnavailable, match="/seed_session"):
        await graded(task)
    assert server.verified == []


async def test_a_server_that_never_answers_is_given_up_in_time(server: NemoServer, task: Task) -> None:
    server.verify = lambda body: Verdict(hangs=True)
    with pytest.raises(GraderUnavailable, match=r"within 0\.3 s \(grading\.resource_server_timeout_s\)"):
        await graded(task, timeout_s=0.3)


async def test_a_server_that_is_not_there_is_no_reward(tmp_path: Path) -> None:
    with NemoServer().serving() as gone:
        task = task_of(gone, tmp_path)
    with pytest.raises(GraderUnavailable, match="ConnectError"):
        await graded(task)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_request_that_is_refused_is_not_sent_again(status: int, server: NemoServer, task: Task) -> None:
    server.verify = lambda body: Verdict(status=status, raw=b'{"detail": "Field required"}')
    with pytest.raises(GraderFailed, match=f"{status}: .*Field required"):
        await graded(task, retries=3)
    assert len(server.verified) == 1


async def test_a_redirect_leads_to_no_further_address(server: NemoServer, task: Task) -> None:
    server.verify = lambda body: Verdict(status=307, headers={"location": "/elsewhere"})
    with pytest.raises(GraderFailed, match="307"):
        await graded(task)
    assert server.other_paths == []


@pytest.mark.parametrize(
    "reward", ["nothing", "null", '"1"', "true", "[1]", "NaN", "Infinity", "1e999", f"1{'0' * 400}"]
)
async def test_a_reward_that_is_no_finite_number_is_none(reward: str, server: NemoServer, task: Task) -> None:
    fields = "{}" if reward == "nothing" else f'{{"reward": {reward}}}'
    server.verify = lambda body: Verdict(raw=fields.encode())
    with pytest.raises(GraderFailed, match="`reward` is") as failed:
        await graded(task, retries=3)
    assert failed.value.fault == Fault.TASK
    assert len(server.verified) == 1


@pytest.mark.parametrize("reward", [-1, 2, 2.5])
async def test_a_reward_lies_in_the_bounds_of_the_source(
    reward: float, server: NemoServer, tmp_path: Path
) -> None:
    server.verify = lambda body: Verdict({"reward": reward})
    with pytest.raises(RewardInvalid):
        await graded(task_of(server, tmp_path))
    wide = task_of(server, tmp_path, "&bounds=-1,2.5")
    assert (await graded(wide)).reward == reward


async def test_only_numbers_that_the_server_found_are_evidence_and_not_without_end(
    server: NemoServer, task: Task
) -> None:
    said: dict[str, Any] = {
        "text": "a",
        "list": [1],
        "x" * 101: 1,
        "huge": 10**400,
        "uuid": 7,
        "f1": 0.25,
        "ok": False,
    }
    server.verify = lambda body: Verdict({"reward": 0.5, **said})
    assert (await graded(task)).detail["resource_server"]["reported"] == {"f1": 0.25, "ok": False}
    server.verify = lambda body: Verdict({"reward": 0.5, **{f"n{number}": number for number in range(80)}})
    reported = (await graded(task)).detail["resource_server"]["reported"]
    assert reported == {f"n{number}": float(number) for number in range(50)}


async def test_a_server_whose_tools_come_over_mcp_gives_no_reward(server: NemoServer, task: Task) -> None:
    server.seeded = Verdict({"mcp": {"server_name": "weather", "url_path": "/mcp", "headers": {}}})
    with pytest.raises(GraderFailed, match="tools over MCP"):
        await graded(task)
    server.seeded, server.verify = Verdict({"mcp": None}), exact
    assert (await graded(task)).reward == 1.0


@pytest.mark.slow
async def test_an_episode_has_the_servers_reward_and_none_where_the_server_fails(
    server: NemoServer, task: Task, tmp_path: Path
) -> None:
    async def agent(agent: WorldAgent) -> None:
        assert (agent.instruction, agent.tools) == ("6*7?", ("submit",))
        await agent.submit("41")
        await agent.submit("42")

    source = f"rows:{tmp_path}/rows.jsonl?verifier={server.url}"
    async with world_server(source, {"grading": bounded(GradingSettings, retries=1, retry_pause_s=0)}) as played:
        done = await played.play(agent)
        assert (done.status, done.reward) == (EpisodeStatus.COMPLETED, 1.0)
        assert done.grading is not None
        assert done.grading["resource_server"]["reported"] == {"matched": True}
        server.verify = lambda body: Verdict(status=500)
        lost = await played.play(agent)
        assert (lost.status, lost.reward) == (EpisodeStatus.FAILED, None)
        assert lost.error is not None
        assert (lost.error.type, lost.error.fault) == ("grader_unavailable", Fault.INFRASTRUCTURE)
    assert len(server.verified) == 3
