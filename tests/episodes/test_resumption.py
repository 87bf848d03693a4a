"""Episodes of external agents that go on after a restart of the server, and those that do not."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from conversation import auth, body
from episode_clock import EpisodeClock
from gate_support import CONTEXT, Prompted, Said, Stage, scripted_engine, staged
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from test_restart import child, whole_reply, whole_stream

from turnstile.models import EpisodeStatus
from turnstile_server.episodes.work_file import EndedWork, encode, facts_of
from turnstile_server.errors import JournalUnavailable
from turnstile_server.grading.protocol import Work
from turnstile_server.journal.protocol import Record

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ON = {"episodes": {"resume_external": True}}
TASK = {"instruction": "t", "answer": {"kind": "exact", "value": "42"}}
HELLO = [{"role": "user", "content": "hello"}]


def messages_of(said: list[str]) -> list[dict[str, str]]:
    """The conversation after these replies."""
    found = list(HELLO)
    for text in said:
        found += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    return found


async def call(
    agent_url: str,
    episode: dict[str, Any],
    messages: list[dict[str, str]],
    *,
    stream: bool = False,
    retried: int = 0,
) -> tuple[str, str]:
    """Id and text of the reply."""
    address = f"{agent_url}/e/{episode['episode_id']}/v1/chat/completions"
    headers = {**auth(episode), "x-stainless-retry-count": str(retried)}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        response = await client.post(address, json=body(messages=messages, stream=stream))
    assert response.status_code == 200, response.text
    return whole_stream(response.text) if stream else whole_reply(response.json())


async def submit(agent_url: str, episode: dict[str, Any], answer: str = "42", *, accepted: bool = True) -> str:
    """What the tool said."""
    address = f"{agent_url}/e/{episode['episode_id']}/mcp"
    async with (
        httpx.AsyncClient(headers=auth(episode), timeout=60) as http,
        Client(streamable_http_client(address, http_client=http)) as tools,
    ):
        result = await tools.call_tool("submit", {"answer": answer})
    assert result.is_error is not accepted
    return str(result.content)


async def test_after_a_kill_the_agent_goes_on_with_its_key_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    async with child(tiny_model, tmp_path, 1) as (process, control):
        async with httpx.AsyncClient(base_url=control, timeout=60) as client:
            given = {"task": TASK, "limits": {"max_turns": 4}, "group_id": "g"}
            episode = (await client.post("/episodes", json=given)).json()
        agent_url = episode["model_url"].partition("/e/")[0]
        first_id, first = await call(agent_url, episode, HELLO)
        second_id, second = await call(agent_url, episode, messages_of([first]), stream=True)
        process.kill()  # at once: the reply was read whole, and nothing may say so
        assert await process.wait() == -signal.SIGKILL
    async with staged(tiny_model, tmp_path, **ON) as stage:
        shown = await stage.get(episode)
        assert (shown["status"], shown["error"], shown["group_id"]) == ("running", None, "g")
        again = await call(stage.agent_url, episode, messages_of([first]), retried=1)
        assert again == (second_id, second)
        _, third = await call(stage.agent_url, episode, messages_of([first, second]))
        await call(stage.agent_url, episode, messages_of([first, second, third]))
        async with httpx.AsyncClient(headers=auth(episode), timeout=60) as client:
            spent = await client.post(
                f"{stage.agent_url}/e/{episode['episode_id']}/v1/chat/completions",
                json=body(messages=messages_of(["another"])),
            )
        assert "4 turns are used up" in spent.text
        ended = (await stage.control.post(f"/episodes/{episode['episode_id']}/finish")).json()
        assert ended["status"] == "truncated"
        turns = (await stage.get(episode, "/turns"))["turns"]
        assert [turn["seq"] for turn in turns] == [0, 1, 2, 3]
        parents = {turn["turn_id"]: turn["parent_id"] for turn in turns}
        assert [parents[turn["turn_id"]] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]
        assert {first_id.replace("chatcmpl-", "turn_"), second_id.replace("chatcmpl-", "turn_")} < set(parents)
        exported = await stage.get(episode, "/samples")
        sampled = sum(len(turn["completion_ids"]) for turn in turns)
        assert len(exported["samples"]) == 1
        assert sum(exported["samples"][0]["loss_mask"]) == exported["stats"]["trained_tokens"] == sampled
        report = (await stage.control.post(f"/episodes/{episode['episode_id']}/audit")).json()
        assert report["passed"], report["invariants"]


async def test_an_answer_that_was_acknowledged_outlives_a_kill(tiny_model: Path, tmp_path: Path) -> None:
    async with child(tiny_model, tmp_path, 1) as (process, control):
        async with httpx.AsyncClient(base_url=control, timeout=60) as client:
            episode = (await client.post("/episodes", json={"task": TASK})).json()
        agent_url = episode["model_url"].partition("/e/")[0]
        await submit(agent_url, episode, "41")
        await submit(agent_url, episode, "42")
        process.kill()
        await process.wait()
    async with staged(tiny_model, tmp_path, **ON) as stage:
        ended = (await stage.control.post(f"/episodes/{episode['episode_id']}/finish")).json()
        assert (ended["status"], ended["reward"]) == ("completed", 1.0)


async def test_an_answer_that_cannot_be_stored_is_refused_and_the_one_before_counts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = (await stage.control.post("/episodes", json={"task": TASK})).json()
        await submit(stage.agent_url, episode, "42")
        with monkeypatch.context() as patch:
            patch.setattr(stage.journal, "append", refuse)
            refusal = await submit(stage.agent_url, episode, "41", accepted=False)
        assert "no room" in refusal
        ended = (await stage.control.post(f"/episodes/{episode['episode_id']}/finish")).json()
        assert ended["reward"] == 1.0


async def refuse(record: Record) -> int:
    raise JournalUnavailable("no room")


async def test_a_resumed_episode_is_finished_and_graded(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = (await stage.control.post("/episodes", json={"task": TASK})).json()
        await call(stage.agent_url, episode, HELLO)
    async with staged(tiny_model, tmp_path, **ON) as stage:
        assert (await stage.get(episode))["status"] == "running"
        await submit(stage.agent_url, episode)
        ended = (await stage.control.post(f"/episodes/{episode['episode_id']}/finish")).json()
        assert (ended["status"], ended["reward"]) == ("completed", 1.0)
    async with staged(tiny_model, tmp_path, **ON) as stage:
        assert (await stage.get(episode))["reward"] == 1.0


async def test_an_episode_that_was_graded_when_the_server_stopped_is_not_played_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = (await stage.control.post("/episodes", json={"task": TASK})).json()
    episode_id = episode["episode_id"]
    work = EndedWork(episode_id, Work(None, "42", facts=facts_of(episode_id)), EpisodeStatus.COMPLETED, None, None)
    (tmp_path / "work" / f"{episode_id}.work").write_bytes(encode(work))
    async with staged(tiny_model, tmp_path, **ON) as stage:
        error = (await stage.get(episode))["error"]
        assert (error["type"], "grade it again" in error["message"]) == ("server_restarted", True)


@pytest.mark.parametrize("moved", [False, True])
async def test_turns_of_another_template_are_continued_by_none(
    moved: bool, tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        begun, fresh = [(await stage.control.post("/episodes", json={"task": TASK})).json() for _ in range(2)]
        await call(stage.agent_url, begun, HELLO)
    other = {"rendering": {"template_kwargs": {"another": 1}}} if moved else {}
    async with staged(tiny_model, tmp_path, **ON, **other) as stage:
        assert (await stage.get(begun))["status"] == ("failed" if moved else "running")
        assert (await stage.get(fresh))["status"] == "running"


async def test_sampling_that_the_engine_cannot_do_any_more_is_not_gone_on_with(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = scripted_engine(tiny_model, CONTEXT)
    async with staged(tiny_model, tmp_path, engine=engine) as stage:
        given = {"task": TASK, "sampling": {"top_p": 0.9}}
        episode = (await stage.control.post("/episodes", json=given)).json()
    engine.can = replace(engine.can, exact_truncation=False)
    async with staged(tiny_model, tmp_path, engine=engine, **ON) as stage:
        assert (await stage.get(episode))["error"]["type"] == "server_restarted"


async def test_an_agent_that_never_comes_back_costs_no_reward(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EpisodeClock(monkeypatch)
    async with staged(tiny_model, tmp_path) as stage:
        gone, back, answered, told = [
            (await stage.control.post("/episodes", json={"task": TASK})).json() for _ in range(4)
        ]
        await call(stage.agent_url, gone, HELLO)
        await submit(stage.agent_url, told)
    fast = {"episodes": {"resume_external": True, "watch_interval_s": 0.05}}
    async with staged(tiny_model, tmp_path, **fast) as stage:
        await call(stage.agent_url, back, HELLO)
        await submit(stage.agent_url, answered)
        await clock.pass_time(2 * 3600)
        with anyio.fail_after(30):
            ends = ((gone, "failed"), (told, "failed"), (back, "timed_out"), (answered, "timed_out"))
            for episode, status in ends:
                while (shown := await stage.get(episode))["status"] in ("running", "grading"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                assert shown["status"] == status
        ended = await stage.get(gone)
        assert (ended["error"]["type"], ended["error"]["fault"]) == ("server_restarted", "infrastructure")
        assert ended["reward"] is None
        assert (await stage.get(back))["reward"] == 0.0
        assert (await stage.get(answered))["reward"] == 1.0


async def test_an_agent_whose_first_call_runs_at_the_wall_limit_has_come_back(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EpisodeClock(monkeypatch)
    async with staged(tiny_model, tmp_path) as stage:
        given = {"task": TASK, "limits": {"wall_s": 600}}
        episode = (await stage.control.post("/episodes", json=given)).json()
    async with staged(tiny_model, tmp_path, episodes={"resume_external": True, "watch_interval_s": 0.05}) as stage:
        begun = anyio.Event()

        async def hang(call: Prompted) -> AsyncIterator[Said | Exception]:
            begun.set()
            await call.aborted.wait()
            yield Said([], "abort")

        stage.engine.answers = [hang]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut_off, stage, episode)
            await begun.wait()
            await clock.pass_time(3600)
            with anyio.fail_after(30):
                while (shown := await stage.get(episode))["status"] in ("running", "grading"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
        assert (shown["status"], shown["reward"]) == ("timed_out", 0.0)


async def cut_off(stage: Stage, episode: dict[str, Any]) -> None:
    """A call that ends with its episode."""
    address = f"{stage.agent_url}/e/{episode['episode_id']}/v1/chat/completions"
    async with httpx.AsyncClient(headers=auth(episode), timeout=60) as client:
        assert (await client.post(address, json=body(messages=HELLO))).status_code == 410


async def test_without_the_setting_none_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = (await stage.control.post("/episodes", json={"task": TASK})).json()
    async with staged(tiny_model, tmp_path) as stage:
        assert (await stage.get(episode))["error"]["type"] == "server_restarted"
