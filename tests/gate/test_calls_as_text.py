"""A client that keeps the calls of its model as text (smolagents): which tokens the model is fed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conversation import TOOL, call_text, raw, reply_ids, url
from gate_support import Stage, says, staged

from turnstile_server.rendering.factory import create_renderer
from turnstile_server.settings import RenderingSettings

pytestmark = pytest.mark.anyio
GO = {"role": "user", "content": "go"}


def kept(message: dict[str, Any]) -> dict[str, Any]:
    """A reply as smolagents keeps it."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            },
        }
        for call in message["tool_calls"]
    ]
    said = "" if message["content"] is None else message["content"].strip() + "\n"
    return {"role": "assistant", "content": f"{said}Calling tools:\n{calls}"}


async def play(stage: Stage, texts: list[str]) -> dict[str, Any]:
    """A run of such a client; its export."""
    stage.engine.answers = [says(reply_ids(stage, text)) for text in texts]
    episode = await stage.episode()
    messages = [GO]
    async with raw(episode) as http:
        for _ in texts:
            response = await http.post(url(episode), json={"model": "m", "messages": messages, "tools": [TOOL]})
            assert response.status_code == 200, response.text
            message = response.json()["choices"][0]["message"]
            if message.get("tool_calls"):
                messages += [kept(message), {"role": "user", "content": "Observation:\nnothing"}]
    exported: dict[str, Any] = await stage.get(episode, "/samples")
    return exported


async def test_it_is_fed_its_own_tokens_and_the_result_as_it_was_sent(stage: Stage) -> None:
    texts = [call_text('it\'s "x"'), f"I look.\n{call_text('ls')}", "Done."]
    exported = await play(stage, texts)
    assert (exported["stats"]["breaks"], exported["stats"]["cosmetic"]) == ({}, {"calls_as_text": 2})
    [row] = exported["samples"]
    assert sum(row["loss_mask"]) == exported["stats"]["sampled_tokens"]
    known: list[int] = []
    for call, text in zip(stage.engine.calls, texts, strict=True):
        ids = call.input_ids.tolist()
        assert ids[: len(known)] == known
        if known:
            said = "\n<|im_start|>user\nObservation:\nnothing<|im_end|>\n<|im_start|>assistant\n"
            assert ids[len(known) :] == stage.encode(said)
        known = [*ids, *reply_ids(stage, text)]


@pytest.mark.slow
async def test_where_the_template_cannot_go_on_it_is_rendered_as_it_was_sent(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The template's own rule about thinking: the conversation is rendered anew, without calls that have no
    results."""
    async with staged(tiny_model, tmp_path, rendering={"thinking_history": "template"}) as stage:
        exported = await play(stage, [f"<think>\nWhy?\n</think>\n\n{call_text('ls')}", "Done."])
        assert exported["stats"]["breaks"] == {"thinking_stripped": 1}
        ids = stage.engine.calls[1].input_ids
    text = create_renderer(tiny_model, RenderingSettings()).decode(ids)
    assert "Calling tools:\n[{'id': 'call_" in text
    assert "<tool_call>" not in text.partition("<|im_start|>user")[2]
