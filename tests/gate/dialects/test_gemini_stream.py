"""The bytes of Gemini's replies and streams: what readers of either form can rely on at any moment."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.dialect_law import CALL, HEAD, finished, replies, streamed, written
from turnstile.models import Message, ToolCall
from turnstile_server.errors import (
    BudgetExhausted,
    ContextOverflow,
    EngineUnavailable,
    Gone,
    InvalidRequest,
    TooManyCalls,
    TurnstileError,
    Unauthorized,
)
from turnstile_server.gate.dialects.gemini import GeminiDialect
from turnstile_server.rendering.protocol import CallDelta, ReasoningDelta, TextDelta

GEMINI = GeminiDialect()
EVENTS = replace(CALL, wire={"sse": True})
ARRAY = replace(CALL, wire={"sse": False})


def reply(message: Message) -> Any:
    return json.loads(written(GEMINI, message))


def test_a_whole_reply() -> None:
    message = Message("assistant", "text", reasoning="why", tool_calls=(ToolCall("f", '{"a": 1}', "call_0"),))
    signature = reply(message)["candidates"][0]["content"]["parts"][2].pop("thoughtSignature")
    found = reply(message)
    assert found["candidates"][0]["content"]["parts"].pop() == {
        "functionCall": {"id": "call_0", "name": "f", "args": {"a": 1}},
        "thoughtSignature": signature,
    }
    assert found == {
        "candidates": [
            {
                "content": {"parts": [{"text": "why", "thought": True}, {"text": "text"}], "role": "model"},
                "index": 0,
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 5,
            "candidatesTokenCount": 3,
            "totalTokenCount": 8,
            "cachedContentTokenCount": 0,
        },
        "modelVersion": "policy",
        "responseId": "gemini-reply",
    }


def test_an_empty_reply_has_a_part() -> None:
    assert reply(Message("assistant"))["candidates"][0]["content"]["parts"] == [{"text": ""}]


def test_a_reply_cut_by_length_says_so() -> None:
    cut = replace(finished(Message("assistant", "a")), finish="length")
    assert json.loads(GEMINI.reply(cut, CALL))["candidates"][0]["finishReason"] == "MAX_TOKENS"
    last = GEMINI.stream(HEAD, EVENTS).end(cut)
    assert json.loads(last.removeprefix(b"data: "))["candidates"][0]["finishReason"] == "MAX_TOKENS"


@pytest.mark.parametrize(
    "arguments",
    [
        '{"n": 12345678901234567890123, "x": 1.50, "y": 1e300}',
        '{ "s" : "a \\" b \\\\" ,\n"t": "\\u00e9 x" }',
        '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
    ],
    ids=["numbers", "strings", "depth"],
)
def test_arguments_leave_as_they_were_written_but_for_spaces_outside_strings(arguments: str) -> None:
    expected = arguments
    for spelled, plain in (("{ ", "{"), (" }", "}"), (" :", ":"), (" ,\n", ","), (": ", ":"), (", ", ",")):
        expected = expected.replace(spelled, plain)
    call = ToolCall("f", arguments, "call_0")
    assert f'"args":{expected}}}'.encode() in written(GEMINI, Message("assistant", tool_calls=(call,)))


@given(message=replies(), piece=st.integers(1, 5))
def test_no_event_holds_what_some_reader_takes_for_the_end_of_a_line(message: Message, piece: int) -> None:
    data = streamed(GEMINI, message, piece, keepalives=True, call=EVENTS).decode()
    lines = [line for line in data.splitlines() if line]
    assert all(line.startswith("data: ") and json.loads(line[6:]) for line in lines)
    assert "".join(data.split("\n")) == "".join(lines)
    assert data.endswith("}\n\n")


@given(message=replies(), piece=st.integers(1, 5))
def test_an_array_is_json_at_any_moment_once_it_is_closed(message: Message, piece: int) -> None:
    writer = GEMINI.stream(HEAD, ARRAY)
    sent = writer.start()
    count = 0
    for event in [ReasoningDelta("r"), TextDelta(message.content or "t"), TextDelta("t" * piece)]:
        assert len(json.loads(sent + b"]")) == count
        sent += writer.delta(event) + writer.keepalive()
        count += 1
    for index, call in enumerate(message.tool_calls):
        sent += writer.delta(CallDelta(index, call))
        count += 1
        assert len(json.loads(sent + b"]")) == count
    assert len(json.loads(sent + writer.end(finished(message)))) == count + 1


def test_an_error_within_an_array_is_its_last_element() -> None:
    writer = GEMINI.stream(HEAD, ARRAY)
    sent = writer.start() + writer.delta(TextDelta("t"))
    found = json.loads(sent + writer.error(EngineUnavailable("down")))
    assert [sorted(element) for element in found] == [["candidates", "modelVersion", "responseId"], ["error"]]
    first = GEMINI.stream(HEAD, ARRAY)
    assert json.loads(first.start() + first.error(EngineUnavailable("down")))[0]["error"]["code"] == 503


def test_an_error_within_events_is_bare_json_on_one_line() -> None:
    """``@google/genai`` looks for exactly this."""
    data = GEMINI.stream(HEAD, EVENTS).error(EngineUnavailable("two\nlines"))
    assert list(json.loads(data)) == ["error"]
    assert data.count(b"\n") == 1


STATUSES: list[tuple[TurnstileError, str]] = [
    (InvalidRequest("m"), "INVALID_ARGUMENT"),
    (ContextOverflow("m"), "INVALID_ARGUMENT"),
    (BudgetExhausted("m"), "FAILED_PRECONDITION"),
    (Gone("m"), "FAILED_PRECONDITION"),
    (Unauthorized("m"), "UNAUTHENTICATED"),
    (TooManyCalls("m"), "RESOURCE_EXHAUSTED"),
    (EngineUnavailable("m"), "UNAVAILABLE"),
    (TurnstileError("m"), "INTERNAL"),
]


@pytest.mark.parametrize(("error", "status"), STATUSES, ids=lambda value: getattr(value, "type", value))
def test_an_error_is_a_status_of_google_s_with_our_type_in_it(error: TurnstileError, status: str) -> None:
    found = json.loads(GEMINI.error(error))["error"]
    assert (found["code"], found["status"]) == (error.status, status)
    assert found["details"][0]["metadata"] == {"type": error.type}
    assert found["details"][0]["reason"] == error.type.upper()


def test_an_error_says_when_to_come_back_and_what_else_is_known() -> None:
    found = json.loads(GEMINI.error(TooManyCalls("m", detail={"a": 1}, retry_after_s=1.5)))["error"]
    assert found["details"][0]["metadata"]["detail"] == '{"a":1}'
    assert found["details"][1] == {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "1.5s"}


def test_an_overflow_has_the_words_that_agents_compact_on() -> None:
    """Agents look for "input token count … exceeds the maximum"."""
    message = json.loads(GEMINI.error(ContextOverflow("the prompt has 9 tokens")))["error"]["message"]
    assert message == (
        "The input token count exceeds the maximum number of tokens allowed: the prompt has 9 tokens"
    )
