"""An agent that writes the time into its system prompt, end to end: one conversation, trained whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gate_support import Prompted, Said, Stage

from turnstile_server.capture import TokenTree, VolatileText
from turnstile_server.episodes.service import Episodes

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


async def test_a_clock_that_the_agents_spec_names_costs_nothing(stage: Stage) -> None:
    episode = await stage.episode()
    episodes = stage.apps.tools
    assert isinstance(episodes, Episodes)
    session = episodes.open_episode(episode["episode_id"], episode["episode_key"])
    session.tree = TokenTree(VolatileText([r"\d{2}:\d{2}"]))
    exported = await play(stage, episode)
    stats = exported["stats"]
    # The last call offers no tools: another offer is another prompt.
    assert (stats["roots"], stats["breaks"]) == (2, {"tools_changed": 1})
    assert stats["cosmetic"] == {"system_volatile": CALLS - 2}
    assert [sample["kind"] for sample in exported["samples"]] == ["main", "main"]
    assert stats["trained_tokens"] == stats["sampled_tokens"]
