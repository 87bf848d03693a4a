"""A huge call is refused before it is tokenized, in the caller's words, and leaves other episodes' calls alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from conversation import in_flight
from gate_support import Stage, says, staged

from turnstile.models import Message, Tool
from turnstile_server.gate import token_answerer
from turnstile_server.rendering import encoder, repeat_encoder, token_floor
from turnstile_server.rendering.protocol import Rendered
from turnstile_server.rendering.reply_parser import TagReplyParser
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.rendering.token_floor import TokenFloor

pytestmark = pytest.mark.anyio

CONTEXT = 2_000
HUGE = "The quick brown fox jumps over the lazy dog. " * 4_000
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": HUGE}]}),
    "responses": ("/v1/responses", {"input": HUGE}),
    "anthropic": ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": HUGE}]}),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": HUGE}]}]}),
}


async def post(episode: dict[str, Any], path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as client:
        headers = {"authorization": f"Bearer {episode['episode_key']}"}
        return await client.post(f"{episode['model_url']}{path}", json=body, headers=headers)


def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters that are tokenized from now on."""
    chars: list[int] = []
    ids_of = repeat_encoder.ids_of

    def noted(tokenizer: Any, text: str) -> Any:
        chars.append(len(text))
        return ids_of(tokenizer, text)

    monkeypatch.setattr(repeat_encoder, "ids_of", noted)
    return chars


@pytest.mark.parametrize("route", ROUTES)
async def test_a_huge_prompt_is_the_context_error_of_the_dialect_and_is_not_tokenized(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    path, body = ROUTES[route]
    async with staged(tiny_model, tmp_path, context_length=CONTEXT) as stage:
        episode = await stage.episode()
        chars = tokenized(monkeypatch)
        huge = await post(episode, path, body)
        assert sum(chars) == 0
        # A prompt that is too long by its tokens, counted.
        long = await post(episode, path, json.loads(json.dumps(body).replace(HUGE, HUGE[:5_000])))
        assert sum(chars) > 0
        assert stage.engine.calls == []
    assert huge.status_code == long.status_code == 400
    said = [json.dumps(answer.json()["error"]) for answer in (huge, long)]
    shapes = [answer.json()["error"].keys() for answer in (huge, long)]
    assert shapes[0] == shapes[1]
    words = "prompt is too long" if route == "anthropic" else "context_length_exceeded"
    assert all(words in one for one in said), said


async def test_a_prompt_that_just_fits_is_sampled_however_many_bytes_a_token_has(
    tiny_model: Path, tmp_path: Path
) -> None:
    """64 `#` are one token of this vocabulary: the text has far more than four bytes per token."""
    async with staged(tiny_model, tmp_path, context_length=CONTEXT) as stage:
        episode = await stage.episode()
        stage.engine.answers = [says(stage.encode("ok<|im_end|>"))]
        most = 0
        for count in (1_900, 2_100):
            answer = await post(
                episode,
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": ("#" * 64 + "\n") * (count // 2)}]},
            )
            assert answer.status_code == (200 if count < CONTEXT else 400)
            most = max(most, len(stage.engine.calls[-1].input_ids))
        assert CONTEXT - 150 < most < CONTEXT


async def test_a_huge_continuation_is_refused_and_the_conversation_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path, context_length=CONTEXT) as stage:
        episode = await stage.episode()
        stage.engine.answers = [says(stage.encode("ok<|im_end|>"))]
        async with stage.agent(episode) as agent:
            history: list[Any] = [{"role": "user", "content": "Hello"}]
            await agent.chat.completions.create(model="m", messages=history)
            history.append({"role": "assistant", "content": "ok"})
            with pytest.raises(openai.BadRequestError) as raised:
                await agent.chat.completions.create(
                    model="m", messages=[*history, {"role": "user", "content": HUGE}]
                )
            assert raised.value.code == "context_length_exceeded"
            await agent.chat.completions.create(
                model="m", messages=[*history, {"role": "user", "content": "short"}]
            )
        turns = (await stage.get(episode, "/turns"))["turns"]
        assert [turn["parent_id"] for turn in turns] == [None, turns[0]["turn_id"]]


async def test_the_count_of_a_huge_prompt_is_an_estimate_above_the_context(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tiny_model, tmp_path, context_length=CONTEXT) as stage:
        chars = tokenized(monkeypatch)
        answer = await post(await stage.episode(), "/v1/messages/count_tokens", ROUTES["anthropic"][1])
        assert sum(chars) == 0
        exact = len(stage.encode(HUGE))
    assert exact * 0.8 < answer.json()["input_tokens"] <= exact * 1.01


async def test_a_huge_prompt_does_not_keep_the_threads_of_long_ones(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many huge prompts there are, a long prompt of another episode is rendered meanwhile."""
    render, go_on, huge = TemplateRenderer.render, threading.Event(), threading.Semaphore(0)

    def slow(self: TemplateRenderer, messages: Sequence[Message], tools: Sequence[Tool], **most: Any) -> Rendered:
        if len(messages[0].content) > 4_000:
            huge.release()
            assert go_on.wait(120)
        return render(self, messages, tools, **most)

    monkeypatch.setattr(TemplateRenderer, "render", slow)
    gate = {"inline_render_chars": 100, "huge_prompt_chars": 4_000, "render_threads": 1}

    async def ask(stage: Stage, episode: dict[str, Any], text: str) -> None:
        body = {"messages": [{"role": "user", "content": text}]}
        assert (await post(episode, "/v1/chat/completions", body)).status_code == 200

    async with staged(tiny_model, tmp_path, gate=gate) as stage:
        stage.engine.answers = [says(stage.encode("ok<|im_end|>"))]
        episodes = [await stage.episode() for _ in range(2)]
        async with anyio.create_task_group() as tasks:
            for index in range(3):
                tasks.start_soon(ask, stage, episodes[0], f"{index}" + "long " * 1_000)
            await anyio.to_thread.run_sync(huge.acquire)
            try:
                await ask(stage, episodes[1], "long " * 200)
            finally:
                go_on.set()


async def test_a_tool_that_is_nested_too_deeply_to_be_measured_is_rendered_in_a_thread(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as fifty characters, and was rendered on the event loop: a description of megabytes stopped the
    server for 0.8 s."""
    render, threads = TemplateRenderer.render, list[threading.Thread]()

    def noted(self: TemplateRenderer, messages: Sequence[Message], tools: Sequence[Tool], **most: Any) -> Rendered:
        threads.append(threading.current_thread())
        return render(self, messages, tools, **most)

    monkeypatch.setattr(TemplateRenderer, "render", noted)
    nested: dict[str, Any] = {}
    for _ in range(300):
        nested = {"properties": nested}
    function = {"name": "t", "description": "long " * 5_000, "parameters": nested}
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": function}],
    }
    async with staged(tiny_model, tmp_path) as stage:
        stage.engine.answers = [says(stage.encode("ok<|im_end|>"))]
        answer = await post(await stage.episode(), "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert threads
    assert threading.main_thread() not in threads


async def test_an_episode_with_many_huge_prompts_keeps_another_one_waiting_for_one_of_them(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, first, order = TemplateRenderer.render, threading.Event(), list[str]()
    go_on = threading.Event()

    def slow(self: TemplateRenderer, messages: Sequence[Message], tools: Sequence[Tool], **most: Any) -> Rendered:
        order.append(messages[0].content[:5])
        first.set()
        assert go_on.wait(120)
        return render(self, messages, tools, **most)

    monkeypatch.setattr(TemplateRenderer, "render", slow)
    gate = {"inline_render_chars": 100, "huge_prompt_chars": 200, "huge_prompt_threads": 1}

    async def ask(stage: Stage, episode: dict[str, Any], text: str) -> None:
        body = {"messages": [{"role": "user", "content": text + "long " * 100}]}
        assert (await post(episode, "/v1/chat/completions", body)).status_code == 200

    async with staged(tiny_model, tmp_path, gate=gate) as stage:
        stage.engine.answers = [says(stage.encode("ok<|im_end|>"))]
        greedy, other = [await stage.episode() for _ in range(2)]
        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(ask, stage, greedy, f"many{index}")
            await anyio.to_thread.run_sync(first.wait)
            await in_flight(stage, 4)
            tasks.start_soon(ask, stage, other, "other")
            await in_flight(stage, 5)
            await anyio.wait_all_tasks_blocked()
            go_on.set()
    assert order.index("other") == 1, order


async def test_a_huge_prompt_whose_caller_hung_up_leaves_its_thread(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, read = TokenFloor._without_repeats, list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def slow(self: TokenFloor, piece: str) -> Any:
        read.append(piece[:99])
        begun.set()
        assert go_on.wait(120)
        return pieces(self, piece)

    monkeypatch.setattr(TokenFloor, "_without_repeats", slow)
    monkeypatch.setattr(token_floor, "PIECE_CHARS", 1_000)
    monkeypatch.setattr(encoder, "SURE_BYTES", 0)
    gate = {"inline_render_chars": 100, "huge_prompt_chars": 200, "huge_prompt_threads": 1}
    body = {"messages": [{"role": "user", "content": "unwanted " * 3_000}]}
    async with staged(tiny_model, tmp_path, gate=gate, context_length=30_000) as stage:
        stage.engine.answers = [says(stage.encode("ok<|im_end|>"))]
        gone, other = [await stage.episode() for _ in range(2)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, gone, "/v1/chat/completions", body)
            await anyio.to_thread.run_sync(begun.wait)
            tasks.cancel_scope.cancel()
        await in_flight(stage, 0)
        await anyio.wait_all_tasks_blocked()
        chars = tokenized(monkeypatch)
        go_on.set()
        body = {"messages": [{"role": "user", "content": "wanted " * 300}]}
        assert (await post(other, "/v1/chat/completions", body)).status_code == 200
    assert sum("unwanted" in piece for piece in read) == 1
    assert max(chars) < 9_000


async def test_a_long_name_of_a_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        body = {"model": "m" * 1_025, "messages": [{"role": "user", "content": "Hello"}]}
        answer = await post(episode, "/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "model has 1025 characters" in answer.text


@pytest.mark.parametrize("where", ["tool", "arguments"])
async def test_one_large_value_is_refused_before_a_template_writes_it(
    tiny_model: Path, tmp_path: Path, where: str
) -> None:
    large = "x" * 5_000
    call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": json.dumps({"a": large})}}
    user = {"role": "user", "content": "Hello"}
    body: dict[str, Any] = {"messages": [user, {"role": "assistant", "content": "", "tool_calls": [call]}, user]}
    if where == "tool":
        body = {
            "messages": [user],
            "tools": [{"type": "function", "function": {"name": "t", "description": large}}],
        }
    async with staged(tiny_model, tmp_path, gate={"max_value_bytes": 4_000}) as stage:
        answer = await post(await stage.episode(), "/v1/chat/completions", body)
        assert stage.engine.calls == []
    assert answer.status_code == 400
    assert "the most is 4000" in answer.text


async def test_a_long_reply_is_parsed_in_slices_to_the_same_turn(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, fed = TagReplyParser.feed, list[int]()

    def noted(self: TagReplyParser, ids: Any) -> Any:
        fed.append(len(ids))
        return feed(self, ids)

    monkeypatch.setattr(TagReplyParser, "feed", noted)
    replies: list[Any] = []
    async with staged(tiny_model, tmp_path) as stage:
        stage.engine.answers = [says(stage.encode("<think>\nhm 语言\n</think>\n\nIt is 🙂 done.<|im_end|>"))]
        for most in (token_answerer.PARSED_IDS, 3):
            monkeypatch.setattr(token_answerer, "PARSED_IDS", most)
            fed.clear()
            episode = await stage.episode()
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            answer = (await post(episode, "/v1/chat/completions", body)).json()
            turn = (await stage.get(episode, "/turns"))["turns"][0]
            replies.append((answer["choices"], turn["reply"], turn["completion_ids"]))
            assert max(fed) <= most
        assert len(fed) > 3
    assert replies[0] == replies[1]
