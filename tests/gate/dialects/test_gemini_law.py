"""Gemini keeps the law of matching: a reply that the ``google-genai`` package read, streamed or not, and that an
agent sent back in any of the known ways, is still that reply."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google import genai
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.dialect_law import ASK, CALL, NEXT, TOOLS, assert_echo_law, replies, streamed, written
from products import examples
from turnstile.models import Message, ToolCall
from turnstile_server.gate.dialects.gemini import GeminiDialect

GEMINI = GeminiDialect()
EVENTS = replace(CALL, wire={"sse": True})
ARRAY = replace(CALL, wire={"sse": False})
Wire = dict[str, Any]
RESERIALISED = {"arguments_reserialised"}
"""The wire carries arguments as objects."""


class BodyServer(ThreadingHTTPServer):
    """Answers every call with ``body``."""

    daemon_threads = True
    body = b""


class BodyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: BodyServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if "alt=sse" in self.path else "application/json")
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line each."""


class Reader:
    """The official client, reading bytes that the dialect wrote."""

    def __init__(self) -> None:
        self._server = BodyServer(("127.0.0.1", 0), BodyHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        self._client = genai.Client(api_key="key", http_options=types.HttpOptions(base_url=url))

    def close(self) -> None:
        self._client.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def whole(self, body: bytes) -> Wire:
        self._server.body = body
        return content_of(self._client.models.generate_content(model="policy", contents=ASK))

    def pieces(self, body: bytes) -> list[Wire]:
        """What the package makes of each event."""
        self._server.body = body
        stream = self._client.models.generate_content_stream(model="policy", contents=ASK)
        return [content_of(response) for response in stream]

    def remembered(self, body: bytes, *, stream: bool) -> list[Wire]:
        """What the package's own chat sends back."""
        self._server.body = body
        chat = self._client.chats.create(model="policy")
        if stream:
            for _ in chat.send_message_stream(ASK):
                pass
        else:
            chat.send_message(ASK)
        return [dumped(content) for content in chat.get_history(curated=True)[1:]]


def content_of(response: types.GenerateContentResponse) -> Wire:
    assert response.candidates
    assert response.candidates[0].content
    return dumped(response.candidates[0].content)


def dumped(content: types.Content) -> Wire:
    wire: Wire = content.model_dump(mode="json", by_alias=True, exclude_none=True)
    return wire


def array_pieces(body: bytes) -> list[Wire]:
    """As a client of the array form reads it."""
    return [response["candidates"][0]["content"] for response in json.loads(body)]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


def body(*echo: Wire) -> bytes:
    def user(text: str) -> Wire:
        return {"role": "user", "parts": [{"text": text}]}

    contents = [user(ASK), *echo, *([user(NEXT)] if echo else [])]
    declared = [
        {"name": tool.name, "parametersJsonSchema": dict(tool.parameters)}
        | ({"description": text} if (text := tool.spec["function"].get("description")) is not None else {})
        for tool in TOOLS
    ]
    return json.dumps({"contents": contents, "tools": [{"functionDeclarations": declared}]}).encode()


def law(reply: Message, *echo: Wire) -> set[str]:
    return set(assert_echo_law(GEMINI, reply, first=body(), then=body(*echo)))


# What agents do to a reply between reading it and sending it back ------------------------------


def each(change: Callable[[Wire], Wire | None]) -> Callable[[list[Wire]], list[Wire]]:
    """``change`` on every part; None takes the part away."""

    def changed(echo: list[Wire]) -> list[Wire]:
        return [
            {**content, "parts": [new for part in content["parts"] if (new := change(part)) is not None]}
            for content in echo
        ]

    return changed


def of_call(change: Callable[[Wire], Wire]) -> Callable[[list[Wire]], list[Wire]]:
    return each(
        lambda part: {**part, "functionCall": change(part["functionCall"])} if "functionCall" in part else part
    )


def without(source: Wire, *keys: str) -> Wire:
    return {key: value for key, value in source.items() if key not in keys}


def joined(echo: list[Wire]) -> list[Wire]:
    return [{"role": "model", "parts": [part for content in echo for part in content["parts"]]}]


def merged(echo: list[Wire]) -> list[Wire]:
    """Texts side by side as one part, as Gemini CLI keeps them."""
    parts: list[Wire] = []
    for part in joined(echo)[0]["parts"]:
        plain = "text" in part and not part.get("thought")
        if plain and parts and "text" in parts[-1] and not parts[-1].get("thought"):
            parts[-1] = {"text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(part)
    return [{"role": "model", "parts": parts}]


def snake(echo: list[Wire]) -> list[Wire]:
    names = {"functionCall": "function_call", "thoughtSignature": "thought_signature"}
    return each(lambda part: {names.get(key, key): value for key, value in part.items()})(echo)


def reordered(call: Wire) -> Wire:
    return {**call, "args": dict(sorted(call.get("args", {}).items(), reverse=True))}


def defaulted(call: Wire) -> Wire:
    return {**call, "args": {"timeout": 30, **call.get("args", {})}} if call["name"] == "run" else call


HABITS: dict[str, Callable[[list[Wire]], list[Wire]]] = {
    "as read": lambda echo: echo,
    "one content": joined,
    "texts merged": merged,
    "thoughts dropped": each(lambda part: None if part.get("thought") else part),
    "thoughts as Gemini CLI drops them": lambda echo: merged(
        each(lambda part: None if part.get("thought") else part)(echo)
    ),
    "signatures dropped": each(lambda part: without(part, "thoughtSignature")),
    "signatures of their own": each(
        lambda part: {**part, "thoughtSignature": "c2tpcF90aG91Z2h0X3NpZ25hdHVyZV92YWxpZGF0b3I="}
    ),
    "ids dropped": of_call(lambda call: without(call, "id")),
    "ids of their own": of_call(lambda call: {**call, "id": f"other_{call.get('id')}"}),
    "arguments reordered": of_call(reordered),
    "defaults filled": of_call(defaulted),
    "no arguments left out": of_call(lambda call: call if call.get("args") else without(call, "args")),
    "no arguments as null": of_call(lambda call: {**call, "args": call.get("args") or None}),
    "empty texts added": lambda echo: [
        {**content, "parts": [{"text": ""}, *content["parts"], {"text": ""}]} for content in echo
    ],
    "empty texts dropped": each(lambda part: None if part.get("text") == "" and len(part) == 1 else part),
    "empty contents added": lambda echo: [*echo, {"role": "model", "parts": []}],
    "indices added": each(lambda part: {**part, "callIndex": 0, "partMetadata": {"x": 1}}),
    "snake_case": snake,
    "each part a content": lambda echo: [
        {"role": "model", "parts": [part]} for content in echo for part in content["parts"]
    ],
}


# The law ----------------------------------------------------


@given(reply=replies())
def test_an_unstreamed_reply_comes_back_as_itself(reader: Reader, reply: Message) -> None:
    assert law(reply, reader.whole(written(GEMINI, reply))) <= RESERIALISED


@given(reply=replies(), piece=st.integers(1, 5), keepalives=st.booleans())
def test_a_streamed_reply_read_by_the_package_comes_back_as_itself(
    reader: Reader, reply: Message, piece: int, keepalives: bool
) -> None:
    pieces = reader.pieces(streamed(GEMINI, reply, piece, keepalives=keepalives, call=EVENTS))
    assert law(reply, *pieces) <= RESERIALISED


@given(reply=replies(), piece=st.integers(1, 5), keepalives=st.booleans())
def test_a_reply_streamed_as_an_array_comes_back_as_itself(reply: Message, piece: int, keepalives: bool) -> None:
    pieces = array_pieces(streamed(GEMINI, reply, piece, keepalives=keepalives, call=ARRAY))
    assert law(reply, *pieces) <= RESERIALISED


@settings(max_examples=examples(40))
@given(reply=replies(), piece=st.integers(1, 5), stream=st.booleans())
def test_the_package_s_chat_sends_a_reply_back_as_itself(
    reader: Reader, reply: Message, piece: int, stream: bool
) -> None:
    data = streamed(GEMINI, reply, piece, call=EVENTS) if stream else written(GEMINI, reply)
    assert law(reply, *reader.remembered(data, stream=stream)) <= RESERIALISED


@given(reply=replies(), piece=st.integers(1, 5))
def test_every_form_of_a_reply_is_the_same_message(reader: Reader, reply: Message, piece: int) -> None:
    whole = GEMINI.parse(body(reader.whole(written(GEMINI, reply)))).messages
    for pieces in (
        reader.pieces(streamed(GEMINI, reply, piece, call=EVENTS)),
        array_pieces(streamed(GEMINI, reply, piece, call=ARRAY)),
    ):
        assert GEMINI.parse(body(*joined(pieces))).messages == whole


@given(reply=replies(), piece=st.integers(1, 5), events=st.booleans())
def test_who_does_not_ask_for_thoughts_is_given_none(reply: Message, piece: int, events: bool) -> None:
    call = replace(EVENTS if events else ARRAY, show_reasoning=False)
    hidden = replace(reply, reasoning=None)
    assert written(GEMINI, reply, call) == written(GEMINI, hidden, call)
    data = streamed(GEMINI, reply, piece, call=call)
    assert data.replace(b"\n", b"") == streamed(GEMINI, hidden, piece, call=call).replace(b"\n", b"")


@pytest.mark.parametrize("habit", sorted(HABITS))
@settings(max_examples=examples(15))
@given(reply=replies(), stream=st.booleans())
def test_a_reply_survives_the_habits_of_gemini_s_agents(
    reader: Reader, habit: str, reply: Message, stream: bool
) -> None:
    read = (
        reader.pieces(streamed(GEMINI, reply, 3, call=EVENTS))
        if stream
        else [reader.whole(written(GEMINI, reply))]
    )
    law(reply, *HABITS[habit](read))


REPLY = Message("assistant", "text", reasoning="why", tool_calls=(ToolCall("run", '{"code": "x"}', "call_0"),))
EDITS: dict[str, Callable[[list[Wire]], list[Wire]]] = {
    "text": each(lambda part: {"text": "other"} if part.get("text") == "text" else part),
    "no text": each(lambda part: None if part.get("text") == "text" else part),
    "call dropped": each(lambda part: None if "functionCall" in part else part),
    "call renamed": of_call(lambda call: {**call, "name": "invalid"}),
    "argument": of_call(lambda call: {**call, "args": {"code": "y"}}),
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_the_law_tells_a_real_edit_of_gemini_s(reader: Reader, edit: str) -> None:
    """The property above can fail: it does for every one of these."""
    read = [reader.whole(written(GEMINI, REPLY))]
    assert law(REPLY, *read) <= RESERIALISED
    with pytest.raises(AssertionError):
        law(REPLY, *EDITS[edit](read))
