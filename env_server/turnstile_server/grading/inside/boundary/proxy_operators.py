"""Operators on proxies: their results, and the rules for which answers of the other side are believed.

Where the rules are strict, the other side's object does not decide whether it equals a plain value or which number
it is: such an answer would be the verdict itself.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import collections
import datetime
import numbers
import secrets
from typing import Any

from .operations import COMPARISONS, CONTENTS, DISTANCES, PREDICATES, SET_METHODS, STEPS
from .proxies import Asker, BoundaryError, ModuleProxy, Origin, ProxyClass, origin_of
from .wire import PLAIN

_DISTANCES: tuple[type, ...] = (
    numbers.Number,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    set,
    frozenset,
    collections.Counter,
    type({}.keys()),
    type({}.items()),
)
"""Values whose difference a test may judge in the place of the values: 0, an empty set."""
_SETS: tuple[type, ...] = (set, frozenset, collections.Counter, type({}.keys()), type({}.items()))


class ProxyOperators:
    """Operators of one side's proxies. ``strict``: as in its rules. ``other``: the other side, in words."""

    def __init__(self, peer: Asker, strict: bool, other: str) -> None:
        self._peer = peer
        self._strict = strict
        self._other = other

    def compare(self, name: str, own: Any, other: Any) -> Any:
        """A comparison whose left side is a proxy. Where the rules are strict, the other side's object is compared
        to a plain value only if it is one itself, by a copy of that: it does not decide."""
        origin, beside = self._origin(own), origin_of(other)
        if origin.copies is not None:
            mine = self.plain(own)
            if beside is not None and beside.copies is not None and beside.peer is self._peer:
                other = self.plain(other)
            if beside is None:  # an object of the test's that compares itself gets the copy, too
                return COMPARISONS[name](mine, other)
            return _compared(name, mine, other)
        if beside is not None and beside.peer is self._peer:
            if name == "__eq__" and beside.number == origin.number:
                return True
            answer = self._peer.ask("op", name, own, (other,), {})
            if self._strict and name == "__eq__" and not _is_unequal(answer):
                self._check_equality(own)
            return answer
        if not self._strict:
            return self._peer.ask("op", name, own, (other,), {})
        if other is None and name == "__eq__":
            return False
        if type(other) in PLAIN:
            raise BoundaryError(
                f"an object of {self._other} ({type(own).__qualname__}) was compared to {_shown(other)}: whether "
                "it equals a plain value is not its own to say; compare its attributes, or mark the task "
                "`trust: in_process`"
            )
        return NotImplemented

    def plain(self, own: Any) -> Any:
        """A copy of the plain value that an object is. Raises BoundaryError where another kind of value came: an
        object in its place would be asked what only plain values are."""
        value = self._peer.ask("copy", own)
        if type(value) not in PLAIN or type(value).__name__ != self._origin(own).copies:
            raise BoundaryError(
                f"{self._other} gave a {type(value).__qualname__} for the plain value of an object of its own "
                f"({type(own).__qualname__})"
            )
        return value

    def leave(self, own: Any, args: tuple[Any, ...]) -> Any:
        """``__exit__``."""
        answer = self._peer.ask("op", "__exit__", own, args, {})
        return self._peer.failures.left(args[1], answer) if self._strict and len(args) > 1 else answer

    async def leave_async(self, own: Any, args: tuple[Any, ...]) -> Any:
        """``__aexit__``."""
        answer = await self._peer.ask("op", "__aexit__", own, args, {})
        return self._peer.failures.left(args[1], answer) if self._strict and len(args) > 1 else answer

    def arithmetic(self, name: str, own: Any, args: tuple[Any, ...]) -> Any:
        """Strict: no number (nor time, nor set) comes of an object and a plain one, so that no difference to what
        a test expects is the other side's to choose (``assertAlmostEqual``); nor of the object that comes of them
        (``measure``)."""
        result = self._peer.ask("op", name, own, args, {})
        return self._combined(name, own, args, result) if self._strict else result

    def _combined(self, name: str, own: Any, args: tuple[Any, ...], result: Any) -> Any:
        """The result of ``own`` and ``args[0]``, if it is believed: nor is an empty value of another type."""
        distances = (*_DISTANCES, *PLAIN) if name in DISTANCES else _DISTANCES
        plain = isinstance(args[0], distances) and origin_of(args[0]) is None
        mixes = plain or self._mixed(own) or self._mixed(args[0])
        empty = name in DISTANCES and isinstance(args[0], _DISTANCES) and _is_empty(result)
        if mixes and (empty or isinstance(result, _DISTANCES)):
            raise self._chosen(name, own)
        if isinstance(origin := origin_of(result), Origin) and origin.peer is self._peer:
            origin.mixed = origin.mixed or mixes
            if name in DISTANCES and origin_of(args[0]) is None:
                origin.apart = _believed(args[0])
        return result

    def derived(self, op: str, args: tuple[Any, ...], value: Any) -> Any:
        """Strict: an operation's result, if it is believed. ``(f(x) - noon).total_seconds()`` and
        ``len(f(x) - {1})`` say how far a result is from a value of the test's: no number that comes of
        such an object is believed."""
        own = args[1] if op == "op" else args[0] if args else None
        beside, origin = origin_of(value), origin_of(own)
        if beside is not None and isinstance(value, (ModuleProxy, ProxyClass)):
            beside.given = beside.given or not (op == "get" and isinstance(own, (ModuleProxy, ProxyClass)))
        if beside is not None and not isinstance(value, (ModuleProxy, ProxyClass)):
            beside.steps = beside.steps or (op == "get" and _is_step(own, args[1])) or self.may_end(op, args)
        if origin is None or origin.apart is None:
            return value
        if beside is not None:
            beside.apart = origin.apart
        elif isinstance(value, numbers.Number) and (origin.apart == _NO_NUMBER or not value):
            raise self._chosen(args[0] if op == "op" else op, own)
        return value

    def judged(self, name: str, own: Any) -> Any:
        """A method that says of a plain value what a test expects of it. Strict: of a plain value, here; of
        another object, whose word would be the verdict, no yes or no, and no set. Raises AttributeError where
        there is none."""
        origin = self._origin(own)
        here = origin.copies is not None and (self._strict or name in PREDICATES)
        if here and hasattr(mine := self.plain(own), name):
            return getattr(mine, name)
        found = self._peer.ask("get", own, name)
        if not self._strict:
            return found
        if name in SET_METHODS:
            return lambda *args: self._combined(SET_METHODS[name], own, args, found(*args)) if args else found()
        if name not in PREDICATES:
            return found

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise BoundaryError(
                f"an object of {self._other} ({type(own).__qualname__}) was asked {name}(): where a test expects "
                "text, a set, a path or a number, that is not its own to say; compare plain values, or mark the "
                "task `trust: in_process`"
            )

        return refused

    def measure(self, name: str, own: Any, args: tuple[Any, ...]) -> Any:
        """A number of an object alone. Not of one that has met a plain number: ``abs(difference)``."""
        if self._strict and self._mixed(own):
            raise self._chosen(name, own)
        return self._peer.ask("op", name, own, args, {})

    def content(self, name: str, own: Any) -> Any:
        """What an object holds, or how much. Strict: of a plain value the same as it equals; of another object no
        iteration that its length contradicts. An object of a library would else find nothing to compare."""
        if self._strict and self._origin(own).copies is not None:
            return CONTENTS[name](self.plain(own))
        if not self._strict or name != "__iter__" or not _has_length(own):
            return self._peer.ask("op", name, own, (), {})
        items, length = self._peer.ask("items", own), self._peer.ask("op", "__len__", own, (), {})
        if type(items) is not list or len(items) != length:
            found = len(items) if type(items) is list else items
            raise BoundaryError(
                f"an object of {self._other} ({type(own).__qualname__}) has the length {_shown(length)} and "
                f"iterates over {_shown(found)}"
            )
        return iter(items)

    def may_end(self, op: str, args: tuple[Any, ...]) -> bool:
        """True if an operation may say, by its exception, that nothing is left."""
        if op == "op" and args[0] in STEPS:
            return True
        origin = origin_of(args[1] if op == "op" else args[0]) if args else None
        return origin is not None and origin.steps and (op in ("await", "call") or args[0] == "__call__")

    def contains(self, own: Any, item: Any) -> bool:
        """Strict: what has an item does not have random others of its kind, too. Which of them the test asks for
        is not to be told by their order."""
        if not self._strict or origin_of(item) is not None:
            return bool(self._peer.ask("op", "__contains__", own, (item,), {}))
        decoys = _decoys(item)
        first = secrets.randbelow(len(decoys) + 1)
        before = [self._has(own, decoy) for decoy in decoys[:first]]
        answer = bool(self._peer.ask("op", "__contains__", own, (item,), {}))
        if answer and all(before) and all(self._has(own, decoy) for decoy in decoys[first:]):
            raise BoundaryError(f"{type(own).__qualname__}: its objects say that they hold every random value")
        return answer

    def _mixed(self, value: Any) -> bool:
        origin = origin_of(value)
        return origin is not None and origin.mixed

    def _chosen(self, name: str, own: Any) -> BoundaryError:
        return BoundaryError(
            f"{name} of an object of {self._other} ({type(own).__qualname__}) and a plain value gave a plain "
            "value, which the object is free to choose; compute with its attributes, or mark the task "
            "`trust: in_process`"
        )

    def _check_equality(self, own: Any) -> None:
        """An object that the other side says equals another of its objects may not equal just anything."""
        for decoy in (secrets.token_hex(8), secrets.randbits(60)):
            try:
                answer = self._peer.ask("op", "__eq__", own, (decoy,), {})
                equal = not _is_unequal(answer) and bool(answer)
            except Exception:  # noqa: BLE001 - it does not compare itself to such values, as it should not
                continue
            if equal:
                raise BoundaryError(f"{type(own).__qualname__}: its objects say that they equal a random value")

    def _has(self, own: Any, decoy: Any) -> bool:
        try:
            return bool(self._peer.ask("op", "__contains__", own, (decoy,), {}))
        except Exception:  # noqa: BLE001 - as above
            return False

    def _origin(self, proxy: Any) -> Origin:
        origin = origin_of(proxy)
        assert origin is not None
        return origin


_NO_NUMBER, _NO_ZERO = "no number", "no 0"


def _believed(other: Any) -> str | None:
    """The numbers that are not believed of a difference to ``other``: any number, or 0 alone. None for a number: a
    shift by it is no distance. A set or a span that the test names may be taken out of a larger one."""
    if isinstance(other, (*_SETS, datetime.timedelta)):
        return _NO_ZERO
    if isinstance(other, datetime.date) or not (isinstance(other, numbers.Number) or type(other) in PLAIN):
        return _NO_NUMBER
    return None


def _is_empty(value: Any) -> bool:
    return value is not NotImplemented and type(value) in PLAIN and not value


def _decoys(item: Any) -> list[Any]:
    """Random values of an item's kind, of its length where it is text."""
    if isinstance(item, str):
        letters = "abcdefghijklmnopqrstuvwxyz"
        return ["".join(secrets.choice(letters) for _ in range(max(len(item), 12) + n)) for n in range(3)]
    if type(item) in (int, float):
        return [type(item)(sign * secrets.randbits(60)) for sign in (1, -1, 1)]
    return [secrets.token_hex(8), secrets.randbits(60), -secrets.randbits(60)]


def _is_unequal(answer: Any) -> bool:
    """Any other answer may count as equal: 1 does, and so may an object."""
    return answer is False or answer is NotImplemented


def _compared(name: str, one: Any, other: Any) -> Any:
    # Not ``one == other``: a NotImplemented is for Python to go on with, as after any special method.
    return getattr(type(one), name)(one, other)


def _is_step(own: Any, name: str) -> bool:
    """True for such a method of an iterator. An object that sends messages has nothing that could be left."""
    return name in STEPS and any(
        each in vars(base) for each in ("__next__", "__anext__") for base in type(own).__mro__
    )


def _has_length(own: Any) -> bool:
    # Not ``hasattr``: the class of its class has one.
    return any("__len__" in vars(base) for base in type(own).__mro__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
