"""Invariant 1, end to end: what the engine sampled is what the samples hold and what it is fed next."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import numpy as np
import pytest
from gate_support import Prompted, Said, Stage

pytestmark = pytest.mark.anyio

TURNS = 20


def split_legally(ids: list[int], decode: dict[int, bytes], pick: random.Random) -> list[int]:
    """Another tokenization of the same bytes: tokens cut into smaller tokens that encoding would have joined."""
    by_bytes = {text: token for token, text in decode.items()}
    out: list[int] = []
    for token in ids:
        text = decode[token]
        cuts = [cut for cut in range(1, len(text)) if text[:cut] in by_bytes and text[cut:] in by_bytes]
        if cuts:
            cut = pick.choice(cuts)
            out += [by_bytes[text[:cut]], by_bytes[text[cut:]]]
        else:
            out.append(token)
    return out


async def test_twenty_turns_of_non_canonical_tokens_are_kept_and_fed_back_exactly(
    stage: Stage, token_bytes: dict[int, bytes]
) -> None:
    pick = random.Random(7)
    end = stage.encode("<|im_end|>")
    said: list[list[int]] = []

    async def answer(call: Prompted) -> AsyncIterator[Said | Exception]:
        text = f"I import collections, step {len(said)}: return the default value of the filename"
        canonical = stage.encode(text)
        ids = split_legally(canonical, token_bytes, pick) + end
        assert ids[:-1] != canonical, "the split must be one that encoding would undo"
        said.append(ids)
        yield Said(ids[:5])
        yield Said(ids[5:], "stop")

    stage.engine.answers = [answer]
    episode = await stage.episode()
    messages: list[dict[str, object]] = [{"role": "user", "content": "go"}]
    async with stage.agent(episode) as agent:
        for turn in range(TURNS):
            if turn % 2:
                stream = await agent.chat.completions.create(model="m", messages=messages, stream=True)  # type: ignore[call-overload]
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            else:
                reply = await agent.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
                text = reply.choices[0].message.content
            assert text.startswith(f"I import collections, step {turn}")
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"more {turn}"}]
    exported = await stage.get(episode, "/samples")
    [sample] = exported["samples"]
    assert exported["untrained"] == []
    ids = np.array(sample["input_ids"])
    spans = sample["turn_spans"]
    assert [ids[span["start"] : span["end"]].tolist() for span in spans] == said
    # Every prompt the engine saw is, to the last id, the sample up to that completion.
    for span, call in zip(spans, stage.engine.calls, strict=True):
        assert call.input_ids.tolist() == ids[: span["start"]].tolist()
    assert exported["stats"]["rerendered_tokens"] == 0
    assert exported["stats"]["breaks"] == {}
    assert sum(sample["loss_mask"]) == sum(len(ids) for ids in said)
