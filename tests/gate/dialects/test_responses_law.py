"""Responses keeps the law of matching: a reply that the ``openai`` package read, streamed or not, and that an
agent sent back in any of the known ways, is still that reply; in namespaces and as custom tools too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from body_server import BodyServer, body_server
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.dialect_law import (
    ASK,
    NEXT,
    TOOLS,
    arguments,
    assert_echo_law,
    replies,
    streamed,
    texts,
    written,
)
from products import examples
from turnstile.models import Message, ToolCall
from turnstile_server.capture.compare import carried
from turnstile_server.gate.dialects.responses import ResponsesDialect

RESPONSES = ResponsesDialect()
Wire = dict[str, Any]
Items = list[Wire]


def flat(name: str) -> Wire:
    [function] = [tool.spec["function"] for tool in TOOLS if tool.name == name]
    return {"type": "function", "strict": True, **function}


OFFERED: Items = [
    flat("run"),
    flat("read_file"),
    {
        "type": "namespace",
        "name": "mcp__probe",
        "description": "A server of tools.",
        "tools": [flat("run"), {"type": "custom", "name": "edit"}],
    },
    {"type": "custom", "name": "apply_patch", "description": "Edits files."},
    {"type": "web_search"},
]
FUNCTIONS = ["run", "read_file", "mcp__probe__run"]
CUSTOM = ["apply_patch", "mcp__probe__edit"]


def body(*echo: Wire) -> bytes:
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}, *echo]
    if echo:
        items.append({"role": "user", "content": NEXT})
    return json.dumps({"model": "policy", "input": items, "tools": OFFERED}).encode()


CALL = RESPONSES.parse(body())


@st.composite
def inputs(draw: st.DrawFn) -> str:
    """The arguments of a custom tool's function, in any spelling, or others than were asked for."""
    if draw(st.integers(0, 3)) == 0:
        return draw(arguments())
    return json.dumps(
        {"input": draw(texts)},
        separators=draw(st.sampled_from([None, (",", ":"), (" , ", " : ")])),
        ensure_ascii=draw(st.booleans()),
    )


@st.composite
def wire_replies(draw: st.DrawFn) -> Message:
    """Replies that call tools of every kind."""
    plain = draw(replies())
    names = draw(st.lists(st.sampled_from([*FUNCTIONS, *CUSTOM]), max_size=3))
    calls = tuple(
        ToolCall(name, draw(inputs() if name in CUSTOM else arguments()), f"call_{index}")
        for index, name in enumerate(names)
    )
    return Message("assistant", plain.content, reasoning=plain.reasoning, tool_calls=calls)


def unchanged(reply: Message) -> set[str]:
    """What a verbatim echo may differ in: the wire carries a custom tool's text, not the JSON around it."""
    return {"arguments_reserialised"} if any(call.name in CUSTOM for call in reply.tool_calls) else set()


def law(reply: Message, echo: Items) -> set[str]:
    return set(assert_echo_law(RESPONSES, reply, first=body(), then=body(*echo)))


class Reader:
    """The official client, reading bytes that the dialect wrote."""

    def __init__(self, server: BodyServer) -> None:
        self._server = server
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)

    def close(self) -> None:
        self._client.close()

    def whole(self, reply: Message) -> list[Any]:
        self._server.body = written(RESPONSES, reply, CALL)
        return self._client.responses.create(model="policy", input=ASK).output

    def accumulated(self, reply: Message, piece: int, *, keepalives: bool = False) -> list[Any]:
        """As the package's own accumulator puts a stream together."""
        self._server.body = streamed(RESPONSES, reply, piece, keepalives=keepalives, call=CALL)
        with self._client.responses.stream(model="policy", input=ASK) as stream:
            return stream.get_final_response().output

    def items_done(self, reply: Message, piece: int) -> Items:
        """As Codex and Pi take a stream: each item when it is done."""
        events = self._events(reply, piece)
        return [event.item.to_dict() for event in events if event.type == "response.output_item.done"]

    def summed(self, reply: Message, piece: int) -> Items:
        """As others do: by the deltas alone."""
        items: dict[int, Wire] = {}
        for event in self._events(reply, piece):
            match event.type:
                case "response.output_item.added":
                    item = items[event.output_index] = event.item.to_dict()
                    if item["type"] == "message":
                        item["content"] = ""
                case "response.output_text.delta":
                    items[event.output_index]["content"] += event.delta
                case "response.reasoning_summary_text.delta":
                    summary = items[event.output_index]["summary"] = items[event.output_index]["summary"] or [
                        {"type": "summary_text", "text": ""}
                    ]
                    summary[0]["text"] += event.delta
                case "response.function_call_arguments.delta":
                    items[event.output_index]["arguments"] += event.delta
                case "response.custom_tool_call_input.delta":
                    items[event.output_index]["input"] += event.delta
        return [items[index] for index in sorted(items)]

    def _events(self, reply: Message, piece: int) -> list[Any]:
        self._server.body = streamed(RESPONSES, reply, piece, call=CALL)
        events = list(self._client.responses.create(model="policy", input=ASK, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return events


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with body_server() as server:
        reader = Reader(server)
        yield reader
        reader.close()


# What agents do to an item between reading it and sending it back ---------------------------


def without(item: Wire, *keys: str) -> Wire:
    return {key: value for key, value in item.items() if key not in keys}


def each(kind: str, change: Callable[[Wire], Wire]) -> Callable[[Items], Items]:
    return lambda items: [change(item) if item["type"] == kind else item for item in items]


def every(change: Callable[[Wire], Wire]) -> Callable[[Items], Items]:
    return lambda items: [change(item) for item in items]


def calls(change: Callable[[str], Any]) -> Callable[[Items], Items]:
    return each("function_call", lambda item: {**item, "arguments": change(item["arguments"])})


def said(item: Wire) -> str:
    return "".join(part["text"] for part in item["content"])


def content(change: Callable[[str], Any]) -> Callable[[Items], Items]:
    return each("message", lambda item: {**item, "content": change(said(item))})


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def two_messages(items: Items) -> Items:
    split: Items = []
    for item in items:
        texts_of = halves(said(item)) if item["type"] == "message" else ()
        split += [{**item, "content": text} for text in texts_of] or [item]
    return split


def stripped(written: str) -> str:
    value = json.loads(written)
    for key, leaf in value.items():
        if isinstance(leaf, str):
            value[key] = "\n".join(line.rstrip() for line in leaf.split("\n"))
    return json.dumps(value)


def defaulted(item: Wire) -> Wire:
    if item["name"] != "run":
        return item
    return {**item, "arguments": json.dumps({"timeout": 30, **json.loads(item["arguments"])})}


NULLS = {"phase": None, "caller": None, "async": None, "status": None}

HABITS: dict[str, Callable[[Items], Items]] = {
    "verbatim": lambda items: items,
    "ids dropped": every(lambda item: without(item, "id")),
    "call ids renamed": every(lambda i: {**i, "call_id": f"other_{i['call_id']}"} if "call_id" in i else i),
    "call ids dropped": every(lambda item: without(item, "call_id")),
    "status dropped": every(lambda item: without(item, "status")),
    "nulls added": every(lambda item: {"namespace": None, "encrypted_content": None, **item, **NULLS}),
    "unknown fields": every(lambda item: {**item, "internal_chat_message_metadata_passthrough": {"turn": 1}}),
    "reasoning dropped": lambda items: [item for item in items if item["type"] != "reasoning"],
    "encrypted content dropped": each("reasoning", lambda item: without(item, "encrypted_content")),
    "summary dropped": each("reasoning", lambda item: {**item, "summary": []}),
    "summary rewritten": each(
        "reasoning", lambda item: {**item, "summary": [{"type": "summary_text", "text": "x"}]}
    ),
    "reasoning as content": each(
        "reasoning",
        lambda item: {
            **without(item, "encrypted_content"),
            "summary": [],
            "content": [{"type": "reasoning_text", "text": item["summary"][0]["text"]}],
        },
    ),
    "arguments compact": calls(lambda text: json.dumps(json.loads(text), separators=(",", ":"))),
    "arguments as object": calls(carried),
    "arguments stripped": calls(stripped),
    "defaults filled": each("function_call", defaulted),
    "content as string": content(lambda text: text),
    "content without annotations": content(lambda text: [{"type": "output_text", "text": text}]),
    "content as input": content(lambda text: [{"type": "input_text", "text": text}]),
    "content in two parts": content(lambda text: [{"type": "output_text", "text": part} for part in halves(text)]),
    "content trimmed": content(str.strip),
    "message in two": two_messages,
    "message without a type": each("message", lambda item: without(item, "type")),
    "empty message left out beside calls": lambda items: (
        [item for item in items if item["type"] != "message" or said(item)]
        if any("call_id" in item for item in items)
        else items
    ),
}

DUMPS: dict[str, Callable[[Any], Wire]] = {
    "model_dump": lambda item: item.model_dump(),
    "without None": lambda item: item.model_dump(exclude_none=True),
    "without unset": lambda item: item.model_dump(exclude_unset=True),
    "to_dict": lambda item: item.to_dict(),
    "json": lambda item: json.loads(item.model_dump_json()),
}


# The law ----------------------------------------------------


@given(reply=wire_replies(), dump=st.sampled_from(sorted(DUMPS)))
def test_an_unstreamed_responses_reply_comes_back_as_itself(reader: Reader, reply: Message, dump: str) -> None:
    assert law(reply, [DUMPS[dump](item) for item in reader.whole(reply)]) <= unchanged(reply)


@pytest.mark.slow
@given(
    reply=wire_replies(), dump=st.sampled_from(sorted(DUMPS)), piece=st.integers(1, 5), keepalives=st.booleans()
)
def test_a_streamed_responses_reply_put_together_by_the_package_comes_back_as_itself(
    reader: Reader, reply: Message, dump: str, piece: int, keepalives: bool
) -> None:
    items = [DUMPS[dump](item) for item in reader.accumulated(reply, piece, keepalives=keepalives)]
    assert law(reply, [sent(item) for item in items]) <= unchanged(reply)


@pytest.mark.slow
@given(reply=wire_replies(), piece=st.integers(1, 5))
def test_a_streamed_responses_reply_put_together_by_hand_comes_back_as_itself(
    reader: Reader, reply: Message, piece: int
) -> None:
    assert law(reply, reader.items_done(reply, piece)) <= unchanged(reply)
    assert law(reply, reader.summed(reply, piece)) <= unchanged(reply)


@pytest.mark.slow
@given(reply=wire_replies(), piece=st.integers(1, 5))
def test_streamed_and_unstreamed_responses_are_the_same_items(reader: Reader, reply: Message, piece: int) -> None:
    assert [item.to_dict() for item in reader.whole(reply)] == reader.items_done(reply, piece)


@pytest.mark.parametrize("habit", sorted(HABITS))
@settings(max_examples=examples(20))
@given(reply=wire_replies(), stream=st.booleans())
def test_a_responses_reply_survives_the_habits_of_agents(
    reader: Reader, habit: str, reply: Message, stream: bool
) -> None:
    items = (
        reader.items_done(reply, 3) if stream else [item.model_dump(by_alias=True) for item in reader.whole(reply)]
    )
    law(reply, HABITS[habit](items))


def sent(item: Wire) -> Wire:
    """The accumulator adds its own parse of texts and arguments; agents leave that out of what they send."""
    item = without(item, "parsed_arguments")
    if item["type"] == "message":
        return {**item, "content": [without(part, "parsed") for part in item["content"]]}
    return item


SAID = Message(
    "assistant",
    "text",
    reasoning="why",
    tool_calls=(
        ToolCall("mcp__probe__run", '{"code": "x"}', "call_0"),
        ToolCall("apply_patch", '{"input": "p"}', "call_1"),
    ),
)
EDITS: dict[str, Callable[[Items], Items]] = {
    "text": content(lambda _: "other"),
    "no text": lambda items: [item for item in items if item["type"] != "message"],
    "call dropped": lambda items: [item for item in items if item["type"] != "function_call"],
    "call renamed": each("function_call", lambda item: {**item, "name": "invalid"}),
    "namespace dropped": each("function_call", lambda item: without(item, "namespace")),
    "argument": calls(lambda _: '{"code": "y"}'),
    "input": each("custom_tool_call", lambda item: {**item, "input": "q"}),
    "calls swapped": lambda items: [*items[:-2], items[-1], items[-2]],
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_the_law_of_responses_tells_a_real_edit(reader: Reader, edit: str) -> None:
    """The property above can fail: it does for every one of these."""
    items = reader.items_done(SAID, 3)
    assert law(SAID, items) <= unchanged(SAID)
    with pytest.raises(AssertionError):
        law(SAID, EDITS[edit](items))
