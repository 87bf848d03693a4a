"""The calls that models write, well and badly formed, in every format: read in the one way there is, or text.

``call_battery.json`` has the replies with what is right for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from products import examples
from turnstile.models import ParseNote, ParseStatus, Tool, ToolCall
from turnstile_server.rendering.call_formats.base import MOST_UNREAD
from turnstile_server.rendering.call_formats.registry import installed_formats, named_format
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas
from turnstile_server.rendering.detokenizer import Piece
from turnstile_server.rendering.reply_parser import TagParser, escaped
from turnstile_server.rendering.tags import Tags

BATTERY = json.loads((Path(__file__).parent / "call_battery.json").read_text())
FORMATS = {named.name: named.form for named in installed_formats()}


def tool(name: str, **parameters: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": parameters}
    return Tool(name, {"type": "function", "function": {"name": name, "parameters": schema}})


TEXT = {"type": "string"}
TOOLS = (
    tool("bash", command=TEXT),
    tool("write", v=TEXT, w=TEXT, n={"type": "integer"}, flag={"type": "boolean"}),
)


def read(name: str, parts: list[str], *, ended: bool = True, strict: bool = False) -> TagParser:
    """The reply whose text comes in ``parts``, spelled in ordinary tokens of a vocabulary without tags."""
    tags = Tags(think=("<think>", "</think>"), call_format=named_format(name).form)
    parser = TagParser(tags, ToolSchemas(TOOLS, strict=strict), special=(), thinking=False)
    for part in parts:
        parser.feed([Piece(part)])
    parser.finish(ended=ended)
    return parser


def calls_of(parser: TagParser) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parser.calls]


@pytest.mark.parametrize("case", BATTERY["replies"], ids=[case["id"] for case in BATTERY["replies"]])
def test_a_reply_is_read_in_the_one_way_there_is(case: dict[str, Any]) -> None:
    parser = read(case["format"], [case["text"]], ended=case.get("ended", True))
    shown = "".join(parser.text)
    if case["calls"] is None:
        assert parser.calls == []
        assert shown == case["text"].rstrip(), "all that was sampled is shown"
        assert [status for status in parser.status if status is not ParseStatus.OK]
        return
    assert calls_of(parser) == [(name, arguments) for name, arguments in case["calls"]]
    assert shown == case.get("shown", "")
    assert "".join(parser.reasoning) == case.get("thinking", "".join(parser.reasoning))
    if "own_id" in case:
        assert [call.own_id for call in parser.calls] == [case["own_id"]]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
@pytest.mark.parametrize("case", BATTERY["replies"], ids=[case["id"] for case in BATTERY["replies"]])
def test_however_a_reply_is_cut_it_is_the_same(case: dict[str, Any], data: st.DataObject) -> None:
    text = case["text"]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def seen(parts: list[str]) -> tuple[Any, ...]:
        parser = read(case["format"], parts, ended=case.get("ended", True))
        text, thought = "".join(parser.text), "".join(parser.reasoning)
        return text, thought, parser.calls, parser.status, parser.notes

    assert seen(parts) == seen([text]) == seen(list(text))


@pytest.mark.parametrize(
    ("format_", "text", "notes"),
    [
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}', [ParseNote.END_MISSING]),
        ("hermes", '<tool_call>{"name": "bash", "parameters": {}}</tool_call>', [ParseNote.ARGUMENTS_KEY]),
        ("hermes", '<tool_call>{"name": "bash"}</tool_call>', [ParseNote.ARGUMENTS_MISSING]),
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', [ParseNote.UNDECLARED_TOOL]),
        (
            "hermes",
            '<tool_call>{"name": "bash", "arguments": "{}"}</tool_call>',
            [ParseNote.ARGUMENTS_ENCODED_TWICE],
        ),
        (
            "hermes",
            '<tool_call>{"name": "bash", "arguments": {"command": "a\nb"}}</tool_call>',
            [ParseNote.RAW_CONTROL_CHARACTERS],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=bash><parameter=x>1</parameter></function></tool_call>",
            [ParseNote.UNDECLARED_PARAMETER],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=write><parameter=n>soon</parameter></function></tool_call>",
            [ParseNote.VALUE_UNTYPED],
        ),
        (
            "qwen3_coder",
            "<function=bash><parameter=command>1</parameter></function>",
            [ParseNote.OPENING_MISSING],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=bash><parameter=command>a</parameter>b</parameter></function></tool_call>",
            [ParseNote.END_IN_VALUE],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=bash><parameter=command>a</function></tool_call>",
            [ParseNote.PARAMETER_END_MISSING],
        ),
    ],
)
def test_every_liberty_is_noted_and_none_is_taken_in_strict_reading(
    format_: str, text: str, notes: list[ParseNote]
) -> None:
    faithful = read(format_, [text])
    assert (len(faithful.calls), faithful.notes) == (1, notes)
    strict = read(format_, [text], strict=True)
    if notes[0] in (ParseNote.UNDECLARED_PARAMETER, ParseNote.VALUE_UNTYPED):  # the call is well formed
        assert len(strict.calls) == 1
        return
    assert (strict.calls, "".join(strict.text)) == ([], text)


def test_strict_reading_takes_the_words_that_the_models_own_template_writes() -> None:
    call = "<{0}><function=write><parameter=flag>True</parameter></function></{0}>"
    for name, tag in (("qwen3_coder", "tool_call"), ("seed_oss", "seed:tool_call")):
        parser = read(name, [call.format(tag)], strict=True)
        assert (calls_of(parser), parser.notes) == ([("write", {"flag": True})], [])


def test_a_key_with_white_space_around_it_is_the_parameter() -> None:
    text = "<tool_call>write<arg_key> n </arg_key><arg_value>5</arg_value></tool_call>"
    assert calls_of(read("glm", [text])) == [("write", {"n": 5})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, " 5\n", " 5\n"),
        (TEXT, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "soon", "soon"),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "integer"}, "007", "007"),
        ({"type": "number"}, "1e-07", 1e-07),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "main.py", "main.py"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, "text", "text"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["fast", "slow"]}, "fast", "fast"),
        ({"const": True}, "true", True),
        ({"type": "array"}, "[1, 'q', None]", [1, "q", None]),
        ({"type": "array"}, "[1,", "[1,"),
        ({"type": "array"}, "__import__('os')", "__import__('os')"),
        ({"type": "object"}, '{"k": 1}', {"k": 1}),
        ({"type": "object"}, "{1}", "{1}"),
        ({"items": TEXT}, '["a"]', ["a"]),
        ({"$ref": "#/$defs/count"}, "5", 5),
        ({"$ref": "#/$defs/nothing"}, "5", "5"),
        ({"$ref": "https://elsewhere.invalid/x"}, "5", "5"),
        ({}, "5", "5"),
    ],
)
def test_a_bare_value_is_what_its_schema_takes_else_the_text_as_it_stands(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    root = {"type": "object", "properties": {"v": schema}, "$defs": {"count": {"type": "integer"}}}
    offered = ToolSchemas([Tool("t", {"type": "function", "function": {"name": "t", "parameters": root}})])
    found, _ = offered.valued("t", "v", text)
    assert (type(found), found) == (type(value), value)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.text("<>[]{}|/`\"'\n aftnocl:=;,._｜▁", max_size=60), st.data())
def test_no_text_is_lost_and_nothing_raises(name: str, noise: str, data: st.DataObject) -> None:
    """Marks of the format in any order, with noise between: what was no call is shown, all of it."""
    marks = st.sampled_from([*FORMATS[name].marks, *(opening.text for opening in FORMATS[name].openings)])
    text = "".join(data.draw(st.lists(marks | st.just("bash") | st.just(noise) | st.just('{"command": 1}'))))
    parser = read(name, [text], ended=data.draw(st.booleans()))
    for call in parser.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not parser.calls and not FORMATS[name].frames_text:
        shown = "".join((*parser.reasoning, *parser.text))
        assert sorted(shown.replace("\n", "").split()) == sorted(text.replace("\n", "").split())


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_reply_that_repeats_an_opening_without_end_is_read_once(name: str) -> None:
    """No attempt reads the whole rest again: 100,000 characters would take minutes."""
    for opening in (*(each.text for each in FORMATS[name].openings), *FORMATS[name].marks):
        text = f"{opening}bash" * (100_000 // len(opening))
        parser = read(name, [text])
        assert parser.calls == []


@pytest.mark.parametrize("name", sorted({case["format"] for case in BATTERY["replies"]}))
def test_a_reply_that_repeats_a_piece_of_a_call_is_read_once(name: str) -> None:
    for written in {case["text"] for case in BATTERY["replies"] if case["format"] == name}:
        for piece in {written[: len(written) * part // 8] for part in range(2, 8)}:
            read(name, [piece * (50_000 // len(piece))])


@pytest.mark.parametrize(("amiss", "calls"), [(MOST_UNREAD - 1, 1), (MOST_UNREAD, 0)])
def test_behind_many_attempts_that_cannot_be_read_the_rest_is_text(amiss: int, calls: int) -> None:
    right = '{"name": "bash", "arguments": {"command": "ls"}}'
    hermes = "<tool_call>{]</tool_call>" * amiss + f"<tool_call>{right}</tool_call>"
    assert len(read("hermes", [hermes]).calls) == calls
    one = "<|channel|>commentary to=functions.bash<|message|>{}<|call|>"
    assert len(read("harmony", [one.replace("{}", "{]") * amiss + one]).calls) == calls


@pytest.mark.parametrize(("ends", "calls"), [(19, 1), (20, 0)])
def test_a_list_is_tried_up_to_a_number_of_closing_marks(ends: int, calls: int) -> None:
    marks = "<|tool_call_end|>" * ends
    text = f'<|tool_call_start|>[bash(command="{marks}")]<|tool_call_end|>'
    assert len(read("lfm2", [text]).calls) == calls


def test_many_parameters_that_are_not_closed_are_read_once() -> None:
    opened = "".join(f"\n<parameter=p{number}>\nx" for number in range(3000))
    block = f"<tool_call>\n<function=bash>{opened}\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3_coder", [block * 3]).calls == []


@settings(max_examples=examples(100))
@given(TREES, st.text(max_size=6))
def test_arguments_with_lone_surrogates_can_be_sent(tree: Any, more: str) -> None:
    written = json.dumps({"v": [tree, more, "\udfff x"]}, ensure_ascii=False)
    assert json.loads(escaped(written).encode()) == json.loads(written)


def test_a_models_own_id_is_told_apart_from_the_agents() -> None:
    kimi, mistral = named_format("kimi_k2").form, named_format("mistral_v3").form
    assert kimi.own_id(ToolCall("bash", "{}", "call_01"), 3) == "functions.bash:3"
    assert mistral.own_id(ToolCall("bash", "{}", "abcdefghi"), 0) == "abcdefghi"
    made = mistral.own_id(ToolCall("bash", "{}", "call_0123456789"), 0)
    assert made is not None
    assert len(made) == 9
    assert made.isalnum()
    assert made == mistral.own_id(ToolCall("bash", "{}", "call_0123456789"), 5)
