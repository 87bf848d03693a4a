"""What a Responses body says, field by field; what is refused, and that nothing else is."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import mutated

from turnstile.models import Message, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import BodyContext, ModelRequest, WireTool
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.dialects.responses import ResponsesDialect
from turnstile_server.gate.dialects.responses.items import sealed
from turnstile_server.gate.dialects.responses.tools import custom_input

Wire = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}}
RUN: Wire = {"type": "function", "name": "run", "description": "Runs.", "strict": True, "parameters": SCHEMA}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


def parse(**fields: Any) -> ModelRequest:
    return ResponsesDialect().parse(json.dumps({"model": "m", "input": "go", **fields}).encode())


def read(*items: Any) -> tuple[Message, ...]:
    """The messages of these items, before a last one that ends every input here."""
    *messages, last = parse(input=[*items, {"role": "user", "content": "end"}]).messages
    assert last == Message("user", "end")
    return tuple(messages)


def function_call(**fields: Any) -> Wire:
    return {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}", **fields}


def custom_call(**fields: Any) -> Wire:
    return {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "p", **fields}


def reasoning(**fields: Any) -> Wire:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def summary(*texts: str) -> list[Wire]:
    return [{"type": "summary_text", "text": text} for text in texts]


def asked_for(*calls: ToolCall) -> Message:
    return Message("assistant", tool_calls=calls)


ITEMS: dict[str, tuple[Wire, list[Message]]] = {
    "text": ({"type": "message", "role": "user", "content": "a"}, [Message("user", "a")]),
    "no type": ({"role": "user", "content": "a"}, [Message("user", "a")]),
    "parts": (
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        [Message("user", "ab")],
    ),
    "system": ({"role": "system", "content": "a"}, [Message("system", "a")]),
    "developer": ({"role": "developer", "content": "a"}, [Message("developer", "a")]),
    "assistant": (
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        },
        [Message("assistant", "a")],
    ),
    "assistant's input_text (Qwen Code)": (
        {"role": "assistant", "content": [{"type": "input_text", "text": "a"}]},
        [Message("assistant", "a")],
    ),
    "refusal": (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        [Message("assistant", "no")],
    ),
    "no content": ({"role": "assistant", "content": None}, [Message("assistant")]),
    "call": (
        function_call(id="fc_1", arguments='{"code": "x"}', status="completed", caller=None, namespace=None),
        [asked_for(ToolCall("run", '{"code": "x"}', "c"))],
    ),
    "call in a namespace": (
        function_call(namespace="mcp__probe"),
        [asked_for(ToolCall("mcp__probe__run", "{}", "c"))],
    ),
    "call with an object": (
        function_call(arguments={"code": "x"}),
        [asked_for(ToolCall("run", '{"code":"x"}', "c"))],
    ),
    "call without arguments": (function_call(arguments=None), [asked_for(ToolCall("run", "{}", "c"))]),
    "call without an id": (function_call(call_id=None), [asked_for(ToolCall("run", "{}"))]),
    "custom call": (custom_call(input='"p"'), [asked_for(ToolCall("patch", r'{"input":"\"p\""}', "c"))]),
    "custom call in a namespace": (
        custom_call(namespace="n"),
        [asked_for(ToolCall("n__patch", '{"input":"p"}', "c"))],
    ),
    "output": (
        {"type": "function_call_output", "call_id": "c", "output": "a"},
        [Message("tool", "a", tool_call_id="c")],
    ),
    "output of parts": (
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
        [Message("tool", "a", tool_call_id="c")],
    ),
    "custom output": (
        {"type": "custom_tool_call_output", "call_id": "c", "output": "a"},
        [Message("tool", "a", tool_call_id="c")],
    ),
    "our reasoning": (
        reasoning(summary=summary("short"), encrypted_content=sealed("why ✓")),
        [Message("assistant", reasoning="why ✓")],
    ),
    "reasoning as content": (
        reasoning(summary=summary("b"), content=[{"type": "reasoning_text", "text": "a"}]),
        [Message("assistant", reasoning="a")],
    ),
    "reasoning as summary": (
        reasoning(summary=summary("a", "b"), content=None, encrypted_content=None),
        [Message("assistant", reasoning="ab")],
    ),
    "reasoning of another server": (
        reasoning(summary=summary("a"), encrypted_content="gAAAAABo"),
        [Message("assistant", reasoning="a")],
    ),
    "our reasoning, cut": (
        reasoning(summary=summary("a"), encrypted_content=sealed("why")[:-1]),
        [Message("assistant", reasoning="a")],
    ),
    "reasoning that says nothing": (reasoning(encrypted_content="gAAAAABo"), []),
}


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_is_read_as(name: str) -> None:
    item, messages = ITEMS[name]
    assert read(item) == tuple(messages)


def test_instructions_are_the_first_system_message_and_others_stay_where_they_are() -> None:
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    assert parse(instructions="i", input=[*items, {"role": "system", "content": "s"}]).messages == (
        Message("system", "i"),
        Message("developer", "d"),
        Message("user", "u"),
        Message("system", "s"),
    )
    assert parse(instructions="").messages == (Message("user", "go"),)


def test_reasoning_at_the_very_end_is_what_is_left_of_a_cut_stream() -> None:
    items = [{"role": "user", "content": "go"}, reasoning(summary=summary("half"))]
    assert parse(input=items).messages == (Message("user", "go"),)
    assert read(*items)[-1] == Message("assistant", reasoning="half")


# Tools


def test_tools_have_the_envelope_that_every_dialect_gives_them() -> None:
    bare = {"type": "function", "name": "bare", "description": None, "parameters": None}
    run, plain = parse(tools=[RUN, bare]).tools
    envelope = {"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": SCHEMA}}
    assert json.dumps(run.spec) == json.dumps(envelope)
    assert (run.name, plain.spec) == ("run", {"type": "function", "function": {"name": "bare"}})


def test_strict_makes_no_other_tool() -> None:
    assert parse(tools=[RUN]).tools == parse(tools=[{**RUN, "strict": None}]).tools


def test_a_namespace_is_joined_to_the_names_of_its_tools() -> None:
    inner = [RUN, {"type": "custom", "name": "patch"}, {"type": "web_search"}]
    asked = parse(tools=[RUN, {"type": "namespace", "name": "mcp__probe", "description": "d", "tools": inner}])
    assert [tool.name for tool in asked.tools] == ["run", "mcp__probe__run", "mcp__probe__patch"]
    assert [tool.spec["function"]["name"] for tool in asked.tools] == [tool.name for tool in asked.tools]
    assert asked.wire_tools == {
        "mcp__probe__run": WireTool("run", "mcp__probe"),
        "mcp__probe__patch": WireTool("patch", "mcp__probe", custom=True),
    }


def test_a_custom_tool_is_a_function_of_one_text_that_is_told_its_grammar() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    [tool] = parse(tools=[{"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}]).tools
    function = tool.spec["function"]
    assert list(function) == ["name", "description", "parameters"]
    assert function["description"] == "Edits.\n\nThe input must match this lark grammar:\nstart: WORD"
    assert function["parameters"]["required"] == ["input"]
    assert "description" not in parse(tools=[{"type": "custom", "name": "p"}]).tools[0].spec["function"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"input": "p\\n"}', "p\n"),
        ('{"input": 1}', '{"input": 1}'),
        ('{"input": "p", "more": 1}', '{"input": "p", "more": 1}'),
        ('{"text": "p"}', '{"text": "p"}'),
        ('{"input": "\\ud800"}', '{"input": "\\ud800"}'),
    ],
)
def test_a_custom_call_shows_its_input_or_all_that_was_written(arguments: str, shown: str) -> None:
    assert custom_input(arguments) == shown


def test_hosted_tools_are_not_offered_and_are_recorded() -> None:
    hosted = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "local_shell"}]
    asked = parse(tools=[*hosted, RUN])
    assert [tool.name for tool in asked.tools] == ["run"]
    assert asked.asked == {"hosted_tools": ["local_shell", "mcp", "web_search"]}
    assert parse(tools=[RUN]).asked == {}


# Options


def test_what_says_how_to_sample_is_recorded_and_what_names_the_caller_is_not() -> None:
    about_sampling = {
        "temperature": 0.2,
        "top_p": 0.9,
        "max_output_tokens": 7,
        "reasoning": {"effort": "high", "summary": "auto"},
        "parallel_tool_calls": False,
        "truncation": "auto",
        "text": {"verbosity": "low"},
        "tool_choice": "auto",
    }
    about_the_caller = {
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"turn": "1"},
        "metadata": {"k": "v"},
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "flex",
        "stream_options": {"include_obfuscation": False},
    }
    call = parse(
        **about_sampling, **about_the_caller, previous_response_id=None, background=False, conversation=None
    )
    assert call.asked == about_sampling
    assert (call.max_tokens, call.parse_calls, call.json_schema, call.stream) == (7, True, None, False)


def test_the_format_of_the_text_is_a_schema() -> None:
    wanted = {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}
    assert json.loads(parse(text={"format": wanted}).json_schema or "") == SCHEMA
    assert parse(text={"format": {"type": "json_object"}}).json_schema == '{"type":"object"}'
    assert parse(text={"format": {"type": "text"}}).json_schema is None


def test_tools_that_are_forbidden_are_offered_and_their_calls_are_text() -> None:
    call = parse(tools=[RUN], tool_choice="none")
    assert (len(call.tools), call.parse_calls) == (1, False)


REFUSED: dict[str, tuple[Wire, str]] = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "previous_response_id.*whole history in input"),
    "conversation": ({"conversation": {"id": "c"}}, "conversation.*whole history"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt.*instructions or input"),
    "background": ({"background": True}, "background.*stream it"),
    "item_reference": ({"input": [{"type": "item_reference", "id": "i"}]}, r"input\[0\].*send the item itself"),
    "reference without a type": ({"input": [{"id": "i"}]}, r"input\[0\].*send the item itself"),
    "nothing": ({"input": []}, "at least one item"),
    "null": ({"input": None}, "at least one item"),
    "number": ({"input": 7}, "input must be a string or an array of items, not number"),
    "item no object": ({"input": ["a"]}, r"input\[0\] must be an object, not string"),
    "role": ({"input": [{"role": "robot", "content": ""}]}, r"input\[0\].role must be one of.*'robot'"),
    "image": (
        {"input": [{"role": "user", "content": [IMAGE]}]},
        r"input\[0\].content\[0\]: .*text only.*here: image",
    ),
    "image of a tool": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]},
        r"input\[0\].output\[0\]: .*here: image",
    ),
    "file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "here: document"),
    "hosted call": ({"input": [{"type": "web_search_call", "id": "w"}]}, r"input\[0\].*'web_search_call'"),
    "shell call": ({"input": [{"type": "local_shell_call", "id": "w"}]}, r"input\[0\].*'local_shell_call'"),
    "call without a name": ({"input": [function_call(name=None)]}, r"input\[0\].name is missing"),
    "input no text": ({"input": [custom_call(input=1)]}, r"input\[0\].input must be a string"),
    "summary": (
        {"input": [reasoning(summary=[{"type": "image"}])]},
        r"input\[0\].summary\[0\] must be of type summary_text",
    ),
    "any of no tools": ({"tool_choice": "required"}, "a call of a tool, which is not offered"),
    "a tool not offered": (
        {"tools": [RUN], "tool_choice": {"type": "function", "name": "no"}},
        "a call of no, which",
    ),
    "a hosted tool": ({"tools": [RUN], "tool_choice": {"type": "web_search"}}, "tool_choice .* is not accepted"),
    "allowed": ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "only what it may call"),
    "tool twice": ({"tools": [RUN, RUN]}, r"tools\[1\].*'run'.*twice"),
    "name taken by a namespace": (
        {
            "tools": [
                {**RUN, "name": "n__run"},
                {"type": "namespace", "name": "n", "description": "", "tools": [RUN]},
            ]
        },
        r"tools\[1\].tools\[0\].*'n__run'.*twice",
    ),
    "tool of Chat Completions": (
        {"tools": [{"type": "function", "function": RUN}]},
        r"tools\[0\].name is missing",
    ),
    "tool without a type": ({"tools": [{"name": "x"}]}, r"tools\[0\].type must be a string"),
    "parameters": ({"tools": [{**RUN, "parameters": "x"}]}, r"tools\[0\].parameters must be an object"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "logprobs"),
    "top_logprobs": ({"top_logprobs": 3}, "logprobs"),
    "logit_bias": ({"logit_bias": {"5": 1}}, "logit_bias"),
    "format": ({"text": {"format": {"type": "grammar"}}}, "text.format.type 'grammar'"),
    "schema": ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema must be an object"),
    "instructions": ({"instructions": [{"role": "user"}]}, "instructions must be a string, not array"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens.*above 0"),
    "stream": ({"stream": "yes"}, "stream must be true or false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_body_that_cannot_be_served_is_refused_by_the_name_of_its_field(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message):
        parse(**fields)


# Any body

VALID: Wire = {
    "model": "m",
    "instructions": "i",
    "input": [
        *(item for item, _ in ITEMS.values()),
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
    ],
    "tools": [
        RUN,
        {"type": "namespace", "name": "n", "description": "d", "tools": [RUN, {"type": "custom", "name": "p"}]},
        {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low"},
    "max_output_tokens": 5,
    "stream": True,
    "store": False,
    "top_logprobs": 0,
}


def parsed(body: bytes, before: ParseCache | None = None) -> ModelRequest | str:
    try:
        return ResponsesDialect().parse(body, BodyContext(before))
    except InvalidRequest as refused:
        return refused.message


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@pytest.mark.slow
@given(_json, st.dictionaries(st.sampled_from(sorted(VALID)), _json))
def test_any_json_is_a_call_or_is_refused(value: Any, fields: Wire) -> None:
    assert parsed(json.dumps(value).encode())
    assert parsed(json.dumps({**VALID, **fields}).encode())


@pytest.mark.slow
def test_any_change_of_a_body_is_a_call_or_is_refused_also_with_a_known_history() -> None:
    pick = random.Random(5)
    before = ParseCache()
    served = 0
    for _ in range(2000):
        body = json.dumps(mutated(pick, VALID)).encode()
        found = parsed(body)
        assert parsed(body, before) == found
        served += isinstance(found, ModelRequest)
    assert 200 < served < 1900


def test_a_body_nested_too_deeply_to_be_repeated_is_refused() -> None:
    for where in (b'"metadata":%s', b'"text":{"format":{"type":"json_schema","schema":%s}}', b'"tools":[%s]'):
        deep = where % (b'{"type":"x","a":' * 400 + b"1" + b"}" * 400)
        assert "nested " in str(parsed(b'{"input":"go",%s}' % deep))
    arguments = b'{"type":"function_call","name":"f","arguments":%s}' % (b'{"a":' * 400 + b"1" + b"}" * 400)
    assert "arguments is nested too deeply" in str(parsed(b'{"input":[%s]}' % arguments))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([function_call(arguments={"n": 1})], [function_call(arguments={"n": 1.0})]),
        ([function_call(arguments={"n": 1})], [function_call(arguments={"n": True})]),
        ([reasoning(summary=summary("a"))], [reasoning(summary=summary("b"))]),
        ([reasoning(summary=summary("a"))], [reasoning(summary=summary("a"), encrypted_content=sealed("b"))]),
        ([function_call()], [function_call(namespace="n")]),
    ],
    ids=["number of another type", "true for one", "summary", "reasoning", "namespace"],
)
def test_a_known_history_of_items_changes_nothing(first: list[Wire], then: list[Wire]) -> None:
    end = {"role": "user", "content": "end"}
    before = ParseCache()
    bodies = [json.dumps({"input": items}).encode() for items in ([*first, end], [*then, end], [*first, end, end])]
    for body in bodies:
        assert parsed(body, before) == parsed(body)


def test_a_history_of_items_that_comes_again_gives_the_same_objects() -> None:
    items: list[Wire] = [{"role": "user", "content": "a"}, reasoning(summary=summary("r")), function_call()]
    before = ParseCache()
    first = ResponsesDialect().parse(json.dumps({"input": items}).encode(), BodyContext(before))
    then = ResponsesDialect().parse(
        json.dumps({"input": [*items, {"role": "user", "content": "b"}], "instructions": "i"}).encode(),
        BodyContext(before),
    )
    assert [ours is theirs for ours, theirs in zip(first.messages, then.messages[1:], strict=False)] == [True] * 3


def test_a_forced_call_is_recorded_and_passed_on() -> None:
    for choice, forced in (("required", ""), ({"type": "function", "name": "run"}, "run")):
        call = parse(tools=[RUN], tool_choice=choice)
        assert (call.forced_call, call.parse_calls, call.asked["tool_choice"]) == (forced, True, choice)
