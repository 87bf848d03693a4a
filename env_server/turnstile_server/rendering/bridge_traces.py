"""The text that a template writes behind a reply, noted once for each shape of the new messages.

The *shape* of a continuation is what is left of it without the callers' strings: how many calls the reply has,
and of each new message its role and which fields it has. For each shape the template runs once on traced texts
(``traced_template``); from then on its text is known, with marks where the strings go (``marked_text``). Where the
template asked something of a string, the answers (*guards*) tell for which strings the text is the same.

What must hold: the ids are those that the template itself gives. So this module gives nothing where

- a string could be part of a control token (``is_plain``), or a message has what is rarely there (calls,
  reasoning): the ordinary way treats them;
- the template did with a string what cannot be noted, or writes something that changes by itself, like a date;
- a string stands where the close of a turn is looked for (``continuation``);
- the first text with these guards is not the very text that the ordinary way gave.

Bounded: ``MOST_SHAPES``, ``MOST_VARIANTS`` and ``MOST_TEXTS``. A shape that cannot be noted is remembered as such.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

from turnstile.models import Message
from turnstile_server.rendering.encoder import TextEncoder
from turnstile_server.rendering.marked_text import (
    EncodedRuns,
    MarkedText,
    Marks,
    is_plain,
    prepare_marked,
    written_with,
)
from turnstile_server.rendering.normalise import Stock
from turnstile_server.rendering.synthetic import Endings, Synthetic, Unbridgeable
from turnstile_server.rendering.traced_template import TracedTemplate
from turnstile_server.rendering.traced_text import VOLATILE, Guard, Hole, Trace, Untraceable

MOST_SHAPES = 256
"""Shapes that are kept; the oldest goes first."""

MOST_VARIANTS = 4
"""Different texts for one shape, by what the template asked of the strings. A shape with more is not noted."""

MOST_TEXTS = 16
"""Texts that are kept ready for one variant: one for each token that may end a reply."""

Shape = tuple[tuple[bool, ...], tuple[tuple[str, bool, bool], ...]]


@dataclass(frozen=True, slots=True)
class _Variant:
    """One text of a shape. ``used``: the slots that it depends on; ``holes``: what its marks stand for; ``texts``:
    what was made ready of it."""

    guards: tuple[Guard, ...]
    used: tuple[int, ...]
    holes: tuple[Hole, ...]
    close: str
    new: str
    texts: dict[tuple[str, int | None], MarkedText | None] = field(default_factory=dict)

    def fits(self, values: Sequence[str]) -> bool:
        """True if the template does the same with these strings."""
        return all(guard.holds(values) for guard in self.guards)


@dataclass(frozen=True, slots=True)
class TracedBridge:
    """A continuation whose template need not run. ``close`` and ``new`` as in ``synthetic.Endings``, with marks
    in the place of callers' strings."""

    close: str
    new: str
    _variant: _Variant
    _values: tuple[str, ...]
    _traces: BridgeTraces
    apart: bool = False

    def ids(self, text: str, *, after: int | None, most: int | None) -> EncodedRuns | None:
        """The ids of ``text``, which is made of ``close`` and ``new``; None: encode it the ordinary way."""
        return self._traces.encode(self._variant, text, self._values, after, most)


class BridgeTraces:
    """Notes and finds continuations. Safe to use from several threads; what it keeps changes no result."""

    def __init__(
        self,
        template: TracedTemplate,
        stock: Callable[[Sequence[Message]], list[Stock]],
        synthetic: Synthetic,
        encoder: TextEncoder,
        glued: Collection[str],
    ) -> None:
        """``stock`` makes the messages of a template; ``glued``: as in ``normalise.prepare``."""
        self._template = template
        self._stock = stock
        self._synthetic = synthetic
        self._encoder = encoder
        self._glued = glued
        self._marks = Marks()
        self._shapes: dict[Shape, tuple[_Variant, ...] | None] = {}
        self._lock = Lock()

    def find(self, reply: Message, new_messages: Sequence[Message]) -> TracedBridge | None:
        """The continuation, where one like it was noted and the strings are plain."""
        shape = _shape(reply, new_messages)
        variants = self._shapes.get(shape) if shape is not None else None
        if not variants:
            return None
        values = _values(reply, new_messages)
        for variant in variants:
            if variant.fits(values):
                if all(is_plain(self._encoder, values[slot], self._glued) for slot in variant.used):
                    return TracedBridge(variant.close, variant.new, variant, values, self)
                return None
        return None

    def note(self, reply: Message, new_messages: Sequence[Message], endings: Endings) -> None:
        """Notes the shape of a continuation that was made the ordinary way, with these endings."""
        if endings.apart:
            return
        shape, values = _shape(reply, new_messages), _values(reply, new_messages)
        known = self._shapes.get(shape, ()) if shape is not None else None
        if shape is None or known is None or any(variant.fits(values) for variant in known):
            return
        if not all(is_plain(self._encoder, value, self._glued) for value in values):
            return
        made: tuple[_Variant, ...] | None = None
        if len(known) < MOST_VARIANTS:
            with suppress(Untraceable, Unbridgeable):
                made = (*known, self._variant(reply, new_messages, values, endings))
        with self._lock:
            self._shapes[shape] = made
            while len(self._shapes) > MOST_SHAPES:
                del self._shapes[next(iter(self._shapes))]

    def encode(
        self, variant: _Variant, text: str, values: Sequence[str], after: int | None, most: int | None
    ) -> EncodedRuns | None:
        """``TracedBridge.ids``."""
        key = (text, after)
        if key not in variant.texts:
            if len(variant.texts) >= MOST_TEXTS:
                return None
            pieces = self._marks.read(text, variant.holes)
            variant.texts[key] = prepare_marked(self._encoder, pieces, values, after=after)
        marked = variant.texts[key]
        return None if marked is None else marked.ids(self._encoder, values, most)

    def _variant(
        self, reply: Message, new_messages: Sequence[Message], values: Sequence[str], endings: Endings
    ) -> _Variant:
        """Runs the template on traced texts. Raises Untraceable and Unbridgeable."""
        trace = Trace(values)
        stock = self._stock([*self._synthetic.head(reply), *new_messages])
        for slot, (holder, key) in enumerate(_places(reply, stock[1], stock[2:])):
            holder[key] = trace.text(slot)
        numbers: dict[Hole, int] = {}

        def text(messages: list[Stock], *, prompt: bool) -> str:
            return self._marks.written(self._template.pieces(trace, messages, prompt=prompt), numbers)

        close, new = self._synthetic.difference(stock, text)
        holes = tuple(numbers)
        pieces = self._marks.read(close, holes), self._marks.read(new, holes)
        written = [piece for part in pieces for piece in part if isinstance(piece, Hole)]
        if any(hole.slot == VOLATILE for hole in written):
            raise Untraceable("the template writes what changes by itself")
        if [written_with(part, values) for part in pieces] != [endings.close, endings.new]:
            raise Untraceable("the template writes something else")
        self._check_close(close, new, [piece for piece in pieces[0] if isinstance(piece, Hole)])
        whole = {
            hole.slot for hole in pieces[1] if isinstance(hole, Hole) and all(one.trims for one in hole.steps)
        }
        for message in stock[2:]:
            # What the template moved or dropped must be seen as such each time.
            content = message["content"]
            if message["role"] == "system" and not any(content.pieces == (Hole(slot),) for slot in whole):
                raise Untraceable("a system message is not written as it is")
        used = {hole.slot for hole in written} | {guard.hole.slot for guard in trace.guards}
        return _Variant(tuple(trace.guards), tuple(sorted(used)), holes, close, new)

    def _check_close(self, close: str, new: str, in_close: Sequence[Hole]) -> None:
        """Raises Untraceable where what ``Continuation`` looks for could lie in a string: the bare close at the
        end of ``close``, or, where there is none, an end token in ``close`` or the one that ``new`` begins with. A
        plain string is no part of a token, but what a template makes of it may be."""
        bare = self._synthetic.close or ""
        changed = any(hole.steps for hole in in_close)
        if in_close and (not close.endswith(bare) or (changed and not bare.strip())):
            raise Untraceable("a string is written in the close of a turn")
        fixed = new[: self._marks.first(new)]
        start = fixed.lstrip()
        control = self._encoder.control.by_text
        if not bare.strip() and fixed != new and any(one != start and one.startswith(start) for one in control):
            raise Untraceable("a string is written where the next turn begins")


def _shape(reply: Message, new_messages: Sequence[Message]) -> Shape | None:
    """None for messages with what is rarely there."""
    if any(one.tool_calls or one.reasoning for one in new_messages):
        return None
    return (
        tuple([call.id is None for call in reply.tool_calls]),
        tuple([(one.role, one.name is None, one.tool_call_id is None) for one in new_messages]),
    )


def _values(reply: Message, new_messages: Sequence[Message]) -> tuple[str, ...]:
    """The callers' strings, in the order of ``_places``."""
    values: list[str] = []
    for call in reply.tool_calls:
        values.append(call.name)
        if call.id is not None:
            values.append(call.id)
    for message in new_messages:
        values.append(message.content)
        if message.name is not None:
            values.append(message.name)
        if message.tool_call_id is not None:
            values.append(message.tool_call_id)
    return tuple(values)


def _places(reply: Message, stock_reply: Stock, new_messages: Sequence[Stock]) -> Iterator[tuple[Stock, str]]:
    """The places of the callers' strings in the template's messages: a dict and a key each."""
    for call, stock in zip(reply.tool_calls, stock_reply.get("tool_calls", ()), strict=True):
        yield stock["function"], "name"
        if call.id is not None:
            yield stock, "id"
    for message in new_messages:
        yield from ((message, key) for key in ("content", "name", "tool_call_id") if key in message)
