"""An agent that writes the time into its system prompt, end to end: one conversation, trained whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_backends import FAKE_AGENT, fake_backends, result
from gate_support import Prompted, Said, Stage, staged

from turnstile_server.agents.registry import AgentRegistry

pytestmark = pytest.mark.anyio

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
CALLS = 4


async def play(stage: Stage, episode: dict[str, Any]) -> dict[str, Any]:
    """Four calls of an agent with a clock, the last without tools; the exported samples."""

    async def answer(_: Prompted) -> AsyncIterator[Said | Exception]:
        yield Said(stage.encode(f"Reply {len(stage.engine.calls)}.<|im_end|>"), "stop")

    stage.engine.answers = [answer]
    history: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    async with stage.agent(episode) as agent:
        for number in range(CALLS):
            clock = {"role": "system", "content": f"You are a careful agent with a clock. It is 10:0{number}."}
            tools = {"tools": [BASH]} if number < CALLS - 1 else {}
            got = await agent.chat.completions.create(model="m", messages=[clock, *history], **tools)  # type: ignore[call-overload]
            history += [
                {"role": "assistant", "content": got.choices[0].message.content},
                {"role": "user", "content": f"more {number}"},
            ]
    exported: dict[str, Any] = await stage.get(episode, "/samples")
    return exported


async def test_a_clock_costs_new_prompts_that_are_counted_and_no_reply_is_lost(stage: Stage) -> None:
    exported = await play(stage, await stage.episode())
    stats = exported["stats"]
    assert [sample["kind"] for sample in exported["samples"]] == ["main"] * CALLS
    assert (stats["breaks"], exported["untrained"]) == ({"system_changed": CALLS - 1}, [])
    assert stats["trained_tokens"] == stats["sampled_tokens"] > 0
    prompts = [len(call.input_ids) for call in stage.engine.calls]
    assert stats["rerendered_tokens"] == sum(prompts[1:])


async def test_a_clock_that_the_agents_spec_names_costs_nothing(tiny_model: Path, tmp_path: Path) -> None:
    spec = FAKE_AGENT.model_copy(update={"volatile": (r"\d{2}:\d{2}",)})
    fakes = fake_backends(tmp_path / "installs")
    agents = AgentRegistry({spec.name: spec})
    async with staged(tiny_model, tmp_path / "data", work=replace(fakes.backends, agents=agents)) as stage:
        episode = await stage.episode(agent=spec.name)
        process = await fakes.provider.agent()
        exported = await play(stage, {**episode, "episode_key": process.command.env["KEY"]})
        process.end(result())
    stats = exported["stats"]
    # The last call offers no tools: another offer is another prompt.
    assert (stats["roots"], stats["breaks"]) == (2, {"tools_changed": 1})
    assert stats["cosmetic"] == {"system_volatile": CALLS - 2}
    assert [sample["kind"] for sample in exported["samples"]] == ["main", "main"]
    assert stats["trained_tokens"] == stats["sampled_tokens"]
