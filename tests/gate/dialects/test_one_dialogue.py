"""One scripted dialogue through all four dialects: the same canonical messages, and token for token the same
samples."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversation import raw, reply_ids
from gate_support import Stage, says
from one_dialogue import CLIENTS, NAME, Client, Result

pytestmark = pytest.mark.anyio


def tool_call_text(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': NAME, 'arguments': {'command': command}})}\n</tool_call>"


REPLIES = (
    f"<think>\nWhat is there?\n</think>\n\nI look around.\n{tool_call_text('ls')}",
    f"{tool_call_text('cat a.txt')}\n{tool_call_text('cat b.txt')}",
    "<think>\nBoth are read.\n</think>\n\nThey hold <|im_end|-like text and ünïcödé 🙂.",
    "",
    "Nothing more to say.",
)


async def speak(stage: Stage, client: Client) -> dict[str, Any]:
    """The whole dialogue; what the trainer gets of it."""
    stage.engine.answers = [says(reply_ids(stage, text)) for text in REPLIES]
    episode = await stage.episode()
    async with raw(episode) as http:
        client.user("What do the files hold?")
        (listed,) = await client.ask(http, episode["model_url"])
        client.results([Result(listed, NAME, "a.txt\nb.txt")])
        first, second = await client.ask(http, episode["model_url"])
        client.results([Result(first, NAME, ""), Result(second, NAME, '{"b": [1, 2]}')])
        assert await client.ask(http, episode["model_url"]) == []
        client.user("And now?")
        assert await client.ask(http, episode["model_url"]) == []
        client.user("Say something.")
        assert await client.ask(http, episode["model_url"]) == []
    await stage.post(episode, "finish")
    turns = (await stage.get(episode, "/turns"))["turns"]
    samples = await stage.get(episode, "/samples")
    return {"turns": turns, "samples": samples["samples"], "stats": samples["stats"]}


def canonical(messages: list[dict[str, Any]]) -> list[Any]:
    """Without ids, which are each run's own."""
    return [
        (
            message["role"],
            message["content"],
            message["reasoning"],
            [(one["name"], json.loads(one["arguments"])) for one in message["tool_calls"]],
        )
        for message in messages
    ]


async def test_every_dialect_gives_the_same_messages_and_token_identical_samples(stage: Stage) -> None:
    spoken = {made.dialect: await speak(stage, made()) for made in CLIENTS}
    assert set(spoken) == {"chat", "anthropic", "responses", "gemini"}
    for dialect, heard in spoken.items():
        assert [turn["dialect"] for turn in heard["turns"]] == [dialect] * len(REPLIES)
        assert heard["stats"]["breaks"] == {}, dialect
        assert heard["stats"]["trained_tokens"] == heard["stats"]["sampled_tokens"] > 0
        (sample,) = heard["samples"]
        (expected,) = spoken["chat"]["samples"]
        for field in ("input_ids", "loss_mask", "logprobs", "kind", "finish_reason", "status"):
            assert sample[field] == expected[field], (dialect, field)
        for ours, theirs in zip(heard["turns"], spoken["chat"]["turns"], strict=True):
            assert canonical(ours["new_messages"]) == canonical(theirs["new_messages"]), dialect
            assert canonical([ours["reply"]]) == canonical([theirs["reply"]]), dialect
            assert ours["context_ids"] == theirs["context_ids"], dialect


async def test_an_episode_may_change_its_dialect_in_the_middle(stage: Stage) -> None:
    """A conversation that another client carries on is the same path: nothing of the wire is in the tree."""
    stage.engine.answers = [says(reply_ids(stage, text)) for text in ("Hello.", "Again.", "Third.", "Fourth.")]
    episode = await stage.episode()
    said = ["Hello.", "Again.", "Third."]
    async with raw(episode) as http:
        for count, made in enumerate(CLIENTS):
            client = made()
            for text in said[:count]:
                client.user(f"before {text}")
                client.history.append(assistant(client.dialect, text))
            client.user(f"before {(*said, 'Fourth.')[count]}")
            assert await client.ask(http, episode["model_url"]) == []
    turns = (await stage.get(episode, "/turns"))["turns"]
    assert [turn["dialect"] for turn in turns] == ["chat", "anthropic", "responses", "gemini"]
    parents = [None, *(turn["turn_id"] for turn in turns[:-1])]
    assert [turn["parent_id"] for turn in turns] == parents


def assistant(dialect: str, text: str) -> dict[str, Any]:
    if dialect == "gemini":
        return {"role": "model", "parts": [{"text": text}]}
    return {"role": "assistant", "content": text}
