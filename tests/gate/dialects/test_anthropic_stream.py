"""What Anthropic's writer says of a reply: blocks, stop reasons, usage, errors, and the grammar of its stream."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from capture.dialect_law import CALL, HEAD, finished, replies, texts, written
from turnstile.models import Message, ToolCall
from turnstile_server import errors
from turnstile_server.errors import ContextOverflow, TurnstileError
from turnstile_server.gate.dialects.anthropic import AnthropicDialect
from turnstile_server.gate.dialects.base import FinishedReply, Usage
from turnstile_server.gate.dialects.json import strict_arguments
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta

ANTHROPIC = AnthropicDialect()
RUN = ToolCall("run", '{"code":"x"}', "call_0")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_events = st.lists(
    st.builds(TextDelta, texts.filter(bool))
    | st.builds(ReasoningDelta, texts.filter(bool))
    | st.just(CallDelta(0, RUN)),
    max_size=8,
)


def reply(message: Message, **fields: Any) -> FinishedReply:
    return replace(finished(message), **fields)


def whole(answered: FinishedReply) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(ANTHROPIC.reply(answered, CALL))
    return value


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each names its type twice."""
    found = []
    for chunk in data.split(b"\n\n")[:-1]:
        name, value = re.fullmatch(rb"event: (\w+)\ndata: (.*)", chunk, re.DOTALL).groups()  # type: ignore[union-attr]
        event = json.loads(value)
        assert event["type"] == name.decode()
        found.append(event)
    return found


def stream(events: list[Delta], answered: FinishedReply, show: bool = True) -> list[dict[str, Any]]:
    writer = ANTHROPIC.stream(HEAD, replace(CALL, show_reasoning=show))
    return events_of(writer.start() + b"".join(map(writer.delta, events)) + writer.end(answered))


GRAMMAR = re.compile(
    r"message_start ping "
    r"((content_block_start(:text)? (content_block_delta:text_delta )*|"
    r"content_block_start:thinking (content_block_delta:thinking_delta )+content_block_delta:signature_delta |"
    r"content_block_start:tool_use content_block_delta:input_json_delta )content_block_stop )+"
    r"message_delta message_stop "
)


@given(events=_events, show=st.booleans())
def test_every_stream_is_of_the_grammar(events: list[Delta], show: bool) -> None:
    sent = stream(events, finished(Message("assistant")), show)
    names = []
    for event in sent:
        inner = (
            event.get("delta", {}) if event["type"] == "content_block_delta" else event.get("content_block", {})
        )
        names.append(event["type"] + (f":{inner['type']}" if inner else ""))
        if event["type"] != "ping":
            EVENT.validate_python(event)
    assert GRAMMAR.fullmatch(" ".join([*names, ""])), names
    indexes = [event["index"] for event in sent if event["type"] == "content_block_start"]
    assert indexes == list(range(len(indexes)))
    open_block = None
    for event in sent:
        match event["type"]:
            case "content_block_start":
                open_block = event["index"]
            case "content_block_delta" | "content_block_stop":
                assert event["index"] == open_block


@given(reply=replies())
def test_every_reply_is_of_the_packages_types(reply: Message) -> None:
    message = AnthropicMessage.model_validate_json(written(ANTHROPIC, reply), strict=True)
    assert message.id == "msg_reply"


STOPS: dict[str, tuple[Message, dict[str, Any], str]] = {
    "end of turn": (Message("assistant", "a"), {}, "end_turn"),
    "calls": (Message("assistant", "a", tool_calls=(RUN,)), {}, "tool_use"),
    "calls before the agent's own string": (
        Message("assistant", tool_calls=(RUN,)),
        {"stop_string": "STOP"},
        "tool_use",
    ),
    "cut off": (Message("assistant", "a"), {"finish": "length"}, "max_tokens"),
    "cut off behind a call": (Message("assistant", tool_calls=(RUN,)), {"finish": "length"}, "max_tokens"),
    "the agent's own string": (Message("assistant", "a"), {"stop_string": "STOP"}, "stop_sequence"),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_reason_is_the_same_streamed_and_not(name: str) -> None:
    message, fields, reason = STOPS[name]
    answered = reply(message, **fields)
    expected = {"stop_reason": reason, "stop_sequence": "STOP" if reason == "stop_sequence" else None}
    said = whole(answered)
    assert {key: said[key] for key in expected} == expected
    *_, last, _ = stream([], answered)
    assert last["delta"] == expected
    assert last["usage"] == said["usage"]


def test_usage_counts_the_prompt_once() -> None:
    usage = whole(reply(Message("assistant", "a"), usage=Usage(10, 3, cached_tokens=4)))["usage"]
    assert usage == {
        "input_tokens": 6,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 3,
    }
    start, *_ = stream([], finished(Message("assistant")))
    assert start["message"]["usage"]["input_tokens"] == HEAD.prompt_tokens
    assert (start["message"]["stop_reason"], start["message"]["content"]) == (None, [])


def test_a_reply_that_says_nothing_is_one_empty_text_block() -> None:
    assert whole(finished(Message("assistant")))["content"] == [{"type": "text", "text": ""}]
    blocks = [event.get("content_block") for event in stream([], finished(Message("assistant")))]
    assert [block for block in blocks if block] == [{"type": "text", "text": ""}]
    hidden = stream([ReasoningDelta("why")], finished(Message("assistant", reasoning="why")), show=False)
    assert [event["content_block"] for event in hidden if "content_block" in event] == [
        {"type": "text", "text": ""}
    ]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"a" :  1.0, "b": 9007199254740993}', '{"a" :  1.0, "b": 9007199254740993}'),
        ('{"a": "\\ud83d"}', '{"a":"\ufffd"}'),
        ('{"a": "\\ud83d\\ude00"}', '{"a": "\\ud83d\\ude00"}'),
        ('{"a": 1e999}', '{"a":null}'),
        ('{"a": NaN, "b": 123456789012345678901234567890}', '{"a":null,"b":123456789012345678901234567890}'),
    ],
    ids=["as the model wrote it", "half a pair", "a pair", "beyond a double", "not a number"],
)
def test_input_is_what_the_model_wrote_where_every_client_reads_it(arguments: str, sent: str) -> None:
    assert strict_arguments(arguments) == sent
    message = Message("assistant", tool_calls=(ToolCall("run", arguments, "call_0"),))
    assert sent in ANTHROPIC.reply(finished(message), CALL).decode()
    deltas = [event.get("delta", {}) for event in stream([CallDelta(0, message.tool_calls[0])], finished(message))]
    assert [delta["partial_json"] for delta in deltas if "partial_json" in delta] == [sent]


def test_input_nested_deeper_than_parsers_go_is_left_alone() -> None:
    deep = '{"a":' * 1500 + "1" + "}" * 1500
    assert strict_arguments(deep) == deep


# Errors

TYPES = {
    errors.InvalidRequest: "invalid_request_error",
    errors.Unauthorized: "authentication_error",
    errors.NotFound: "not_found_error",
    errors.RequestTimeout: "timeout_error",
    errors.Gone: "invalid_request_error",
    errors.BodyTooLarge: "request_too_large",
    errors.BudgetExhausted: "invalid_request_error",
    errors.TooManyCalls: "rate_limit_error",
    errors.EngineUnavailable: "overloaded_error",
    errors.EngineTimeout: "timeout_error",
    errors.EngineProtocolError: "api_error",
    errors.TurnstileError: "api_error",
}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.type)
def test_an_error_has_anthropics_type_and_ours(kind: type[TurnstileError]) -> None:
    said = json.loads(ANTHROPIC.error(kind("why", detail={"a": 1})))
    details = {"error_code": kind.type, "detail": {"a": 1}}
    error = {"type": TYPES[kind], "message": "why", "details": details}
    assert said == {"type": "error", "error": error, "request_id": None}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.type)
def test_an_error_in_a_stream_says_by_its_type_whether_to_ask_again(kind: type[TurnstileError]) -> None:
    [event] = events_of(ANTHROPIC.stream(HEAD, CALL).error(kind("why")))
    assert (event["error"]["type"] == "overloaded_error") is kind.retryable
    assert event["error"]["details"] == {"error_code": kind.type}


def test_a_full_context_is_told_in_the_words_that_clients_compact_on() -> None:
    error = ContextOverflow("ours", detail={"prompt_tokens": 64, "context_length": 64})
    assert json.loads(ANTHROPIC.error(error))["error"]["message"] == "prompt is too long: 64 tokens > 63 maximum"
    assert json.loads(ANTHROPIC.error(ContextOverflow("ours")))["error"]["message"] == "prompt is too long: ours"
