"""Servers that are killed, restarted and stopped: acknowledged turns are there, and nothing is left running."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import numpy as np
import pytest
from conversation import auth, body, url
from gate_support import staged

from turnstile_server.demo.local_server import serve

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
EPISODES = 3
CONVERSATIONS = 3
"""Per episode, at once."""


@asynccontextmanager
async def child(model: Path, data_dir: Path, seed: int) -> AsyncIterator[tuple[anyio.abc.Process, str]]:
    """``staged_child.py`` and the URL of its control API; killed at the end."""
    command = [sys.executable, str(HERE / "staged_child.py"), str(model), str(data_dir), str(seed)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    async with await anyio.open_process(command, stderr=None, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(60):
                line = await process.stdout.receive()
            yield process, json.loads(line)["control"]
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@dataclass
class Acknowledged:
    """The replies that agents received: turn id to episode id and text. ``enough`` is set at ``wanted`` of
    them."""

    turns: dict[str, tuple[str, str]] = field(default_factory=dict)
    enough: anyio.Event = field(default_factory=anyio.Event)
    wanted: int = 20

    def note(self, episode: dict[str, Any], reply_id: str, text: str) -> None:
        self.turns[reply_id.replace("chatcmpl-", "turn_")] = (episode["episode_id"], text)
        if len(self.turns) >= self.wanted:
            self.enough.set()


async def converse(episode: dict[str, Any], name: str, said: Acknowledged, stream: bool) -> None:
    """One conversation, until the server dies; each complete reply is noted."""
    messages: list[dict[str, str]] = [{"role": "user", "content": name}]
    try:
        async with httpx.AsyncClient(headers=auth(episode), timeout=30) as client:
            while True:
                response = await client.post(url(episode), json=body(messages=messages, stream=stream))
                assert response.status_code == 200, response.text
                reply_id, text = whole_stream(response.text) if stream else whole_reply(response.json())
                said.note(episode, reply_id, text)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    except httpx.TransportError:
        return


def whole_stream(text: str) -> tuple[str, str]:
    """Id and text of a stream that ended with ``[DONE]``."""
    *events, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    return chunks[0]["id"], "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def whole_reply(reply: dict[str, Any]) -> tuple[str, str]:
    return reply["id"], reply["choices"][0]["message"]["content"]


@pytest.mark.thorough
@pytest.mark.slow
async def test_after_a_kill_every_acknowledged_turn_is_there(tiny_model: Path, tmp_path: Path) -> None:
    pick = random.Random(3)
    episodes: list[dict[str, Any]] = []
    said = Acknowledged()
    for attempt in range(3):
        said.enough = anyio.Event()
        said.wanted = len(said.turns) + 25
        started = []
        async with child(tiny_model, tmp_path, attempt) as (process, control), anyio.create_task_group() as tasks:
            async with httpx.AsyncClient(base_url=control, timeout=60) as client:
                for _ in range(EPISODES):
                    created = await client.post("/episodes", json={"task": {"instruction": "t"}})
                    started.append(created.json())
            for index in range(EPISODES * CONVERSATIONS):
                episode = started[index % EPISODES]
                tasks.start_soon(converse, episode, f"c{index}", said, bool(index % 2))
            await said.enough.wait()
            await anyio.sleep(pick.random() * 0.02)
            process.kill()
            assert await process.wait() == -signal.SIGKILL
        episodes += started

    async with staged(tiny_model, tmp_path) as stage:
        found: dict[str, tuple[str, str]] = {}
        for episode in episodes:
            shown = await stage.get(episode)
            assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
            for turn in (await stage.get(episode, "/turns"))["turns"]:
                found[turn["turn_id"]] = (episode["episode_id"], turn["reply"]["content"])
            exported = await stage.get(episode, "/samples")
            assert exported["stats"] == shown["stats"]
            assert exported["stats"]["trained_tokens"] == sum(sum(row["loss_mask"]) for row in exported["samples"])
            assert {row["status"] for row in exported["samples"]} == {"failed"}
            report = (await stage.control.post(f"/episodes/{episode['episode_id']}/audit")).json()
            assert report["passed"], report["invariants"]
            async with httpx.AsyncClient(headers=auth(episode), timeout=60) as client:
                refused = await client.post(f"{stage.agent_url}/e/{episode['episode_id']}/v1/chat/completions")
            assert refused.status_code == 410
        assert len(said.turns) >= 75
        assert {turn_id: found.get(turn_id) for turn_id in said.turns} == said.turns


async def test_a_restart_keeps_ended_episodes_as_they_were(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode(idempotency_key="k")
        async with stage.agent(episode) as agent:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
        await stage.post(episode, "finish")
        before = [await stage.get(episode, what) for what in ("", "/turns", "/samples")]
        deleted = await stage.episode()
        await stage.control.delete(f"/episodes/{deleted['episode_id']}")
    async with staged(tiny_model, tmp_path) as stage:
        assert [await stage.get(episode, what) for what in ("", "/turns", "/samples")] == before
        assert (await stage.control.get(f"/episodes/{deleted['episode_id']}")).status_code == 404
        again = await stage.control.post("/episodes", json={"task": {"instruction": "t"}, "idempotency_key": "k"})
        assert (again.status_code, again.json()["episode_id"]) == (200, episode["episode_id"])
        taken = await stage.control.post(
            "/episodes", json={"task": {"instruction": "t"}, "episode_id": episode["episode_id"]}
        )
        assert taken.status_code == 409


@pytest.mark.slow
async def test_sigterm_during_a_stream_stops_within_the_grace_and_keeps_what_was_shown(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTILE_SHUTDOWN_GRACE_S", "0.5")
    lines: list[str] = []
    async with anyio.create_task_group() as tasks, serve(tiny_model, tmp_path / "data") as server:
        # serve() stops the server when it is left, and raises if a process of it is.
        keyed = {"authorization": f"Bearer {server.control_key}"}
        async with httpx.AsyncClient(base_url=server.control_url, headers=keyed, timeout=60) as control:
            episode = (await control.post("/episodes", json={"task": {"instruction": "t"}})).json()
        text_came = anyio.Event()

        async def follow() -> None:
            content = body(messages=[{"role": "user", "content": "go on and on"}], stream=True)
            async with httpx.AsyncClient(headers=auth(episode), timeout=60) as client:
                try:
                    async with client.stream("POST", url(episode), json=content) as response:
                        async for line in response.aiter_lines():
                            lines.append(line)
                            if '"content":"' in line and '"content":""' not in line:
                                text_came.set()
                except httpx.TransportError:
                    pass

        tasks.start_soon(follow)
        with anyio.fail_after(60):
            await text_came.wait()
    assert "data: [DONE]" not in lines
    chunks = [json.loads(line[6:]) for line in lines if line.startswith('data: {"id"')]
    seen = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert seen
    async with staged(tiny_model, tmp_path / "data") as stage:
        shown = await stage.get(episode)
        assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
        [turn] = (await stage.get(episode, "/turns"))["turns"]
        assert turn["finish_reason"] == "abort"
        assert turn["reply"]["content"].startswith(seen)
        assert np.isfinite(turn["logprobs"]).all()
