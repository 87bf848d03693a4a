"""OpenEnv with ``--engine trainer``: the pending call is in the observation, ``generate`` completes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openenv_support import REPLY_S, base_url, wired

from control_support import Door
from training_support import TrainerServer, trainer_server

pytestmark = pytest.mark.anyio

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "submit", "arguments": {"answer": "42"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerServer]:
    with trainer_server(tiny_model, tmp_path_factory.mktemp("data"), sandboxes={"kind": "local"}) as running:
        # Imports openenv-core, which takes longer on a busy machine than a socket is silent for.
        httpx.get(f"{base_url(door(running))}/schema", timeout=2 * REPLY_S).raise_for_status()
        yield running


def door(server: TrainerServer) -> Door:
    return Door(server.url, server.key, "", server.model)


def sampled(server: TrainerServer, text: str) -> dict[str, Any]:
    ids = server.encode(text + END)
    return {"type": "generate", "completion_ids": ids, "logprobs": [-0.5] * len(ids)}


async def test_a_launched_agent_is_played_by_its_pending_calls(server: TrainerServer) -> None:
    async with wired(door(server)) as wire:
        pending = (await wire.reset(agent="plain-loop"))["pending"]
        assert "six times seven" in server.decode(pending["input_ids"])
        look = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo found"}}\n</tool_call>'
        data = await wire.step(**sampled(server, look), weight_version="step-4")
        follow = data["observation"]["pending"]
        assert not data["done"]
        assert follow["call_id"] != pending["call_id"]
        assert "found" in server.decode(follow["input_ids"])
        assert (await wire.step(type="wait", timeout_s=5))["observation"]["pending"] == follow
        data = await wire.step(**sampled(server, CALL), call_id=follow["call_id"])
        assert (data["done"], data["reward"]) == (True, 1.0)
        assert "pending" not in data["observation"]


@pytest.mark.slow
async def test_a_text_completes_a_call_too(server: TrainerServer) -> None:
    async with wired(door(server)) as wire:
        await wire.reset(agent="plain-loop")
        data = await wire.step(type="generate", text=CALL)
        assert (data["done"], data["reward"]) == (True, 1.0)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"completion_ids": [1, 2], "logprobs": [-0.5]}, "one for each"),
        ({"completion_ids": [1]}, "logprobs"),
        ({"text": "x", "prompt": "and a call of its own"}, "prompt"),
        ({"text": "x", "call_id": "call_x"}, "call_x"),
    ],
)
async def test_what_cannot_complete_it_is_an_error_and_the_call_goes_on_waiting(
    server: TrainerServer, action: dict[str, Any], words: str
) -> None:
    async with wired(door(server)) as wire:
        await wire.reset(agent="plain-loop")
        told = await wire.ask({"type": "step", "data": {"type": "generate", **action}})
        assert told["type"] == "error"
        assert words in str(told["data"])
        assert (await wire.step(type="generate", text=CALL))["done"]


async def test_without_a_waiting_call_there_is_nothing_to_complete(server: TrainerServer) -> None:
    async with wired(door(server)) as wire:
        observation = await wire.reset()
        assert "pending" not in observation
        told = await wire.ask({"type": "step", "data": {"type": "generate", "text": "x"}})
        assert (told["type"], told["data"]["type"]) == ("error", "conflict")
