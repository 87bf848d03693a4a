"""The law of matching that every dialect's tests inherit, streamed and not:

    key(parse_request(echo(write(reply)))) == key(reply)

A dialect's test writes a reply with the dialect, lets the dialect's own client read it, sends it back as that
client does, and hands the two request bodies to ``assert_echo_law``. What is left to the dialect: its bodies and
the habits of its clients. What is shared: replies worth trying, the writing, the law.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from capture.turns import make_tool, make_turn
from turnstile.models import Message, Tool, ToolCall
from turnstile_server.capture import CallMatch, TokenTree
from turnstile_server.capture.compare import compare_reply
from turnstile_server.capture.keys import chain, group, tools_key
from turnstile_server.gate.dialects.base import Dialect, FinishedReply, ModelRequest, ReplyHead, Usage
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta

TOOLS: tuple[Tool, ...] = (
    make_tool("run", {"code": {"type": "string"}, "timeout": {"type": "integer", "default": 30}}),
    make_tool("read_file", {"path": {"type": "string"}, "options": {"type": "object", "default": {}}}),
)
"""What every request of the law offers."""

ASK = "What is in the file?"
NEXT = "Go on."
"""The user messages before and after the reply: bodies must hold exactly these."""

_TEMPLATE = "template"

HEAD = ReplyHead(turn_id="turn_reply", model="policy", created=1_700_000_000, prompt_tokens=5)
CALL = ModelRequest(messages=(Message("user", ASK),), tools=TOOLS, stream_usage=True)
"""The call that the replies answer, as far as a writer must know it."""

# Surrogates cannot come out of a tokenizer; everything else can, control characters and markup included.
_text = st.text(st.characters(codec="utf-8"), max_size=12)
_hostile = st.sampled_from(
    [
        "",
        " ",
        "\n\n",
        " a ",
        "a\n",
        "\r\n",
        "\u2028",
        "\x00",
        "data: x",
        "[DONE]",
        "<tool_call>",
        "</think>",
        '{"a": 1}',
    ]
)
texts = _text | _hostile

_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


_UNCARRIED = (
    '{"code": "\\ud83d"}',
    '{"\\uDC00": "\\ud83d\\ude00", "big": 12345678901234567890123}',
    '{"timeout": 1e999}',
    '{"other": [NaN, -Infinity, ' + "9" * 400 + "]}",
)
"""Arguments that Python's parser takes and no wire of JSON values, or no client in JavaScript, carries."""


@st.composite
def arguments(draw: st.DrawFn) -> str:
    """A JSON object in any spelling that a model may choose."""
    value = draw(st.dictionaries(st.sampled_from(["code", "path", "timeout", "other"]), _values, max_size=3))
    written = json.dumps(
        value,
        indent=draw(st.sampled_from([None, None, 1])),
        separators=draw(st.sampled_from([None, (",", ":"), (" , ", " : ")])),
        ensure_ascii=draw(st.booleans()),
    )
    return written if value else draw(st.sampled_from([written, *_UNCARRIED]))


@st.composite
def replies(draw: st.DrawFn) -> Message:
    """A reply as the gate commits it: any text, any reasoning, calls of the offered tools with ids of ours."""
    names = draw(st.lists(st.sampled_from([tool.name for tool in TOOLS]), max_size=3))
    calls = tuple(
        ToolCall(name=name, arguments=draw(arguments()), id=f"call_{index}") for index, name in enumerate(names)
    )
    return Message("assistant", draw(texts), reasoning=draw(st.none() | texts) or None, tool_calls=calls)


def finished(message: Message) -> FinishedReply:
    usage = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=0)
    return FinishedReply(head=HEAD, message=message, finish="stop", usage=usage)


def written(dialect: Dialect, message: Message, call: ModelRequest = CALL) -> bytes:
    """The reply as one body."""
    return dialect.reply(finished(message), call)


def streamed(
    dialect: Dialect, message: Message, piece: int, *, keepalives: bool = False, call: ModelRequest = CALL
) -> bytes:
    """The reply as a whole stream, text and reasoning in pieces of ``piece`` characters."""
    writer = dialect.stream(HEAD, call)
    out = [writer.start()]
    for event in _events(message, piece):
        out.append(writer.delta(event))
        if keepalives:
            out.append(writer.keepalive())
    out.append(writer.end(finished(message)))
    return b"".join(out)


def _events(message: Message, piece: int) -> list[Delta]:
    events: list[Delta] = [ReasoningDelta(part) for part in _pieces(message.reasoning or "", piece)]
    events += [TextDelta(part) for part in _pieces(message.content, piece)]
    return events + [CallDelta(index, call) for index, call in enumerate(message.tool_calls)]


def _pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def assert_echo_law(dialect: Dialect, reply: Message, *, first: bytes, then: bytes) -> tuple[str, ...]:
    """``first``: the request that ``reply`` answers, [ASK]; ``then``: the next, [ASK, the echo, NEXT].

    Returns the names of the cosmetic differences, so that a test can ask for none.
    """
    asked, called = dialect.parse(first), dialect.parse(then)
    offer = tools_key(asked.tools, _TEMPLATE)
    assert tools_key(called.tools, _TEMPLATE) == offer, "the offered tools do not survive the dialect"
    groups = group(called.messages)
    assert [g.message.role for g in groups] == ["user", "assistant", "user"]
    before = chain(b"", groups[0].message)
    assert chain(before, groups[1].message) == chain(before, reply), "the law: the key changed on the way"
    schemas = {tool.name: tool.parameters for tool in called.tools}
    assert compare_reply(reply, groups[1].message, schemas).edited is None

    tree = TokenTree()
    place = CallMatch(
        parent=None, new_messages=asked.messages, echo=(), broken=None, request_messages=asked.messages
    )
    node = tree.add(make_turn(place, reply, seq=0, tools_key=offer, completion_ids=[1]))
    match = tree.match(called.messages, called.tools, offer)
    assert match.parent is node
    assert match.broken is None
    assert [message.content for message in match.new_messages] == [NEXT]
    return match.echo


def envelope(tools: Sequence[Tool] = TOOLS) -> list[dict[str, Any]]:
    """The offered tools in OpenAI's shape; other dialects translate."""
    return [dict(tool.spec) for tool in tools]
