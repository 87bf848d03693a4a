"""What an Anthropic Messages body becomes, and what is refused; any JSON is one or the other."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import replaced

from turnstile.models import Message, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.anthropic import AnthropicDialect
from turnstile_server.gate.dialects.base import BodyContext, ModelRequest
from turnstile_server.gate.dialects.chat import ChatDialect
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.dialects.router import DialectRouter

ANTHROPIC = AnthropicDialect()
GO: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "call_1", "name": "bash", "input": {"command": "ls"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def parse(**fields: Any) -> ModelRequest:
    return ANTHROPIC.parse(json.dumps({"model": "m", "max_tokens": 9, "messages": GO, **fields}).encode())


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def user(*content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content), **more}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def result(content: Any = None, call: str = "call_1", **more: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": call, **more}
    return block if content is None else {**block, "content": content}


def called(arguments: str, call: str = "call_1") -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("bash", arguments, call),))


READ: dict[str, tuple[list[dict[str, Any]], list[Message]]] = {
    "string": ([{"role": "user", "content": "a"}], [Message("user", "a")]),
    "one block": ([user(text("a", **CACHED))], [Message("user", "a")]),
    "blocks are one text": ([user(text("a\n"), text("b"))], [Message("user", "a\nb")]),
    "no blocks": ([user()], [Message("user")]),
    "unknown keys": ([user(text("a", citations=[]), output_config={"effort": "low"})], [Message("user", "a")]),
    "system in the list": (
        [*GO, {"role": "system", "content": [text("s")]}, *GO],
        [Message("user", "go"), Message("system", "s"), Message("user", "go")],
    ),
    "thinking": (
        [assistant({"type": "thinking", "thinking": "why", "signature": "x"}, text("a"))],
        [Message("assistant", "a", reasoning="why")],
    ),
    "redacted thinking": (
        [assistant({"type": "redacted_thinking", "data": "x"}, text("a"))],
        [Message("assistant", "a")],
    ),
    "interleaved": (
        [
            assistant(
                {"type": "thinking", "thinking": "1"}, text("a"), {"type": "thinking", "thinking": "2"}, text("b")
            )
        ],
        [Message("assistant", "ab", reasoning="12")],
    ),
    "tool use": ([assistant({**USE, **CACHED})], [called('{"command":"ls"}')]),
    "tool use without input": ([assistant({"type": "tool_use", "id": "call_1", "name": "bash"})], [called("{}")]),
    "what Claude Code makes of malformed arguments": (
        [assistant({**USE, "input": {"__unparsedToolInput": {"raw": "{", "len": 1}}})],
        [called('{"__unparsedToolInput":{"raw":"{","len":1}}')],
    ),
    "input in Unicode": ([assistant({**USE, "input": {"command": "é\u2028"}})], [called('{"command":"é\u2028"}')]),
    "result as string": ([user(result("r"))], [Message("tool", "r", tool_call_id="call_1")]),
    "result as blocks": (
        [user(result([text("r"), text("s")], is_error=True, **CACHED))],
        [Message("tool", "rs", tool_call_id="call_1")],
    ),
    "no result": ([user(result())], [Message("tool", "", tool_call_id="call_1")]),
    "what a tool search found": (
        [user(result([{"type": "tool_reference", "tool_name": n} for n in ("a", "b")]))],
        [Message("tool", "a\nb\n", tool_call_id="call_1")],
    ),
    "results and text, in wire order": (
        [user(text("x"), text("y"), result("1"), result("2", "call_2"), text("z"))],
        [
            Message("user", "xy"),
            Message("tool", "1", tool_call_id="call_1"),
            Message("tool", "2", tool_call_id="call_2"),
            Message("user", "z"),
        ],
    ),
    "prefill": (
        [*GO, {"role": "assistant", "content": "The"}],
        [Message("user", "go"), Message("assistant", "The")],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_messages_are_read(name: str) -> None:
    wire, messages = READ[name]
    assert list(parse(messages=wire).messages) == messages


SYSTEMS: dict[str, tuple[Any, list[str]]] = {
    "absent": (None, []),
    "empty": ("", []),
    "string": ("s", ["s"]),
    "no blocks": ([], []),
    "one block": ([text("s", **CACHED)], ["s"]),
    "sections": ([text("who", **CACHED), text(""), text("what")], ["who\n\nwhat"]),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_system_is_one_leading_message_whose_blocks_stay_apart(name: str) -> None:
    system, texts = SYSTEMS[name]
    leading = [Message("system", content) for content in texts]
    assert list(parse(system=system).messages) == [*leading, Message("user", "go")]


def test_tools_are_the_canonical_ones_key_by_key() -> None:
    bare = {"name": "noop", "input_schema": {"type": "object"}}
    call = parse(tools=[{**TOOL, "type": "custom", "strict": True, "defer_loading": True, **CACHED}, bare])
    written = [json.dumps(tool.spec) for tool in call.tools]
    function = {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA}
    assert written == [
        json.dumps({"type": "function", "function": function}),
        json.dumps({"type": "function", "function": {"name": "noop", "parameters": {"type": "object"}}}),
    ]


def test_the_same_dialogue_is_the_same_in_chat() -> None:
    ours = parse(
        system="s",
        messages=[
            *GO,
            assistant({"type": "thinking", "thinking": "why", "signature": "x"}, text("a"), USE),
            user(result("r"), text("more")),
        ],
        tools=[TOOL],
    )
    function = {"name": "bash", "arguments": '{"command":"ls"}'}
    theirs = {
        "messages": [
            {"role": "system", "content": "s"},
            *GO,
            {
                "role": "assistant",
                "content": "a",
                "reasoning_content": "why",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "r"},
            {"role": "user", "content": "more"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA},
            }
        ],
    }
    chat = ChatDialect().parse(json.dumps(theirs).encode())
    assert ours.messages == chat.messages
    assert [json.dumps(tool.spec) for tool in ours.tools] == [json.dumps(tool.spec) for tool in chat.tools]


def test_hosted_tools_are_not_offered_and_recorded() -> None:
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "web_fetch_20260318", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_bm25", "name": "tool_search_tool_bm25"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ]
    call = parse(
        tools=[hosted[0], TOOL, *hosted[1:]], mcp_servers=[{"type": "url", "url": "http://x", "name": "s"}]
    )
    assert [tool.name for tool in call.tools] == ["bash"]
    assert call.asked["hosted_tools"] == [*(str(tool["type"]) for tool in hosted), "mcp_server s"]


def test_what_is_obeyed_and_what_is_only_recorded() -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 7,
        "stop_sequences": ["a", "b"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "high"},
    }
    call = parse(stream=True, **asked)
    assert (call.max_tokens, call.stop, call.parse_calls, call.stream) == (7, ("a", "b"), True, True)
    assert call.json_schema is None
    assert call.asked == asked
    assert parse(tool_choice={"type": "none"}).parse_calls is False


def test_a_forced_call_is_recorded_and_passed_on() -> None:
    for choice, forced in (({"type": "any"}, ""), ({"type": "tool", "name": TOOL["name"]}, TOOL["name"])):
        call = parse(tools=[TOOL], tool_choice=choice)
        assert (call.forced_call, call.parse_calls, call.asked["tool_choice"]) == (forced, True, choice)


def test_who_asks_and_what_only_other_servers_read_is_no_part_of_the_retry_identity() -> None:
    ignored = {
        "metadata": {"user_id": "one"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "cache_control": {"type": "ephemeral"},
        "container": None,
        "inference_geo": "eu",
        "diagnostics": {"previous_message_id": "msg_1"},
        "betas": ["x"],
    }
    assert parse(**ignored) == parse()


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "adaptive", "display": "updates"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
    ],
)
def test_thinking_is_shown_to_those_who_ask(thinking: Any, shown: bool) -> None:
    assert parse(thinking=thinking).show_reasoning is shown


@pytest.mark.parametrize("place", ["output_format", "output_config"])
def test_a_format_is_a_schema(place: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    schema = parse(**{place: wanted if place == "output_format" else {"format": wanted}}).json_schema
    assert schema is not None
    assert json.loads(schema) == SCHEMA


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens is missing"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens.*above 0"),
    "no messages": ({"messages": []}, "messages"),
    "messages no array": ({"messages": "go"}, "messages must be an array, not string"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]\.role.*'tool'"),
    "content": ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\]\.content.*not number"),
    "block no object": ({"messages": [user("x")]}, r"messages\[0\]\.content\[0\] must be an object, not string"),
    "text no string": ({"messages": [user({"type": "text", "text": 7})]}, r"messages\[0\]\.content\[0\]\.text"),
    "image": ({"messages": [user(text("x"), IMAGE)]}, r"messages\[0\]\.content\[1\]: .*text only.*here: image"),
    "document": ({"messages": [user({"type": "document"})]}, r"gate\.images = refuse.*here: document"),
    "search result": ({"messages": [user({"type": "search_result"})]}, "'search_result'"),
    "image in a result": (
        {"messages": [user(result([text("x"), IMAGE]))]},
        r"messages\[0\]\.content\[0\]\.content\[1\]: .*here: image",
    ),
    "image in system": ({"system": [IMAGE]}, r"system\[0\].*'image'"),
    "system": ({"system": {"a": 1}}, "system must be .* not object"),
    "tool_use of the user": ({"messages": [user(USE)]}, "'tool_use'.*the user"),
    "tool_result of the assistant": ({"messages": [assistant(result("r"))]}, "'tool_result'.*the assistant"),
    "block of a hosted tool": ({"messages": [assistant({"type": "server_tool_use"})]}, "'server_tool_use'"),
    "call without a name": ({"messages": [assistant({**USE, "name": None})]}, r"content\[0\]\.name is missing"),
    "input no object": (
        {"messages": [assistant({**USE, "input": "{}"})]},
        r"content\[0\]\.input must be an object",
    ),
    "tool without a schema": ({"tools": [{"name": "bash"}]}, r"tools\[0\]\.input_schema"),
    "tool without a name": ({"tools": [{"input_schema": SCHEMA}]}, r"tools\[0\]\.name"),
    "tool twice": ({"tools": [TOOL, TOOL]}, r"tools\[1\].*'bash'.*twice"),
    **{
        f"tool of type {name}": (
            {"tools": [TOOL, {"type": name, "name": "x"}]},
            rf"tools\[1\].*'{name}'.*input_schema",
        )
        for name in (
            "bash_20250124",
            "text_editor_20250728",
            "computer_20251124",
            "memory_20250818",
            "new_20990101",
        )
    },
    "any of no tools": ({"tool_choice": {"type": "any"}}, "a call of a tool, which is not offered"),
    "a tool not offered": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}},
        "a call of no, which",
    ),
    "a tool without a name": (
        {"tools": [TOOL], "tool_choice": {"type": "tool"}},
        "name must be a string, not null",
    ),
    "another choice": ({"tools": [TOOL], "tool_choice": {"type": "most"}}, "tool_choice 'most' is not accepted"),
    "stop_sequences": ({"stop_sequences": "x"}, "stop_sequences must be an array"),
    "stop empty": ({"stop_sequences": [""]}, "stop_sequences"),
    "stop too many": ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17"),
    "thinking": ({"thinking": True}, "thinking must be an object, not boolean"),
    "thinking without a type": ({"thinking": {}}, r"thinking\.type"),
    "stream": ({"stream": "yes"}, "stream must be true or false"),
    "thread": ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread.*whole history"),
    "format": ({"output_config": {"format": {"type": "xml"}}}, r"output_config\.format"),
    "format without a schema": ({"output_format": {"type": "json_schema"}}, r"output_format\.schema"),
    "output_config": ({"output_config": "high"}, "output_config must be an object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_path(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(InvalidRequest) as refused:
        parse(**fields)
    assert re.search(message, refused.value.message), refused.value.message


def test_input_nested_deeper_than_python_writes_is_refused_by_path() -> None:
    deep = b'{"a":' * 1010 + b"1" + b"}" * 1010
    data = json.dumps({"max_tokens": 1, "messages": [assistant({**USE, "input": "DEEP"})]}).encode()
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[0\]\.input is nested too deeply"):
        ANTHROPIC.parse(data.replace(b'"DEEP"', deep))


def test_counting_needs_no_max_tokens() -> None:
    directory = DialectRouter([ChatDialect(), ANTHROPIC])
    body = json.dumps({"model": "m", "messages": GO}).encode()
    counting = directory.find("/v1/messages/count_tokens", b"beta=true", {})
    assert counting is not None
    assert counting.dialect.parse(body, BodyContext(params=counting.params)).messages == (Message("user", "go"),)
    asking = directory.find("/v1/messages", b"beta=true", {})
    assert asking is not None
    with pytest.raises(InvalidRequest, match="max_tokens"):
        asking.dialect.parse(body, BodyContext(params=asking.params))


# Parsed before


def body(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"max_tokens": 9, "messages": messages}).encode()


def use(value: Any) -> dict[str, Any]:
    return assistant({**USE, "input": {"n": value}})


def test_a_history_that_comes_again_gives_the_same_objects_numbers_in_calls_included() -> None:
    before = ParseCache()
    first = ANTHROPIC.parse(body(*GO, use(1), user(result("r"))), BodyContext(before))
    then = ANTHROPIC.parse(body(*GO, use(1), user(result("r")), *GO), BodyContext(before))
    assert [ours is theirs for ours, theirs in zip(first.messages, then.messages, strict=False)] == [True] * 3


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([*GO, use(1)], [*GO, use(1.0)]),
        ([*GO, use(1), *GO], [*GO, use(True), *GO]),
        ([use({"a": 1, "b": 2})], [use({"b": 2, "a": 1})]),
        ([user(text("a"))], [{"role": "user", "content": "a"}]),
        ([user(text("a"), result("r"))], [user(result("r"), text("a"))]),
        ([*GO, user(text("a"))], [*GO, {"role": "system", "content": "a"}]),
    ],
    ids=["number of another type", "true for one", "keys in another order", "list to string", "order", "role"],
)
def test_what_differs_is_parsed(first: list[dict[str, Any]], then: list[dict[str, Any]]) -> None:
    before = ParseCache()
    ANTHROPIC.parse(body(*first), BodyContext(before))
    assert ANTHROPIC.parse(body(*then), BodyContext(before)) == ANTHROPIC.parse(body(*then))


# Any JSON

VALID: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [text("s", **CACHED), text("t")],
    "messages": [
        user(text("u", **CACHED)),
        {"role": "system", "content": "s"},
        assistant({"type": "thinking", "thinking": "r", "signature": "x"}, text("a"), USE),
        user(result([text("t")], is_error=False), text("more")),
    ],
    "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
    "mcp_servers": [{"type": "url", "url": "u", "name": "n"}],
    "tool_choice": {"type": "auto"},
    "stream": False,
    "stop_sequences": ["x"],
    "temperature": 1,
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "u"},
}
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["text", "tool_use", "tool_result", "thinking", "user", "assistant", "system", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "input", "name", "id", "thinking", "schema", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def call_or_refusal(data: bytes) -> None:
    before = ParseCache()
    for memory in (None, before, before):
        try:
            call = ANTHROPIC.parse(data, BodyContext(memory))
        except InvalidRequest:
            continue
        assert call.messages
        assert all(isinstance(json.loads(c.arguments), dict) for m in call.messages for c in m.tool_calls)


@given(seed=st.integers(0, 2**32), strange=st.lists(_json, min_size=1, max_size=3))
def test_a_valid_body_with_anything_in_it_is_a_call_or_a_refusal(seed: int, strange: list[Any]) -> None:
    call_or_refusal(json.dumps(replaced(random.Random(seed), VALID, strange)).encode())


@given(value=_json | st.fixed_dictionaries({"max_tokens": st.just(1), "messages": _json, "tools": _json}))
@example(value={"max_tokens": 1, "messages": [{"role": ["user"], "content": ""}]})
def test_any_json_is_a_call_or_a_refusal(value: Any) -> None:
    call_or_refusal(json.dumps(value).encode())


@given(st.binary(max_size=40))
@example(b'{"max_tokens":1,"messages":' + b"[" * 5000)
@example(
    b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"a","input":{"a":1e999}}]}]}'
)
def test_any_bytes_are_a_call_or_a_refusal(data: bytes) -> None:
    call_or_refusal(data)
