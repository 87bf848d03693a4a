"""Texts that note what a template does with them. With these a template runs once for many messages.

A ``TracedText`` stands in a template's input where a caller's string would be: the content of a message, a name,
an id. It is no ``str``. What it can do, it notes:

- written out, or joined with other text: a *hole* in the result, with what was done to the string before
  (``strip``, ``tojson``: functions of the string alone);
- asked one of a few questions (is it empty, does it begin with this): the answer of the string at hand, and a
  *guard*. The template does the same with every string that gives the same answers.

Anything else ends the run with ``Untraceable``. So does every function that takes a ``str`` and gets this, because
it raises a TypeError: nothing that depends on a string stays unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

VOLATILE = -1
"""The slot of a text that is another one in each run, such as today's date."""

_STRIPS = (str.strip, str.lstrip, str.rstrip)
_OF_A_STRING = frozenset(dir(str))


class Untraceable(Exception):
    """A template did something with a traced text that cannot be noted."""


@dataclass(frozen=True, slots=True)
class TextStep:
    """A function of a string alone, with its other arguments."""

    function: Callable[..., str]
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def trims(self) -> bool:
        """True when it takes nothing but whitespace off the ends."""
        return self.function in _STRIPS and all(chars is None or chars.isspace() for chars in self.arguments)


@dataclass(frozen=True, slots=True)
class Hole:
    """A place where the string of ``slot`` is written, and the steps that are done to it first."""

    slot: int
    steps: tuple[TextStep, ...] = ()

    def text(self, values: Sequence[str]) -> str:
        """The text that is written there; ``values``: the string of each slot."""
        text = values[self.slot]
        for step in self.steps:
            text = step.function(text, *step.arguments, **dict(step.options))
        return text


_QUESTIONS: dict[str, Callable[[str, Any], bool | int]] = {
    "filled": lambda text, _: bool(text),
    "length": lambda text, _: len(text),
    "starts": lambda text, argument: text.startswith(argument),
    "ends": lambda text, argument: text.endswith(argument),
    "holds": lambda text, argument: argument in text,
    "equals": lambda text, argument: text == argument,
}


@dataclass(frozen=True, slots=True)
class Guard:
    """A question that the template asked of a text, and the answer that it got."""

    hole: Hole
    question: str
    argument: Any
    answer: bool | int

    def holds(self, values: Sequence[str]) -> bool:
        """True if the strings of another run give the same answer."""
        return _QUESTIONS[self.question](self.hole.text(values), self.argument) == self.answer


class Trace:
    """The trace of one run of a template. ``values``: the string of each slot, for the answers in this run."""

    def __init__(self, values: Sequence[str]) -> None:
        self._values = values
        self.guards: dict[Guard, None] = {}

    def text(self, slot: int) -> TracedText:
        return TracedText(self, (Hole(slot),))

    def ask(self, hole: Hole, question: str, argument: Any = None) -> bool | int:
        """The answer of the string in this run, noted."""
        if hole.slot == VOLATILE:
            raise Untraceable("a text that is never the same was asked something")
        answer = _QUESTIONS[question](hole.text(self._values), argument)
        self.guards[Guard(hole, question, argument, answer)] = None
        return answer


class TracedText:
    """Literal text and holes, in order. Immutable; of one trace."""

    __slots__ = ("pieces", "trace")

    def __init__(self, trace: Trace, pieces: Iterable[str | Hole]) -> None:
        self.trace = trace
        self.pieces = tuple(piece for piece in pieces if piece != "")

    def then(self, step: TextStep) -> TracedText:
        """The result of a function of this text."""
        hole = self._hole()
        return TracedText(self.trace, (Hole(hole.slot, (*hole.steps, step)),))

    def strip(self, chars: str | None = None, /) -> TracedText:
        return self.then(TextStep(str.strip, (_plain_or_none(chars),)))

    def lstrip(self, chars: str | None = None, /) -> TracedText:
        return self.then(TextStep(str.lstrip, (_plain_or_none(chars),)))

    def rstrip(self, chars: str | None = None, /) -> TracedText:
        return self.then(TextStep(str.rstrip, (_plain_or_none(chars),)))

    def startswith(self, prefix: str, /) -> bool:
        return bool(self.trace.ask(self._hole(), "starts", _plain(prefix)))

    def endswith(self, suffix: str, /) -> bool:
        return bool(self.trace.ask(self._hole(), "ends", _plain(suffix)))

    def __contains__(self, part: object) -> bool:
        return bool(self.trace.ask(self._hole(), "holds", _plain(part)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TracedText):
            raise Untraceable("two texts were compared")
        return isinstance(other, str) and bool(self.trace.ask(self._hole(), "equals", _plain(other)))

    def __bool__(self) -> bool:
        return any(isinstance(piece, str) for piece in self.pieces) or (
            bool(self.pieces) and bool(self.trace.ask(self._hole(), "filled"))
        )

    def __len__(self) -> int:
        return int(self.trace.ask(self._hole(), "length"))

    def __add__(self, other: object) -> TracedText:
        return TracedText(self.trace, (*self.pieces, *_pieces(other))) if _is_text(other) else NotImplemented

    def __radd__(self, other: object) -> TracedText:
        return TracedText(self.trace, (*_pieces(other), *self.pieces)) if _is_text(other) else NotImplemented

    def __getitem__(self, key: object) -> NoReturn:
        if isinstance(key, str):
            raise TypeError("string indices must be integers")  # as of a string: the template gets "undefined"
        raise Untraceable("a text was cut")

    def __iter__(self) -> Iterator[NoReturn]:
        raise Untraceable("a text was read character by character")

    def __getattr__(self, name: str) -> NoReturn:
        if name in _OF_A_STRING:
            raise Untraceable(f"a text's {name} was used")
        raise AttributeError(name)  # as of a string: the template gets "undefined"

    def __hash__(self) -> NoReturn:
        raise Untraceable("a text was looked up")

    def _refuse(self, *_: object) -> NoReturn:
        raise Untraceable("a text became something else")

    __str__ = __repr__ = __format__ = __int__ = __float__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __mul__ = __rmul__ = __rmod__ = _refuse

    def _hole(self) -> Hole:
        if len(self.pieces) == 1 and isinstance(self.pieces[0], Hole):
            return self.pieces[0]
        raise Untraceable("a text that was put together was asked something")


def joined(parts: Iterable[Any]) -> Any:
    """``"".join`` for strings and traced texts: a ``str``, or a TracedText where one is among them."""
    everything = list(parts)
    traced = next((part for part in everything if isinstance(part, TracedText)), None)
    if traced is None:
        return "".join(everything)
    return TracedText(traced.trace, [piece for part in everything for piece in _pieces(part)])


def as_text(value: Any) -> Any:
    """``str(value)`` where a template writes a value out."""
    return value if isinstance(value, TracedText) else str(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str | TracedText)


def _pieces(value: Any) -> tuple[str | Hole, ...]:
    if isinstance(value, TracedText):
        return value.pieces
    if not isinstance(value, str):
        raise TypeError(f"expected str, found {type(value).__name__}")
    return (value,)


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    raise Untraceable("a text was compared with what is no string")


def _plain_or_none(value: object) -> str | None:
    return None if value is None else _plain(value)
