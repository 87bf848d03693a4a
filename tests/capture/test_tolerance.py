"""What an echoed reply may differ in, and what is a real edit: the tolerance table of docs/matching.md."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.turns import make_tool
from turnstile.models import Message, ToolCall
from turnstile_server.capture import compare
from turnstile_server.capture.compare import Comparison, compare_foreign, compare_reply, fill_defaults, json_equal
from turnstile_server.capture.keys import chain

SCHEMA: dict[str, Any] = {
    "properties": {
        "code": {"type": "string"},
        "n": {"type": "integer", "default": 0},
        "o": {"type": "object", "default": {}, "properties": {"deep": {"default": 1}}},
        "list": {"type": "array", "items": {"properties": {"k": {"default": None}}}},
    }
}
SCHEMAS = {"run": SCHEMA}


def said(text: str = "", reasoning: str | None = None, arguments: str | None = None) -> Message:
    calls = (ToolCall("run", arguments, "c1"),) if arguments is not None else ()
    return Message("assistant", text, reasoning=reasoning, tool_calls=calls)


def verdict(stored: Message, incoming: Message) -> tuple[str | None, set[str]]:
    found = compare_reply(stored, incoming, SCHEMAS)
    if found.edited is None:
        assert chain(b"", stored) == chain(b"", incoming), "the key may lose nothing that comparing allows"
    return found.edited, {kind.value for kind in found.cosmetic}


TEXTS: list[tuple[Message, Message, set[str]]] = [
    (said("a"), said("a"), set()),
    (said(" a\n"), said("a"), {"text_trimmed"}),
    (said("a"), said("\ta "), {"text_trimmed"}),
    (said(" \n"), said(""), {"text_trimmed"}),
    (said("a", "r"), said("a"), {"reasoning_dropped"}),
    (said("a", "r"), said("a", ""), {"reasoning_dropped"}),
    (said("a", "r"), said("a", "other"), {"reasoning_changed"}),
    (said("a", "r"), said("a", " r\n"), set()),
    (said("a"), said("a", ""), set()),
    (said("a"), said("a", "invented"), {"reasoning_changed"}),
    (said(" a", "r"), said("a"), {"text_trimmed", "reasoning_dropped"}),
]


@pytest.mark.parametrize(("stored", "incoming", "kinds"), TEXTS)
def test_text_and_reasoning_have_named_tolerances(stored: Message, incoming: Message, kinds: set[str]) -> None:
    assert verdict(stored, incoming) == (None, kinds)


RESPELLED = {"arguments_reserialised"}
FILLED = RESPELLED | {"arguments_defaults_filled"}
STRIPPED = RESPELLED | {"arguments_whitespace_stripped"}
ARGUMENTS: list[tuple[str, str, set[str]]] = [
    ('{"code": "x"}', '{"code": "x"}', set()),
    ('{"code": "x", "n": 1}', '{"n":1,"code":"x"}', RESPELLED),
    ('{"n": 1.0}', '{"n": 1}', RESPELLED),
    ('{"n": 1e2}', '{"n": 100}', RESPELLED),
    ('{"code": "\\u00e9"}', '{"code": "é"}', RESPELLED),
    ('{"n": -0.0}', '{"n": 0}', RESPELLED),
    ('{"a": 1, "a": 2}', '{"a": 2}', RESPELLED),
    ('{"code": "a  \\nb\\n"}', '{"code": "a\\nb"}', STRIPPED),
    ('{"code": "a"}', '{"code": "a \\n\\n"}', STRIPPED),
    ('{"list": [{"k": 1, "s": "x "}]}', '{"list": [{"k": 1, "s": "x"}]}', STRIPPED),
    ('{"code": "x"}', '{"code": "x", "n": 0}', FILLED),
    ('{"code": "x", "n": 0}', '{"code": "x"}', FILLED),
    ("{}", '{"n": 0, "o": {"deep": 1}}', FILLED),
    ("{}", '{"n": 0, "o": {}}', FILLED),
    ('{"o": {}}', '{"o": {"deep": 1}}', FILLED),
    ('{"list": [{}]}', '{"list": [{"k": null}]}', FILLED),
    ('{"code": "x "}', '{"code": "x", "n": 0}', FILLED | STRIPPED),
    # What no client in JavaScript and no wire of JSON values can carry
    ('{"n": 9007199254740993}', '{"n": 9007199254740992}', RESPELLED),
    ('{"n": 123456789012345678901234567890}', '{"n":1.2345678901234568e+29}', RESPELLED),
    ('{"x": 1e999}', '{"x":null}', RESPELLED),
    ('{"x": NaN}', '{"x":null}', RESPELLED),
    ('{"x": "a\\uD83D"}', '{"x":"a\ufffd"}', RESPELLED),
    ('{"\\udc00": 1}', '{"\ufffd":1}', RESPELLED),
    ('{"x": "\\ud83d\\ude00"}', '{"x":"\U0001f600"}', RESPELLED),
    # What a tool of one free text was told where it was called otherwise
    ('{"patch": "x"}', '{"input":"{\\"patch\\": \\"x\\"}"}', RESPELLED),
]


@pytest.mark.parametrize(("stored", "incoming", "kinds"), ARGUMENTS)
def test_arguments_have_named_tolerances(stored: str, incoming: str, kinds: set[str]) -> None:
    assert verdict(said(arguments=stored), said(arguments=incoming)) == (None, kinds)


MANY = [{"k": index, "s": "x,[{", "t": True} for index in range(4_000)]


def test_arguments_of_many_values_may_be_written_otherwise_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = said(arguments=json.dumps({"a": MANY, "n": 1}))
    slow = [json.dumps({"n": 1, "a": MANY}, indent=1), json.dumps({"a": [*MANY[:-1], {"k": 0}], "n": 1})]
    monkeypatch.setattr(compare, "_compare_json", lambda *_: pytest.fail("every value was compared"))
    assert verdict(stored, said(arguments=slow[0])) == (None, RESPELLED)
    for other in (slow[1], json.dumps({"a": MANY, "n": True}), json.dumps({"a": MANY, "n": float("nan")}), "{"):
        assert verdict(stored, said(arguments=other))[0] == "tool_calls[0].arguments"


def test_a_long_text_in_arguments_has_every_tolerance_whatever_signs_it_has() -> None:
    code = "[{,}]" * 10_000
    stored, incoming = (said(arguments=json.dumps({"code": text})) for text in (code + " \n", code))
    assert verdict(stored, incoming) == (None, STRIPPED)


EDITED: list[tuple[Message, Message, str]] = [
    (said("a"), said("b"), "content"),
    (said("a b"), said("a  b"), "content"),
    (said("a"), said(""), "content"),
    (said("a"), Message("user", "a"), "role"),
    (said(arguments="{}"), said(), "tool_calls"),
    (said(), said(arguments="{}"), "tool_calls"),
    (said(arguments="{}"), Message("assistant", tool_calls=(ToolCall("Run", "{}"),)), "tool_calls[0].name"),
    (
        Message("assistant", tool_calls=(ToolCall("run", "{}"), ToolCall("run", '{"n": 1}'))),
        Message("assistant", tool_calls=(ToolCall("run", "{}"), ToolCall("run", '{"n": 2}'))),
        "tool_calls[1].arguments",
    ),
    (
        Message("assistant", tool_calls=(ToolCall("run", '{"n": 1}'), ToolCall("run", '{"n": 2}'))),
        Message("assistant", tool_calls=(ToolCall("run", '{"n": 2}'), ToolCall("run", '{"n": 1}'))),
        "tool_calls[0].arguments",
    ),
]
VALUES: list[tuple[str, str]] = [
    ('{"n": true}', '{"n": 1}'),
    ('{"n": false}', '{"n": 0}'),
    ('{"n": null}', '{"n": 0}'),
    ('{"n": "1"}', '{"n": 1}'),
    ('{"code": ""}', "{}"),
    ('{"code": " a"}', '{"code": "a"}'),
    ('{"code": "a\\n\\nb"}', '{"code": "a\\nb"}'),
    ('{"code": "a"}', '{"code": "a", "extra": 1}'),
    ('{"n": 1}', "{}"),
    ('{"n": 9007199254740992}', '{"n": 9007199254740994}'),
    ('{"x": "\\ud83d"}', '{"x": "?"}'),
    ("{broken", "{broken "),
    ("{broken", "{}"),
    ("", "{}"),
    ("[1, 2]", "[2, 1]"),
    ("[]", "{}"),
]


@pytest.mark.parametrize(("stored", "incoming", "path"), EDITED)
def test_a_real_edit_is_named_by_its_path(stored: Message, incoming: Message, path: str) -> None:
    assert verdict(stored, incoming) == (path, set())


@pytest.mark.parametrize(("stored", "incoming"), VALUES)
def test_another_value_is_an_edit_in_both_directions(stored: str, incoming: str) -> None:
    for ours, theirs in ((stored, incoming), (incoming, stored)):
        assert verdict(said(arguments=ours), said(arguments=theirs)) == ("tool_calls[0].arguments", set())


def test_arguments_that_are_no_json_are_the_same_only_letter_by_letter() -> None:
    assert verdict(said(arguments="{broken"), said(arguments="{broken")) == (None, set())


HOSTILE: list[tuple[str, str]] = [
    *((f"{'[' * depth}{']' * depth}", f" {'[' * depth}{']' * depth}") for depth in (400, 900, 5_000, 200_000)),
    *(
        ('{"a":' * depth + "1" + "}" * depth, ' {"a":' * depth + "1" + "}" * depth)
        for depth in (400, 900, 200_000)
    ),
    ("9" * 10_000, "9" * 10_000 + " "),
    ('{"n": 1e999999}', '{"n": 1e999998}'),
]


@pytest.mark.parametrize(("stored", "incoming"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_arguments_are_compared_without_a_crash(stored: str, incoming: str) -> None:
    edited, _ = verdict(said(arguments=stored), said(arguments=incoming))
    assert edited in (None, "tool_calls[0].arguments")
    assert verdict(said(arguments=stored), said(arguments=stored)) == (None, set())


def test_lone_surrogates_are_compared_and_hashed() -> None:
    stored = said("\ud800", "\udfff", '{"code": "\\ud800 "}')
    assert verdict(stored, said("\ud800 ", "\udfff", '{"code":"\\ud800"}')) == (
        None,
        {"text_trimmed", "arguments_reserialised", "arguments_whitespace_stripped"},
    )
    assert verdict(stored, said("\ud801", "\udfff", '{"code": "\\ud800 "}'))[0] == "content"


def test_defaults_of_an_unknown_tool_or_a_senseless_schema_fill_nothing() -> None:
    stored, incoming = said(arguments="{}"), said(arguments='{"n": 0}')
    senseless: list[dict[str, Any]] = [
        {},
        {"run": {"properties": None}},
        {"run": {"properties": {"n": 0}}},
        {"run": {"properties": []}},
        {"other": SCHEMA},
    ]
    for schemas in senseless:
        assert compare_reply(stored, incoming, schemas).edited == "tool_calls[0].arguments"


def test_filling_changes_neither_the_value_nor_the_schema() -> None:
    value: dict[str, Any] = {"list": [{}]}
    before = json.dumps(SCHEMA)
    filled = fill_defaults(value, SCHEMA)
    filled["o"]["deep"] = 2
    assert value == {"list": [{}]}
    assert json.dumps(SCHEMA) == before


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.text("ab \n", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abno"), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_filling_defaults_twice_is_filling_them_once(value: Any) -> None:
    once = fill_defaults(value, SCHEMA)
    assert json_equal(fill_defaults(once, SCHEMA), once)


@given(json_values, json_values)
def test_json_equality_is_that_of_canonical_text(left: Any, right: Any) -> None:
    def canonical(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key!r}:{canonical(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(canonical, value)) + "]"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(float(value) + 0.0)  # the integers here are small; −0.0 + 0.0 is 0.0
        return repr(value)

    assert json_equal(left, left)
    assert json_equal(left, right) == (canonical(left) == canonical(right)) == json_equal(right, left)


@given(json_values, st.sampled_from([None, 1]), st.booleans())
def test_any_respelling_of_arguments_is_cosmetic(value: Any, indent: int | None, sort: bool) -> None:
    stored = json.dumps({"value": value})
    incoming = json.dumps({"value": value}, indent=indent, sort_keys=sort, ensure_ascii=not sort)
    edited, kinds = verdict(said(arguments=stored), said(arguments=incoming))
    assert edited is None
    assert kinds <= RESPELLED


messages = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool", "system", "developer"]),
    content=st.sampled_from(["", "a", " a", "b"]),
    reasoning=st.sampled_from([None, "", "r"]),
    tool_calls=st.lists(
        st.builds(
            ToolCall, name=st.sampled_from(["run", "f"]), arguments=st.sampled_from(["{}", "{ }", '{"n":0}'])
        ),
        max_size=2,
    ).map(tuple),
    name=st.sampled_from([None, "", "n"]),
)


@given(messages, messages)
def test_messages_that_compare_as_equal_have_equal_keys(left: Message, right: Message) -> None:
    if left.role == "assistant" and compare_reply(left, right, SCHEMAS).edited is None:
        assert chain(b"", left) == chain(b"", right)
    if compare_foreign(left, right).edited is None:
        assert chain(b"", left) == chain(b"", right)


@given(messages)
def test_a_message_equals_itself(message: Message) -> None:
    assert compare_foreign(message, message) == Comparison()
    if message.role == "assistant":
        assert compare_reply(message, message, {"run": make_tool("run").parameters}) == Comparison()
