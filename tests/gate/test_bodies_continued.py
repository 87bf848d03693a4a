"""A body that continues an earlier one is read as if it came alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.models import Message, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects import conversations, parse_cache
from turnstile_server.gate.dialects.base import PROMPT, BodyContext, Dialect, ModelRequest
from turnstile_server.gate.dialects.json_lists import (
    continued,
    find_few_items,
    find_items,
    find_list,
    find_many_items,
)
from turnstile_server.gate.dialects.parse_cache import CONVERSATIONS, ParseCache
from turnstile_server.gate.dialects.registry import load_dialects
from turnstile_server.http.json_values import weigh

BY_NAME = {dialect.name: dialect for dialect in load_dialects() if dialect.history != PROMPT}
PARAMS = {"model": "m", "method": "generateContent"}
TEXTS = st.sampled_from(
    ["", "a", '"', "\\", '\\"', "}]", '},{"role":', "é🙂", "\ud83d", "\n\t", '"messages":[', "[{", "x" * 300]
)
ARGUMENTS = st.sampled_from([{}, {"n": 1}, {"n": 1.0}, {"n": True}, {"a": [{"b": "}"}], "c": None}])

Items = list[dict[str, Any]]


def chat_item(said: str, arguments: dict[str, Any], kind: int) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    return (
        {"role": "user", "content": said},
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": said}]},
        {"role": "nobody", "content": said},
    )[kind]


def anthropic_item(said: str, arguments: dict[str, Any], kind: int) -> dict[str, Any]:
    mark = {"cache_control": {"type": "ephemeral"}} if len(said) == 1 else {}
    return (
        {"role": "user", "content": [{"type": "text", "text": said, **mark}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": arguments}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": said, **mark}]},
        {"role": "user", "content": [{"type": "image"}]},
    )[kind]


def responses_item(said: str, arguments: dict[str, Any], kind: int) -> dict[str, Any]:
    return (
        {"role": "user", "content": said},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps(arguments)},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": said}]},
        {"type": "item_reference"},
    )[kind]


def gemini_item(said: str, arguments: dict[str, Any], kind: int) -> dict[str, Any]:
    return (
        {"role": "user", "parts": [{"text": said}]},
        {"role": "model", "parts": [{"text": said}, {"function_call": {"name": "f", "args": arguments}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": said}}}]},
        {"role": "user", "parts": 1},
    )[kind]


MAKERS = {"chat": chat_item, "anthropic": anthropic_item, "responses": responses_item, "gemini": gemini_item}
TOOL = {
    "name": "f",
    "description": "d" * 80,
    "parameters": {"type": "object", "properties": {"n": {"default": 1}}},
}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": TOOL}],
    "anthropic": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_1", "name": "w"}],
    "responses": [{"type": "function", **TOOL}, {"type": "custom", "name": "x"}],
    "gemini": [{"functionDeclarations": [TOOL]}],
}
OTHERS: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "temperature": 1, "stream": True},
    "anthropic": {"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "s"}]},
    "responses": {"model": "m", "instructions": "i", "metadata": {"messages": [1]}},
    "gemini": {"systemInstruction": {"parts": [{"text": "s"}]}, "generationConfig": {"temperature": 1}},
}


@st.composite
def item_lists(draw: st.DrawFn, name: str, *, least: int = 0) -> Items:
    kinds = st.integers(0, 2) if draw(st.integers(0, 9)) else st.integers(0, 3)
    return draw(st.lists(st.builds(MAKERS[name], TEXTS, ARGUMENTS, kinds), min_size=least, max_size=4))


@st.composite
def written(draw: st.DrawFn, name: str, items: Items) -> bytes:
    """A body of these items: members in any order, some of them twice or spelled with escapes, spaces or none."""
    key = BY_NAME[name].history
    members = [(key, items), *OTHERS[name].items(), ("tools", TOOLS[name])]
    if not draw(st.integers(0, 2)):
        members = draw(st.permutations(members))
    if not draw(st.integers(0, 5)):
        again = draw(st.sampled_from([key, "tools", key[:-1] + "\\u0073", key[:-1] + "\\u0074", "max_tokens", ""]))
        value = draw(st.sampled_from([[], items[:1], items, TOOLS[name], None, 5, "x"]))
        members.insert(draw(st.integers(0, len(members))), (again, value))
    ascii_, comma, colon = draw(st.sampled_from([(False, ",", ":"), (True, ", ", ": "), (False, "\n,", " :\t")]))

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_, separators=(comma, colon))

    body = "{" + comma.join(f'"{member}"{colon}{text(value)}' for member, value in members) + "}"
    number = draw(st.sampled_from(["1", "1", "1.0", "true"]))  # Python takes them for equal
    body = body.replace(f'"default"{colon}1', f'"default"{colon}{number}')
    encoding = draw(st.sampled_from(["utf-8"] * 9 + ["utf-8-sig", "utf-16"]))
    return body.encode(encoding, "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """The body cut, or with bytes left out, put in or replaced."""
    start = draw(st.integers(0, len(body)))
    end = min(len(body), start + draw(st.sampled_from([0, 1, 2, 40])))
    put = draw(
        st.sampled_from([b"", b"}", b"]", b"{", b"[", b",", b'"', b"\\", b" ", b"1", b"\xff", b"null", b"],["])
    )
    return body[:start] + put + (body[end:] if draw(st.booleans()) else b"")


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """Bodies that an agent might send one after the other, and some that it would not."""
    name = draw(st.sampled_from(sorted(BY_NAME)))
    items = draw(item_lists(name, least=1))
    bodies = [draw(written(name, items))]
    for _ in range(draw(st.integers(1, 4))):
        match draw(st.integers(0, 9)):
            case 0:
                bodies.append(draw(damaged(draw(st.sampled_from(bodies)))))
                continue
            case 1 if items:
                at = draw(st.integers(0, len(items) - 1))
                items = [*items[:at], *draw(item_lists(name)), *items[at + 1 :]]
            case 2:
                items = items[: draw(st.integers(0, len(items)))]
            case _:
                items = [*items, *draw(item_lists(name))]
        bodies.append(draw(written(name, items)))
    return name, bodies


def outcome(dialect: Dialect, body: bytes, before: ParseCache | None) -> tuple[ModelRequest, str] | str:
    """The request, and how it is written: 1 is not 1.0 there."""
    try:
        request = dialect.parse(body, BodyContext(before, PARAMS))
        return request, repr(request)
    except InvalidRequest as refused:
        return refused.message


@given(sequences())
def test_a_body_is_read_as_if_it_came_alone(drawn: tuple[str, list[bytes]]) -> None:
    name, bodies = drawn
    dialect, before = BY_NAME[name], ParseCache()
    for body in bodies:
        new, whole = before.weigh(body, dialect.history)
        assert whole == weigh(body)
        assert new.size <= whole.size
        alone = outcome(dialect, body, None)
        assert outcome(dialect, body, before) == alone
        assert outcome(dialect, body, before) == alone  # nothing is left of a body that was refused


@given(st.data())
def test_what_an_agent_appends_is_all_that_is_read(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(BY_NAME)))
    dialect, before = BY_NAME[name], ParseCache()
    make = MAKERS[name]
    items = [make(text, {"n": 1}, 0) for text in ("a", '"}],[{', "é\\")]
    tail = {**OTHERS[name], "tools": TOOLS[name]}
    last: ModelRequest | None = None
    for count in range(4):
        body = json.dumps({dialect.history: items, **tail}).encode()
        new, whole = before.weigh(body, dialect.history)
        assert (new.size < whole.size) is (count > 0)
        request = dialect.parse(body, BodyContext(before, PARAMS))
        assert before.continued == count
        if last is not None:
            assert request.tools is last.tools
            same = [ours is theirs for ours, theirs in zip(last.messages, request.messages, strict=False)]
            assert all(same) or name == "gemini"
        last = request
        items = [*items, *data.draw(st.lists(st.builds(make, TEXTS.filter(str.isascii), ARGUMENTS, st.just(1))))]


SCALARS = st.none() | st.booleans() | st.integers() | TEXTS.filter(lambda text: "\ud83d" not in text)
FLAT = st.lists(SCALARS, max_size=3) | st.dictionaries(TEXTS.filter(str.isascii), SCALARS, max_size=3)
JSON = SCALARS | FLAT | st.lists(FLAT, max_size=3) | st.dictionaries(TEXTS.filter(str.isascii), FLAT, max_size=3)


@given(st.lists(st.dictionaries(st.just("k"), JSON, max_size=1), max_size=4), st.sampled_from([",", " ,\n"]))
def test_items_end_where_they_do(items: Sequence[dict[str, Any]], comma: str) -> None:
    pieces = [json.dumps(item).encode() for item in items]
    text = b'{"x":["[", {"list":[1]}], "list" :[' + comma.encode().join(pieces) + b' ],"y":[]}'
    start = find_list(text, "list")
    assert start == text.index(b'"list" :[') + 9
    found = find_few_items(text, start)
    assert found is not None
    assert find_many_items(text, start) == find_items(text, start) == found
    if found[0]:
        assert find_many_items(text, found[0][0]) == (found[0][1:], found[1])
    ends, end = found
    assert text[end : end + 1] == b"]"
    assert [text[end - len(piece) : end] for piece, end in zip(pieces, ends, strict=True)] == pieces
    assert continued(text[start:end], begun=False) == [orjson.loads(piece) for piece in pieces]
    if items:
        assert continued(text[ends[0] : end], begun=True) == list(items[1:])


@pytest.mark.parametrize("text", [b"]", b"1", b"],[", b"]],[[", b",", b'{}],"":[{}', b",{}]]"])
def test_text_that_ends_its_list_continues_none(text: bytes) -> None:
    assert continued(text, begun=True) is None


def test_only_so_many_bytes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_cache, "REMEMBERED_BYTES", 2_000)
    before, chat = ParseCache(), BY_NAME["chat"]

    def body(index: int, chars: int) -> bytes:
        messages = [{"role": "user", "content": f"{index}"}, {"role": "user", "content": "x" * chars}]
        return json.dumps({"messages": messages}).encode()

    for index in range(CONVERSATIONS):
        chat.parse(body(index, 600), BodyContext(before))
        assert before.size <= 2_000
    chat.parse(body(0, 5_000), BodyContext(before))
    assert before.size == 0


def test_a_cache_that_rests_keeps_nothing_and_reads_all_again() -> None:
    before, chat = ParseCache(), BY_NAME["chat"]
    items = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    first = chat.parse(json.dumps({"messages": items}).encode(), BodyContext(before))
    assert before.size > 0
    before.cool()
    assert before.size == 0
    then = chat.parse(json.dumps({"messages": [*items, *items]}).encode(), BodyContext(before))
    assert then.messages == (*first.messages, *first.messages)
    assert not any(ours is theirs for ours, theirs in zip(first.messages, then.messages, strict=False))
    assert before.continued == 0


def test_a_repeated_reply_shares_the_texts_of_the_reply() -> None:
    before, chat = ParseCache(), BY_NAME["chat"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
    items: Items = [{"role": "user", "content": "a"}]
    chat.parse(json.dumps({"messages": items}).encode(), BodyContext(before))
    reply = Message("assistant", "said so", tool_calls=(ToolCall("f", '{"n": 1}', "c"),))
    before.replied(reply)
    items += [
        {"role": "assistant", "content": "said so", "tool_calls": [call]},
        {"role": "user", "content": "said so"},
    ]
    body = json.dumps({"messages": items}).encode()
    request = chat.parse(body, BodyContext(before))
    assert request == chat.parse(body)
    assert request.messages[1] == reply
    assert request.messages[1].content is reply.content
    assert request.messages[1].tool_calls[0].arguments is reply.tool_calls[0].arguments
    for index in range(parse_cache.REPLIED_TEXTS):
        before.replied(Message("assistant", f"{index}"))
    later = chat.parse(body.replace(b'"a"', b'"b"'), BodyContext(before)).messages[1]
    assert later == reply
    assert later.content is not reply.content


def test_a_branch_leaves_the_longer_history_known() -> None:
    before, chat = ParseCache(), BY_NAME["chat"]
    items = [{"role": "user", "content": f"{index}"} for index in range(9)]
    whole, branch = (json.dumps({"messages": some}).encode() for some in (items, [*items[:3], items[8]]))
    for body in (whole, branch, whole, branch):
        assert chat.parse(body, BodyContext(before)) == chat.parse(body)
    assert before.continued == 3


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=9), st.integers(0, 9), st.binary(max_size=3))
def test_text_in_pieces_is_compared_and_cut_as_one(pieces: list[bytes], count: int, other: bytes) -> None:
    body = b"".join(pieces)
    ends = [sum(map(len, pieces[: index + 1])) for index in range(len(pieces))]
    known = conversations.Conversation(None)
    at = 0
    for end in ends:
        known.extend(conversations.NewItems(body, at, [end], [()]))
        at = end
    assert known.common(b"[" + body + other, 1) == len(pieces)
    count = min(count, len(pieces))
    cut = body[: ends[count - 1]] if count else b""
    assert known.common(cut + b"\xff" * 9, 0) >= count
    part = known.first(count)
    known.keep_first(count)
    for one in (part, known):
        assert len(one) == count
        assert one.common(body, 0) == count
        assert one.weight(count) == weigh(cut)
