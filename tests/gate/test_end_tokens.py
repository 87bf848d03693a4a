"""A model with several end tokens, end to end: whichever it samples, the conversation stays one path."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_support import Prompted, Said, staged

from turnstile_server.rendering.vocabulary import load_vocabulary

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
SAID = [
    "<think>\nFirst thought.\n</think>\n\nOne.<|endoftext|>",
    f"<think>\nSecond thought.\n</think>\n\n{CALL}<|endoftext|>",
    "<think>\nA thought that ends early<|endoftext|>",
    "Four.<|im_end|>",
    "<|endoftext|>",
    "Six.<|endoftext|>",
]


@pytest.fixture(scope="module")
def two_ends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with the generation config that Qwen ships: two end tokens."""
    folder = tmp_path_factory.mktemp("model") / "two_ends"
    shutil.copytree(tiny_model, folder)
    ids = {token.text: token.id for token in load_vocabulary(folder).control}
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


async def test_a_turn_that_ends_with_the_second_end_token_is_closed_and_continued(
    two_ends: Path, tmp_path: Path
) -> None:
    async with staged(two_ends, tmp_path) as stage:
        [close], [other] = stage.encode("<|im_end|>"), stage.encode("<|endoftext|>")
        said = [stage.encode(text) for text in SAID]

        async def answer(call: Prompted) -> AsyncIterator[Said | Exception]:
            assert {close, other} <= set(call.sampling.stop_token_ids)
            yield Said(said[len(stage.engine.calls) - 1], "stop")

        stage.engine.answers = [answer]
        episode = await stage.episode()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        async with stage.agent(episode) as agent:
            for _ in SAID:
                got = await agent.chat.completions.create(model="m", messages=messages, tools=[BASH])  # type: ignore[call-overload]
                reply = got.choices[0].message
                # The agent drops the reasoning; the default policy keeps it in the model's context.
                messages.append({"role": "assistant", "content": reply.content})
                if reply.tool_calls:
                    messages[-1]["tool_calls"] = [call.model_dump() for call in reply.tool_calls]
                    messages.append({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "out"})
                else:
                    messages.append({"role": "user", "content": "more"})
        exported = await stage.get(episode, "/samples")
        [sample] = exported["samples"]
        assert (exported["untrained"], exported["stats"]["breaks"]) == ([], {})
        assert (exported["stats"]["roots"], exported["stats"]["rerendered_tokens"]) == (1, 0)
        ids = np.array(sample["input_ids"])
        spans = sample["turn_spans"]
        assert [ids[span["start"] : span["end"]].tolist() for span in spans] == said
        for span, call in zip(spans, stage.engine.calls, strict=True):
            assert call.input_ids.tolist() == ids[: span["start"]].tolist()
        assert sum(sample["loss_mask"]) == sum(map(len, said))
        following = [ids[span["end"] :].tolist() for span in spans[:-1]]
        thought = stage.encode("</think>")
        for text, context in zip(SAID, following, strict=False):
            before = context[: context.index(close)]
            if text.endswith("<|im_end|>"):
                assert before != []  # the new message: its own end token is not written again
            elif "early" in text:
                assert set(thought) <= set(before)
            else:
                assert before == []
