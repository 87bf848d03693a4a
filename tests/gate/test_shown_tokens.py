"""A client that renders itself gets the ids and logprobs that are recorded, when it asks for them."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from gate_support import Stage, says, staged

pytestmark = pytest.mark.anyio
ASKS = {"return_token_ids": True}
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


async def recorded(stage: Stage, episode: dict[str, str]) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt ids, sampled ids and logprobs of each turn, from the export."""
    [row] = (await stage.get(episode, "/samples"))["samples"]
    return [
        (
            row["input_ids"][: span["start"]],
            row["input_ids"][span["start"] : span["end"]],
            row["logprobs"][span["start"] : span["end"]],
        )
        for span in row["turn_spans"]
    ]


async def test_ids_and_logprobs_are_those_of_the_record(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        stop = stage.encode("<|im_end|>")
        stage.engine.answers = [
            says([*stage.encode("one two"), *stop]),
            says([*stage.encode("three"), *stop]),
        ]
        episode = await stage.episode()
        async with stage.agent(episode) as agent:
            first = await agent.chat.completions.create(
                model="m", messages=HELLO, logprobs=True, top_logprobs=0, extra_body=ASKS
            )
            said = first.choices[0].message.content
            more = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
            stream = await agent.chat.completions.create(model="m", messages=more, stream=True, extra_body=ASKS)  # type: ignore[call-overload]
            chunks = [chunk.model_dump() async for chunk in stream]
        turns = await recorded(stage, episode)
    choice = first.choices[0].model_dump()
    entries = choice["logprobs"]["content"]
    assert first.model_dump()["prompt_token_ids"] == turns[0][0]
    assert choice["token_ids"] == turns[0][1]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in turns[0][1]]
    assert [entry["logprob"] for entry in entries] == turns[0][2]
    *before, last = chunks
    assert all("token_ids" not in one["choices"][0] and "prompt_token_ids" not in one for one in before)
    assert (last["prompt_token_ids"], last["choices"][0]["token_ids"]) == turns[1][:2]
    assert last["choices"][0]["logprobs"] is None


async def test_nobody_else_gets_them(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        async with stage.agent(episode) as agent:
            plain = (await agent.chat.completions.create(model="m", messages=HELLO)).model_dump()
            assert "prompt_token_ids" not in plain
            assert "token_ids" not in plain["choices"][0]
            for asked, body in (({"logprobs": True}, {}), ({"logprobs": True, "top_logprobs": 2}, ASKS)):
                with pytest.raises(openai.BadRequestError, match="return_token_ids"):
                    await agent.chat.completions.create(model="m", messages=HELLO, extra_body=body, **asked)
            with pytest.raises(openai.BadRequestError, match="return_token_ids"):
                await agent.chat.completions.create(model="m", messages=HELLO, extra_body={"return_token_ids": 3})
