"""Completions of prompts that the client rendered itself: ids in, ids out, on exact paths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from conversation import auth, raw, reply_ids
from gate_support import Stage, says, staged
from one_dialogue import CLIENTS, Result
from test_one_dialogue import REPLIES

from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import RenderedPrompt
from turnstile_server.gate.dialects.completions import DEFAULT_MAX_TOKENS, parse_completion
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import TextDelta
from turnstile_server.settings import RenderingSettings

pytestmark = pytest.mark.anyio
ASKS = {"return_token_ids": True}
SAMPLE_FIELDS = ("input_ids", "loss_mask", "logprobs", "kind", "finish_reason", "status")


def address(episode: dict[str, Any]) -> str:
    return f"{episode['model_url']}/v1/completions"


async def chat(stage: Stage) -> dict[str, Any]:
    """A dialogue with thinking, calls and results over Chat Completions; its export."""
    stage.engine.answers = [says(reply_ids(stage, text)) for text in REPLIES]
    episode = await stage.episode()
    client = CLIENTS[0]()
    async with raw(episode) as http:
        client.user("What do the files hold?")
        for _ in range(2):
            client.results([Result(one, "bash", "a.txt") for one in await client.ask(http, episode["model_url"])])
        for _ in range(3):
            await client.ask(http, episode["model_url"])
            client.user("And now?")
    exported: dict[str, Any] = await stage.get(episode, "/samples")
    return exported


async def rendered(stage: Stage, row: dict[str, Any], cuts: Sequence[int] = ()) -> dict[str, Any]:
    """The same conversation, its prompts sent as ids; ``cuts``: pieces that each completion begins with. Its
    export."""
    ids = row["input_ids"]
    calls = []
    for span in row["turn_spans"]:
        ends = [span["start"] + cut for cut in cuts if span["start"] + cut < span["end"]] + [span["end"]]
        starts = [span["start"], *ends[:-1]]
        calls += [(start, end, end == span["end"]) for start, end in zip(starts, ends, strict=True)]
    stage.engine.answers = [says(ids[a:b], finish="stop" if last else "length") for a, b, last in calls]
    episode = await stage.episode()
    async with raw(episode) as http:
        for start, end, _ in calls:
            body = {"model": "m", "prompt": ids[:start], "max_tokens": end - start, **ASKS}
            response = await http.post(address(episode), json=body)
            assert response.status_code == 200, response.text
            [choice] = response.json()["choices"]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids[:start], ids[start:end])
    exported: dict[str, Any] = await stage.get(episode, "/samples")
    for what in ("", "/turns", "/tree", "/breaks", "/spans"):
        await stage.get(episode, what)
    return exported


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3)])
async def test_a_conversation_in_ids_gives_the_samples_of_the_chat_path(
    stage: Stage, cuts: tuple[int, ...]
) -> None:
    [row] = (await chat(stage))["samples"]
    exported = await rendered(stage, row, cuts)
    [same] = exported["samples"]
    assert (exported["stats"]["breaks"], exported["stats"]["roots"]) == ({}, 1)
    assert exported["stats"]["rerendered_tokens"] == 0
    for name in SAMPLE_FIELDS:
        assert same[name] == row[name], name


@pytest.mark.parametrize("named", [{}, {"name": "prompt"}])
@pytest.mark.parametrize("ids", [[5], []])
async def test_ids_go_on_from_a_turn_of_another_dialect_but_messages_never_from_ids(
    stage: Stage, named: dict[str, str], ids: list[int]
) -> None:
    stage.engine.answers = [says(reply_ids(stage, "Hello."))]
    episode = await stage.episode()
    async with raw(episode) as http:
        chat_url = f"{episode['model_url']}/v1/chat/completions"
        messages = [{"role": "user", "content": "hi"}]
        first = (await http.post(chat_url, json={"messages": messages, **ASKS})).json()
        known = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
        assert (await http.post(address(episode), json={"prompt": [*known, *ids]})).status_code == 200
        turns = (await stage.get(episode, "/turns"))["turns"]
        fed = [{"role": "user", "content": said["content"], **named} for said in turns[1]["new_messages"]]
        messages += [{"role": "assistant", "content": "Hello."}, *fed, {"role": "assistant", "content": "Hello."}]
        await http.post(chat_url, json={"messages": [*messages, {"role": "user", "content": "on"}]})
    turns = (await stage.get(episode, "/turns"))["turns"]
    assert [turn["dialect"] for turn in turns] == ["chat", "completions", "chat"]
    first_id = turns[0]["turn_id"]
    # Without ids between them both replies come back as one message, which is not the first one.
    assert [turn["parent_id"] for turn in turns] == [None, first_id, first_id if ids else None]
    assert turns[1]["context_ids"] == ids


async def test_the_official_client_reads_the_reply_and_its_stream(stage: Stage) -> None:
    said = "<think>\nWhy?\n</think>\n\n two  \n"
    ids = reply_ids(stage, said)
    stage.engine.answers = [says(ids), says(ids[:2], ids[2:])]
    episode = await stage.episode()
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    async with stage.agent(episode) as agent:
        whole = await agent.completions.create(
            model="m", prompt=text, max_tokens=99, logprobs=1, stop=["never"], extra_body=ASKS
        )
        stream = await agent.completions.create(
            model="m", prompt=[text], max_tokens=99, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        with pytest.raises(openai.BadRequestError, match="several prompts"):
            await agent.completions.create(model="m", prompt=["a", "b"])
    [turn, _] = (await stage.get(episode, "/turns"))["turns"]
    choice = whole.choices[0]
    assert (choice.text, choice.finish_reason) == (said, "stop")  # nothing is trimmed, no thinking taken away
    shown = choice.model_dump()
    assert shown["prompt_token_ids"] == turn["context_ids"] == stage.encode(text)
    assert shown["token_ids"] == turn["completion_ids"] == ids
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{index}" for index in ids]
    assert choice.logprobs.token_logprobs == turn["logprobs"]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == said
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids)
    assert [message["content"] for message in turn["new_messages"]] == [text]
    assert (turn["reply"]["content"], turn["reply"]["reasoning"], turn["dialect"]) == (said, None, "completions")


async def test_a_reply_that_is_tokenized_again_is_a_break_with_its_place(stage: Stage) -> None:
    stage.engine.answers = [says([1, 2, 3])]
    episode = await stage.episode()
    async with raw(episode) as http:
        for prompt in ([7, 8], [7, 8, 1, 2, 4, 9]):
            assert (await http.post(address(episode), json={"prompt": prompt})).status_code == 200
    samples = await stage.get(episode, "/samples")
    assert samples["stats"]["breaks"] == {"reply_edited": 1}
    assert (samples["stats"]["rerendered_tokens"], samples["stats"]["roots"]) == (6, 2)
    [entry] = (await stage.get(episode, "/breaks"))["breaks"]
    assert entry["at"]["path"] == "ids[4]"


async def test_a_marked_retry_is_replayed_and_the_same_prompt_again_is_a_sibling(stage: Stage) -> None:
    stage.engine.answers = [says([1, 2]), says([3])]
    episode = await stage.episode()
    async with raw(episode) as http:
        replies = [
            (await http.post(address(episode), json={"prompt": [7, 8], **ASKS}, headers={"idempotency-key": key}))
            for key in ("a", "a", "b")
        ]
        assert [one.json()["choices"][0]["token_ids"] for one in replies] == [[1, 2], [1, 2], [3]]
    samples = await stage.get(episode, "/samples")
    assert (samples["stats"]["turns"], samples["stats"]["breaks"]) == (2, {})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt must be a text or an array of token ids"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [[]]}, "prompt is empty"),
        ({"prompt": [1, True]}, r"prompt\[1\] must be a token id, not boolean"),
        ({"prompt": [1, "a"]}, r"prompt\[1\] must be a token id, not string"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"prompt": [[[1]]]}, r"prompt\[0\] must be a token id, not array"),
        ({"prompt": orjson.loads("[" * 1000 + "]" * 1000)}, r"prompt\[0\] must be a token id, not array"),
        ({"n": 2}, "n 2 is not accepted"),
        ({"best_of": 2}, "best_of 2"),
        ({"suffix": "x"}, "suffix 'x'"),
        ({"echo": True}, "echo True"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": 1}, "return_token_ids"),
        ({"logprobs": 5, "return_token_ids": True}, "send 1"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_completion({"prompt": "p", **body} if body and "prompt" not in body else body)


def test_a_request_is_read() -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "stop_token_ids": [], "logprobs": None}
    read = parse_completion({"model": "m", "prompt": [[1, 2]], "temperature": 0.5, **neutral})
    assert (read.prompt, read.max_tokens) == (RenderedPrompt((1, 2)), DEFAULT_MAX_TOKENS)
    assert dict(read.asked) == {"temperature": 0.5}
    assert parse_completion({"prompt": "a", "add_special_tokens": False}).prompt == RenderedPrompt(
        "a", begin=False
    )
    assert parse_completion({"prompt": "a", "logprobs": 0, **ASKS}).wire == {"logprobs": True}


async def test_bounds_hold_and_ids_are_no_more_than_the_context(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(
        tiny_model, tmp_path, context_length=2048, gate={"max_body_values": 100, "max_refusals": 6}
    ) as stage:
        episode = await stage.episode()
        async with raw(episode) as http:

            async def code(prompt: Any) -> str:
                response = await http.post(address(episode), json={"prompt": prompt})
                return "" if response.status_code == 200 else str(response.json()["error"]["code"])

            assert await code([1] * 2000) == ""  # more than max_body_values, which are for other bodies
            assert await code([1] * 2048) == "context_length_exceeded"
            assert await code([1] * 4000) == "context_length_exceeded"
            assert await code("word " * 9000) == "context_length_exceeded"
            assert await code([-1]) == await code([10**6]) == await code([10**30]) == "invalid_request"
            assert await code([1]) == "episode_ended"  # gate.max_refusals
        async with httpx.AsyncClient(timeout=60) as stranger:
            other = await stage.episode()
            assert (await stranger.post(address(other), json={"prompt": [1]})).status_code == 401
            assert (await stranger.get(address(other), headers=auth(other))).status_code == 405


def test_the_literals_of_a_text_are_control_tokens_and_its_beginning_is_there_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    renderer = create_renderer(tiny_model, RenderingSettings())
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = renderer.encode_prompt(text, begin=True)
    assert renderer.decode(ids) == text
    control = {token.text: index for index, token in renderer.token_bytes.control.items()}  # type: ignore[union-attr]
    marks = [name for index in ids.tolist() for name, its in control.items() if index == its]
    assert marks == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    begins = with_beginning(tiny_model, tmp_path / "begins")
    first = control["<|im_start|>"]
    assert begins.encode_prompt("hi", begin=True).tolist()[0] == first
    assert begins.encode_prompt("hi", begin=False).tolist()[0] != first
    assert begins.encode_prompt("<|im_start|>hi", begin=True).tolist().count(first) == 1


def with_beginning(tiny_model: Path, target: Path) -> Any:
    """The tiny model, whose tokenizer begins each text with a token, as Llama's does."""
    shutil.copytree(tiny_model, target)
    spec = json.loads((target / "tokenizer.json").read_text())
    token = next(one for one in spec["added_tokens"] if one["content"] == "<|im_start|>")
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [token["id"]], "tokens": ["<|im_start|>"]}
        },
    }
    (target / "tokenizer.json").write_text(json.dumps(spec))
    return create_renderer(target, RenderingSettings())


@pytest.mark.parametrize("stop", [(), ("o\n",), ("zzz",)])
def test_a_raw_reply_is_the_same_however_it_comes(tiny_model: Path, stop: tuple[str, ...]) -> None:
    renderer = create_renderer(tiny_model, RenderingSettings())
    text = "\n <think>é🙂</think><|im_start|> two\n  <|im_end|>"
    ids = renderer.encode_completion(text).tolist()
    shown = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    expected = shown[: shown.index("o\n")] if "o\n" in stop else shown
    for size in (1, 2, 5, len(ids)):
        parser = renderer.raw_parser(stop)
        deltas = [delta for at in range(0, len(ids), size) for delta in parser.feed(ids[at : at + size])]
        last, parsed = parser.finish()
        assert "".join(one.text for one in [*deltas, *last] if isinstance(one, TextDelta)) == expected
        assert (parsed.message.content, parsed.message.reasoning) == (expected, None)
        assert parsed.stop_string == ("o\n" if "o\n" in stop else None)
