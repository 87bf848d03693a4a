"""Episodes of external agents that go on after a restart of the server, and those that do not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from conversation import auth, body
from episode_clock import EpisodeClock
from gate_support import Stage, staged
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from test_restart import child, whole_reply, whole_stream

pytestmark = pytest.mark.anyio
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


async def submit(stage: Stage, episode: dict[str, Any]) -> None:
    address = f"{stage.agent_url}/e/{episode['episode_id']}/mcp"
    async with (
        httpx.AsyncClient(headers=auth(episode), timeout=60) as http,
        Client(streamable_http_client(address, http_client=http)) as tools,
    ):
        assert not (await tools.call_tool("submit", {"answer": "42"})).is_error


async def test_after_a_kill_the_agent_goes_on_with_its_key_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    async with child(tiny_model, tmp_path, 1) as (process, control):
        async with httpx.AsyncClient(base_url=control) as client:
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
        async with httpx.AsyncClient(headers=auth(episode)) as client:
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


async def test_a_resumed_episode_is_finished_and_graded(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = (await stage.control.post("/episodes", json={"task": TASK})).json()
        other = (await stage.control.post("/episodes", json={"task": TASK})).json()
        await call(stage.agent_url, episode, HELLO)
        await submit(stage, other)
    async with staged(tiny_model, tmp_path, **ON) as stage:
        assert (await stage.get(other))["error"]["type"] == "server_restarted"  # its answer was in memory alone
        listed = (await stage.control.get("/episodes")).json()["episodes"]
        assert {one["episode_id"]: one["status"] for one in listed} == {
            episode["episode_id"]: "running",
            other["episode_id"]: "failed",
        }
        await submit(stage, episode)
        ended = (await stage.control.post(f"/episodes/{episode['episode_id']}/finish")).json()
        assert (ended["status"], ended["reward"]) == ("completed", 1.0)
    async with staged(tiny_model, tmp_path, **ON) as stage:
        assert (await stage.get(episode))["reward"] == 1.0


async def test_an_agent_that_never_comes_back_costs_no_reward(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EpisodeClock(monkeypatch)
    async with staged(tiny_model, tmp_path) as stage:
        gone, back = [(await stage.control.post("/episodes", json={"task": TASK})).json() for _ in range(2)]
        await call(stage.agent_url, gone, HELLO)
    fast = {"episodes": {"resume_external": True, "watch_interval_s": 0.05}}
    async with staged(tiny_model, tmp_path, **fast) as stage:
        await call(stage.agent_url, back, HELLO)
        await clock.pass_time(2 * 3600)
        with anyio.fail_after(30):
            for episode, status in ((gone, "failed"), (back, "timed_out")):
                while (shown := await stage.get(episode))["status"] in ("running", "grading"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                assert shown["status"] == status
        ended = await stage.get(gone)
        assert (ended["error"]["type"], ended["error"]["fault"]) == ("server_restarted", "infrastructure")
        assert ended["reward"] is None
        assert (await stage.get(back))["reward"] == 0.0


async def test_without_the_setting_none_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = (await stage.control.post("/episodes", json={"task": TASK})).json()
    async with staged(tiny_model, tmp_path) as stage:
        assert (await stage.get(episode))["error"]["type"] == "server_restarted"
