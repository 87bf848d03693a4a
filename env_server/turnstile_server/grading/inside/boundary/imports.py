"""Proxies and exceptions for what the other side shows (the format is in ``exports``).

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
from typing import Any

from .exports import Exports, Rules
from .guard import may_be_raised
from .proxies import ModuleProxy, Origin, ProxyClass, coroutine_class, make_class, make_instance, root_class
from .wire import Decoder, WireError

MAX_BASES = 64


class Imports:
    """The other side's objects that are known here. A number has one proxy, so identity holds."""

    def __init__(self, peer: Any, rules: Rules, exports: Exports) -> None:
        self._peer = peer
        self._rules = rules
        self._exports = exports
        self._known: dict[int, Any] = {}
        self._classes: dict[int, tuple[type, str | None]] = {}
        self._root = root_class()
        self._coroutine = coroutine_class(self._root)

    def load(self, said: list[Any], decoder: Decoder) -> Any:
        """Decode an item that is no plain value. Raises WireError and what ``Decoder`` catches."""
        tag = said[0]
        if tag == "o":
            return self._exports.own(said[1])
        if tag == "h":
            return self._object(said, decoder)
        if tag == "K":
            return self._class(said[1])[0]
        if tag == "n":
            return self._rules.named(_text(said[1]), _text(said[2]))
        if tag == "M":
            return self._rules.module(_text(said[1]))
        if tag == "W":
            return self.module(_number(said[1]), _text(said[2]), None)
        if tag == "x":
            return self._error(said, decoder)
        if tag == "p" and not self._rules.strict:
            function, args, keywords = (decoder.decode(item) for item in said[1:])
            return functools.partial(function, *args, **keywords)
        raise WireError(f"there is no kind of value {tag!r}")

    def module(self, number: int, name: str, doc: str | None) -> ModuleProxy:
        """The proxy of a module."""
        known = self._known.get(number)
        if not isinstance(known, ModuleProxy):
            known = self._known[number] = ModuleProxy(name, doc)
            known.__dict__["_boundary_"] = Origin(self._peer, number, None)
        return known

    def _object(self, said: list[Any], decoder: Decoder) -> Any:
        number = _number(said[1])
        if number in self._known:
            if isinstance(said[2], dict):
                self._class(said[2])
            return self._known[number]
        cls, copies = self._class(said[2])
        value = decoder.decode(said[3]) if len(said) > 3 else None
        if (value is not None) != (issubclass(cls, _FIXED)):
            raise WireError("a value of another kind than its class")
        if value is not None and type(value) is not vars(builtins)[copies or "object"]:
            raise WireError("a value of another kind than its class")
        made = self._known[number] = make_instance(cls, Origin(self._peer, number, copies), value)
        return made

    def _class(self, told: Any) -> tuple[type, str | None]:
        if not isinstance(told, dict):
            return self._classes[_number(told)]
        number = _number(told["number"])
        if number in self._classes:
            return self._classes[number]
        bases: list[type] = []
        for base in told["bases"][:MAX_BASES]:
            named = isinstance(base, list) and base[0] == "n"
            bases.append(self._standard_error(base) if named else self._class(base)[0])
        fixed = told["fixed"]
        if told["exception"]:
            bases = self._of_one_kind(bases) or [Exception]
        elif fixed is not None:
            bases = [{one.__name__: one for one in _FIXED}[fixed]]
        else:
            bases = bases or [self._coroutine if told["coroutine"] else self._root]
        for word in ("name", "qualname", "module"):
            _text(told[word])
        try:
            made = make_class(self._peer, number, told, tuple(bases))
        except TypeError:  # bases that do not go together here, where some of them are missing
            made = make_class(self._peer, number, told, (bases[0],))
        self._classes[number] = (made, told["copies"])
        self._known[number] = made
        return self._classes[number]

    def _of_one_kind(self, bases: list[type]) -> list[type]:
        """Strict: those of an exception's bases that go with the first. One that were a ValueError and a TypeError
        at once would be what any test expects, without the work's having found what is wrong."""
        kept: list[type] = []
        for base in bases if self._rules.strict else ():
            if all(_goes_with(base, other) for other in kept):
                kept.append(base)
        return kept if self._rules.strict else bases

    def _standard_error(self, said: list[Any]) -> type:
        """A class of exceptions of the standard library, or the nearest that is here."""
        try:
            kind = self._rules.named(_text(said[1]), _text(said[2]))
        except LookupError:
            kind = vars(builtins).get(_text(said[3]))
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            return RuntimeError
        return RuntimeError if self._rules.strict and not may_be_raised(kind) else kind

    def _error(self, said: list[Any], decoder: Decoder) -> BaseException:
        _, number, told, arguments, text, attributes, cause = said
        number = _number(number)
        args = decoder.decode(arguments)
        args = args if type(args) is tuple else ()
        known = self._known.get(number)
        if isinstance(known, BaseException):
            return known
        if isinstance(told, list):
            kind = self._standard_error(told)
            error = _made(kind, args)
            extra = decoder.decode(attributes)
            if type(extra) is dict:
                # Not in the place of a method, such as ``with_traceback``.
                error.__dict__.update(
                    {name: value for name, value in extra.items() if type(name) is str and not hasattr(kind, name)}
                )
        else:
            error = _made(self._class(told)[0], args)
            error.__dict__["_boundary_text_"] = _text(text)
        error.__dict__["_boundary_"] = Origin(self._peer, number, None)
        reason = decoder.decode(cause)
        if isinstance(reason, BaseException):
            error.__cause__ = reason
        self._known[number] = error
        return error


def _goes_with(one: type, other: type) -> bool:
    """True if the two classes of exceptions have one most special class of the standard library."""
    first, second = (
        next(each for each in kind.__mro__ if not isinstance(each, ProxyClass)) for kind in (one, other)
    )
    return issubclass(first, second) or issubclass(second, first)


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An instance with these arguments, whatever its ``__init__`` wants."""
    try:
        error: BaseException = kind.__new__(kind, *args)
    except (TypeError, ValueError):
        error = kind.__new__(kind, "", []) if issubclass(kind, _GROUPS) else kind.__new__(kind)
    if kind.__init__ is not object.__init__ and kind.__module__ == "builtins":
        with contextlib.suppress(TypeError, ValueError):
            kind.__init__(error, *args)
    error.args = args
    return error


_GROUPS: tuple[type, ...] = tuple(
    kind for kind in (vars(builtins).get("BaseExceptionGroup"),) if isinstance(kind, type)
)
_FIXED = (int, float, complex, str, bytes, tuple, frozenset)


def _number(said: Any) -> int:
    if type(said) is not int or said < 0:
        raise WireError("not the number of an object")
    return said


def _text(said: Any) -> str:
    if type(said) is not str:
        raise WireError("not a name")
    return said
