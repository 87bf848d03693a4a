"""The call format of a chat template, found by rendering calls and reading them back.

A search in a template's text does not tell its format: markers are put together from variables, and several
formats share theirs. So probe calls are rendered through the template as the history of a conversation, and each
installed format reads what stands there. The one that gives back all of them is the model's. What does not come
back equal is said at start: a model that writes such a call as it was taught would be misread as well.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.call_formats.protocol import CallFormat
from turnstile_server.rendering.call_formats.registry import NamedFormat
from turnstile_server.rendering.message_rules import Rewritten
from turnstile_server.rendering.protocol import ParsedReply

_LOG = logging.getLogger(__name__)

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string", "description": "Some text."},
    "digits": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array", "items": {"type": "string"}},
    "table": {"type": "object"},
}
NULLABLE: dict[str, Any] = {"nothing": {"type": ["string", "null"]}}
"""By itself: a template may fail on such a type (Hermes 3's does)."""


def _tools(properties: dict[str, Any]) -> tuple[Tool, ...]:
    parameters = {"type": "object", "properties": properties, "required": []}
    names = ("probe_call", "probe_more")
    functions = [{"name": name, "description": "A probe.", "parameters": parameters} for name in names]
    return tuple(
        Tool(name, {"type": "function", "function": each}) for name, each in zip(names, functions, strict=True)
    )


PROBE_TOOLS = _tools(PROPERTIES)


@dataclass(frozen=True, slots=True)
class Probe:
    """An assistant message that is rendered and read back. ``about``: what it shows, in words for people."""

    about: str
    calls: tuple[ToolCall, ...]
    text: str = ""
    tools: tuple[Tool, ...] = PROBE_TOOLS

    @property
    def message(self) -> Message:
        return Message("assistant", self.text, tool_calls=self.calls)


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _numbered(*calls: ToolCall) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.name, call.arguments, f"call_{index}") for index, call in enumerate(calls))


SEVERAL_CALLS = "two calls in one reply"
TEXT_BESIDE_CALL = "text before a call"
PLAIN = Probe("a call", _numbered(_call("probe_call", text="ls -la")))
PROBES = (
    Probe("white space around a string", _numbered(_call("probe_call", text="  a\n    b\n"))),
    Probe("a string of digits", _numbered(_call("probe_call", digits="5"))),
    Probe("a string that is JSON", _numbered(_call("probe_call", text='{"a": [1, "\\n"]}'))),
    Probe(
        "quotes, markup and other letters", _numbered(_call("probe_call", text="say \"hi\" & 'ho' <b> \\n é 日本"))
    ),
    Probe("an integer", _numbered(_call("probe_call", count=5))),
    Probe("a number", _numbered(_call("probe_call", share=1.5))),
    Probe("true", _numbered(_call("probe_call", flag=True))),
    Probe("false", _numbered(_call("probe_call", flag=False))),
    Probe("null", _numbered(_call("probe_call", nothing=None)), tools=_tools(NULLABLE)),
    Probe("a list", _numbered(_call("probe_call", items=["a", "b c"]))),
    Probe("an object", _numbered(_call("probe_call", table={"k": [1, {"n": None}], "z": False}))),
    Probe("two parameters", _numbered(_call("probe_call", text="a", count=2))),
    Probe("a call without arguments", _numbered(_call("probe_call"))),
    Probe(SEVERAL_CALLS, _numbered(_call("probe_call", text="a"), _call("probe_more", text="b"))),
    Probe(TEXT_BESIDE_CALL, _numbered(_call("probe_call", text="a")), "Let me look."),
)


class Reader(Protocol):
    """What renders a probe with a format's ids, and reads the rendering with the format."""

    def shows_tools(self, tools: Sequence[Tool]) -> bool:
        """True where a prompt with these tools differs from one without."""
        ...

    def read_back(self, message: Message, tools: Sequence[Tool], call_format: CallFormat) -> ParsedReply:
        """The reply that the rendering of ``message`` is. Raises InvalidRequest where the template refuses it."""
        ...

    def prompt_text(self, tools: Sequence[Tool]) -> str:
        """A prompt with these tools."""
        ...

    def writes_calls(self, message: Message, tools: Sequence[Tool]) -> bool:
        """True where ``message`` is rendered otherwise than without its calls."""
        ...

    def has_token(self, literal: str) -> bool:
        """True where ``literal`` is an added token of the vocabulary."""
        ...


@dataclass(frozen=True, slots=True)
class Recognised:
    """The format of a template. ``lost``: what it writes that does not come back equal. ``written``: False where
    the template writes no calls at all, so that the format was found by its marks alone, in the instructions or
    the vocabulary."""

    format: NamedFormat
    lost: tuple[str, ...] = ()
    written: bool = True

    def left_out(self, messages: Sequence[Message]) -> frozenset[Rewritten]:
        """What the template does not write of the replies in a history."""
        found: set[Rewritten] = set()
        for message in messages:
            calls = len(message.tool_calls)
            if calls and (not self.written or (calls > 1 and SEVERAL_CALLS in self.lost)):
                found.add(Rewritten.CALLS_LEFT_OUT)
            if calls and message.content.strip() and TEXT_BESIDE_CALL in self.lost:
                found.add(Rewritten.TEXT_BESIDE_CALL)
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class NotRecognised:
    """No format; ``why`` is for people."""

    why: str


def recognise(reader: Reader, formats: Sequence[NamedFormat]) -> Recognised | NotRecognised:
    """The format of the template behind ``reader``: the one that reads back most probes, the first of equals."""
    try:
        if not reader.shows_tools(PROBE_TOOLS):
            return NotRecognised("the chat template does not show a model its tools")
    except InvalidRequest as error:
        return NotRecognised(error.message)
    refused = _why_refused(reader, formats)
    if refused is not None:
        return NotRecognised(refused)
    best: Recognised | None = None
    for named in formats:
        if not _comes_back(PLAIN, reader, named.form):
            continue
        lost = tuple(probe.about for probe in PROBES if not _comes_back(probe, reader, named.form))
        if best is None or len(lost) < len(best.lost):
            best = Recognised(named, lost)
        if not lost:
            break
    if best is not None:
        return best
    asked = _asked_for(reader, formats)
    if asked is not None:
        return Recognised(asked, written=False)
    return NotRecognised("no installed call format reads the calls that the chat template writes")


def _why_refused(reader: Reader, formats: Sequence[NamedFormat]) -> str | None:
    """The words in which the template refuses any call, whatever its id; None where it writes one."""
    words: str | None = None
    for named in formats:
        try:
            reader.read_back(PLAIN.message, PLAIN.tools, named.form)
        except InvalidRequest as error:
            words = error.message
        except Exception:  # noqa: BLE001 - told where its calls are read (``_comes_back``)
            continue
        else:
            return None
    return words


def check(reader: Reader, named: NamedFormat) -> Recognised:
    """What the template behind ``reader`` writes that does not come back by this format."""
    lost = tuple(probe.about for probe in (PLAIN, *PROBES) if not _comes_back(probe, reader, named.form))
    try:
        written = reader.writes_calls(PLAIN.message, PLAIN.tools)
    except InvalidRequest:  # it refuses any
        written = False
    return Recognised(named, lost if written else (), written=written)


def _comes_back(probe: Probe, reader: Reader, call_format: CallFormat) -> bool:
    try:
        parsed = reader.read_back(probe.message, probe.tools, call_format)
    except InvalidRequest:
        return False
    except Exception:  # noqa: BLE001 - other people's code may raise anything, and keeps no model from its format
        _LOG.exception("the call format %r cannot read a probe", call_format)
        return False
    calls = parsed.message.tool_calls
    return (
        parsed.message.content.strip() == probe.text
        and [call.name for call in calls] == [call.name for call in probe.calls]
        and all(
            _typed(json.loads(found.arguments)) == _typed(json.loads(given.arguments))
            for found, given in zip(calls, probe.calls, strict=True)
        )
    )


def _typed(value: Any) -> str:
    """A value as text in which ``1``, ``1.0``, ``true`` and ``"1"`` differ; the order of keys does not count."""
    return json.dumps(value, sort_keys=True)


def _asked_for(reader: Reader, formats: Sequence[NamedFormat]) -> NamedFormat | None:
    """The format of a template that writes no calls: all of whose marks a prompt with tools has beyond one
    without, else all of whose marks are tokens of the vocabulary; of several the one with most of them."""
    if reader.writes_calls(PLAIN.message, PLAIN.tools):
        return None
    with_tools, without = reader.prompt_text(PROBE_TOOLS), reader.prompt_text(())

    def shown(mark: str) -> bool:
        return with_tools.count(mark) > without.count(mark)

    for has in (shown, reader.has_token):
        scored = [
            (-sum(map(len, named.form.marks)), index)
            for index, named in enumerate(formats)
            if named.form.marks and all(map(has, named.form.marks))
        ]
        if scored:
            return formats[min(scored)[1]]
    return None
