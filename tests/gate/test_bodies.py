"""Bodies of model calls: too large ones are refused unparsed, the others are parsed the same anywhere."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
from gate_support import Stage, says, staged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnstile_server.capture.match import CallMatch
from turnstile_server.errors import MAX_MESSAGE_CHARS, InvalidRequest
from turnstile_server.gate.call import IncomingCall
from turnstile_server.gate.dialects.anthropic import AnthropicDialect
from turnstile_server.gate.dialects.chat import ChatDialect
from turnstile_server.gate.dialects.json import MAX_OPTION_BYTES, MAX_STOP_CHARS, read_object
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.gate.turn_builder import Prompter
from turnstile_server.http import json_values
from turnstile_server.http.json_values import count_values
from waiting import wait_until

TRICKY = st.text(st.sampled_from('a,[{}]:"\\\né🙂'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | TRICKY,
    lambda inner: st.lists(inner, min_size=1, max_size=4) | st.dictionaries(TRICKY, inner, min_size=1, max_size=4),
    max_leaves=30,
)
MESSAGES = [{"role": "user", "content": "Hello"}]


def values_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_of, inner))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 18])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES)
def test_values_are_counted_whatever_the_slices(monkeypatch: pytest.MonkeyPatch, size: int, value: Any) -> None:
    monkeypatch.setattr(json_values, "_SLICE_BYTES", size)
    count = values_of(value)
    for data in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert count_values(data.encode(), 10**6) == count
        assert count_values(data.encode(), count - 1) == count


HALVES = st.lists(
    st.sampled_from([r"\ud83d", r"\ude00", r"\uD83D", r"\\", r"\"", r"\n", r"\u00e4", "ud83d", "é", "🙂", "\\"]),
    max_size=9,
).map("".join)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
@given(HALVES)
def test_half_a_surrogate_pair_is_read_as_the_replacement_character(encoding: str, text: str) -> None:
    """The reference is Python's parser, which accepts half a pair."""
    body = f'{{"a":"{text}"}}'
    try:
        expected = json.loads(body)["a"].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    except ValueError:
        with pytest.raises(InvalidRequest):
            read_object(body.encode(encoding))
        return
    assert read_object(body.encode(encoding)) == {"a": expected}


@pytest.mark.parametrize(
    "option", [{"stop": ["x" * (MAX_STOP_CHARS + 1)]}, {"seed": "x" * (MAX_OPTION_BYTES + 1)}]
)
def test_an_option_of_megabytes_is_refused(option: dict[str, Any]) -> None:
    """It would be in the record of every turn."""
    with pytest.raises(InvalidRequest, match=f"{next(iter(option))} (has a string|is larger)"):
        ChatDialect().parse(orjson.dumps({"messages": MESSAGES, **option}))


def test_an_error_does_not_repeat_megabytes_of_a_request() -> None:
    with pytest.raises(InvalidRequest) as raised:
        ChatDialect().parse(orjson.dumps({"messages": MESSAGES, "tool_choice": "x" * 3_000_000}))
    assert len(raised.value.message) <= MAX_MESSAGE_CHARS + 1


# Through the model API

pytestmark = pytest.mark.anyio


async def post(stage: Stage, episode: dict[str, Any], content: bytes, **headers: str) -> httpx.Response:
    headers["authorization"] = f"Bearer {episode['episode_key']}"
    async with httpx.AsyncClient(timeout=120) as client:
        return await client.post(f"{episode['model_url']}/v1/chat/completions", content=content, headers=headers)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(list(range(200)))}}
TOO_LARGE = {
    "max_prompt_bytes": ({"messages": [{"role": "user", "content": "x" * 2_000}]}, 1_024),
    "max_messages": ({"messages": MESSAGES * 11}, 10),
    "max_body_values": ({"messages": MESSAGES, "metadata": list(range(200))}, 150),
    "max_body_values, of arguments": (
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}, *MESSAGES]},
        150,
    ),
}


@pytest.mark.parametrize("case", TOO_LARGE)
async def test_a_body_over_a_limit_is_the_context_error_that_names_it(
    tiny_model: Path, tmp_path: Path, case: str
) -> None:
    setting, (body, limit) = case.partition(",")[0], TOO_LARGE[case]
    async with staged(tiny_model, tmp_path, gate={setting: limit, "inline_body_bytes": 0}) as stage:
        stage.engine.answers = [says(stage.encode("ok<|im_end|>"))]
        episode = await stage.episode()
        answer = await post(stage, episode, orjson.dumps(body))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        said = answer.json()["error"]["message"]
        assert f"gate.{setting}" in said or f"the most is {limit}" in said
        assert stage.engine.calls == []
        assert (await post(stage, episode, orjson.dumps({"messages": MESSAGES}))).status_code == 200


async def test_a_body_that_says_it_is_too_large_is_not_kept_or_parsed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the body was parsed")

    monkeypatch.setattr(ChatDialect, "parse", never)
    async with staged(tiny_model, tmp_path) as stage:
        answer = await post(stage, await stage.episode(), b'{"messages":["' + b" " * 28_000_000 + b'"]}')
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("inline", [0, 1 << 20])
async def test_large_bodies_are_parsed_off_the_event_loop_to_the_same_calls(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    threads: set[bool] = set()
    parse = ChatDialect.parse

    def noted(self: ChatDialect, *arguments: Any) -> Any:
        threads.add(threading.current_thread() is threading.main_thread())
        return parse(self, *arguments)

    monkeypatch.setattr(ChatDialect, "parse", noted)
    async with staged(tiny_model, tmp_path, gate={"inline_body_bytes": inline}) as stage:
        stage.engine.answers = [says(stage.encode("ok<|im_end|>"))]
        episode = await stage.episode()
        history = [*MESSAGES]
        for text in ("one", "two"):
            assert (await post(stage, episode, orjson.dumps({"messages": history}))).status_code == 200
            history += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": text}]
        turns = (await stage.get(episode, "/turns"))["turns"]
    assert threads == {inline > 0}
    assert [turn["parent_id"] for turn in turns] == [None, turns[0]["turn_id"]]


def long_count(chars: int) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "some words " * (chars // 11)}]})


async def counted(episode: dict[str, Any], content: bytes) -> int:
    headers = {"x-api-key": episode["episode_key"]}
    async with httpx.AsyncClient(timeout=120) as client:
        path = f"{episode['model_url']}/v1/messages/count_tokens"
        return (await client.post(path, content=content, headers=headers)).status_code


async def test_bodies_that_come_together_are_read_one_between_two_turns_of_the_event_loop(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, read_in = 0, []
    loop = asyncio.get_running_loop()
    parse, read = AnthropicDialect.parse, CallPipeline._read
    came: list[bytes] = []
    all_came = anyio.Event()

    async def read_together(pipeline: CallPipeline, incoming: IncomingCall) -> bytes:
        came.append(await read(pipeline, incoming))
        body = came[-1]
        if len(came) == 12:
            all_came.set()
        await all_came.wait()
        return body

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    def noted(self: AnthropicDialect, body: bytes, *arguments: Any) -> Any:
        read_in.append(turns)
        return parse(self, body, *arguments)

    monkeypatch.setattr(AnthropicDialect, "parse", noted)
    monkeypatch.setattr(CallPipeline, "_read", read_together)
    async with staged(tiny_model, tmp_path, gate={"render_threads": 12}) as stage:
        episode = await stage.episode()
        turn()
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(counted, episode, long_count(100_000))
    assert len(read_in) == len(set(read_in)) == 12


async def test_few_large_bodies_are_counted_at_once_and_small_ones_do_not_wait_for_them(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, most = 0, 0
    prompt, held = Prompter.prompt, anyio.Event()

    async def noted(self: Prompter, match: CallMatch, *arguments: Any) -> Any:
        nonlocal at_once, most
        if len(match.new_messages[0].content) > 1000:
            at_once += 1
            most = max(most, at_once)
            await held.wait()
            at_once -= 1
        return await prompt(self, match, *arguments)

    monkeypatch.setattr(Prompter, "prompt", noted)
    async with staged(tiny_model, tmp_path, gate={"render_threads": 2}) as stage:
        episode = await stage.episode()
        said: list[int] = []

        async def count() -> None:
            said.append(await counted(episode, long_count(60_000)))

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(count)
            await wait_until(lambda: at_once)
            assert await counted(episode, long_count(100)) == 200
            held.set()
    assert said == [200] * 6
    assert most == 2
