"""Conversations of external agents on a staged server, and forks of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from conversation import END
from gate_support import Stage, says

from turnstile.models import SampleSet
from turnstile.models.samples_encoding import decode_forest, decode_samples
from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.protocol import Command, Sandbox
from waiting import wait_until

Episode = dict[str, Any]
Messages = list[dict[str, str]]
FIRST: Messages = [{"role": "system", "content": "You search."}, {"role": "user", "content": "Begin."}]


def speak(stage: Stage) -> None:
    """Every call gets a text of its own."""
    words = [f"reply {number}" for number in "abcdefghijkl"]
    stage.engine.answers = [says([*stage.encode(word), *stage.encode(END)]) for word in words]


async def say(stage: Stage, episode: Episode, messages: Messages, text: str | None = None) -> Messages:
    """One turn: the history with ``text`` and the reply."""
    asked = [*messages, {"role": "user", "content": text}] if text is not None else messages
    async with stage.agent(episode) as agent:
        reply = await agent.chat.completions.create(model="m", messages=asked)  # type: ignore[arg-type]
    return [*asked, {"role": "assistant", "content": reply.choices[0].message.content or ""}]


async def turn_ids(stage: Stage, episode: Episode) -> list[str]:
    return [turn["turn_id"] for turn in (await stage.get(episode, "/turns"))["turns"]]


async def fork(stage: Stage, episode: Episode, **fields: Any) -> list[Episode]:
    answer = await stage.control.post(f"/episodes/{episode['episode_id']}/fork", json=fields)
    assert answer.status_code == 201, answer.text
    children: list[Episode] = answer.json()["episodes"]
    return children


async def refused(stage: Stage, episode: Episode, what: str, **fields: Any) -> tuple[int, str]:
    answer = await stage.control.post(f"/episodes/{episode['episode_id']}/{what}", json=fields)
    return answer.status_code, answer.json()["error"]["message"]


async def samples(stage: Stage, episode: Episode) -> SampleSet:
    path = f"/episodes/{episode['episode_id']}"
    rows = decode_samples((await stage.control.get(f"{path}/samples")).content)
    tree = decode_forest((await stage.control.get(f"{path}/tree")).content).to_samples()
    assert tree.stats == rows.stats
    assert (await stage.get(episode))["stats"] == rows.stats.model_dump()
    for one, other in zip(rows.samples, tree.samples, strict=True):
        assert np.array_equal(one.input_ids, other.input_ids)
        assert np.array_equal(one.loss_mask, other.loss_mask)
    return rows


async def sandbox_of(stage: Stage, episode: Episode) -> Sandbox:
    """The episode's sandbox, as its tools have it."""

    async def runs() -> bool:
        return bool((await stage.get(episode))["status"] == "running")

    await wait_until(runs)
    assert stage.apps.tools is not None
    sandbox = stage.apps.tools.open_tools(episode["episode_id"], episode["episode_key"]).sandbox
    assert sandbox is not None
    return sandbox


async def run(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(Command(("/bin/sh", "-c", script)))
    if result.exit_code != 0:
        raise SandboxFailed(result.stderr.decode())
    return result.stdout.decode()
