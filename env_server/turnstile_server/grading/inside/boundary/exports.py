"""Encoding of one side's own objects for the other: numbers for objects, descriptions for their classes.

    ["h", number, class]            an object          ["h", number, class, value]   one that is a plain value, too
    ["o", number]                   the receiver's own object, given back
    ["K", class]                    a class; ``class`` is a number, or a description the first time
    ["n", module, name, fallback]   a type (or, to the work, a function) of the standard library
    ["M", name]                     a module of the standard library, to the work
    ["W", number, name]             a module of the work
    ["x", number, class, arguments, text, attributes, cause]      an exception

Objects are kept as long as the process lives, at most ``MAX_OBJECTS``; so an object has one proxy, and identity
holds.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, Union

from .guard import TestsRules, WorkRules, is_harmless, is_standard, may_be_raised, nearest_builtin
from .operations import COPIES, FIXED, plain_base, specials_of
from .proxies import BoundaryError, ModuleProxy, origin_of
from .wire import PLAIN, Encoder, WireError

MAX_OBJECTS = 1_000_000
_MAX_TEXT = 4000
_MAX_CAUSES = 5
_COROUTINE = 0x80
"""The flag of a coroutine function's code (``inspect``, which is slow to import, has it as CO_COROUTINE)."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
Rules = Union[WorkRules, TestsRules]  # noqa: UP007 - Python 3.9


class Exports:
    """One side's objects that the other knows."""

    def __init__(self, peer: Any, rules: Rules) -> None:
        self._peer = peer
        self._rules = rules
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._classes: dict[Any, int] = {}
        self._untold: list[Any] = []

    def told(self, arrived: bool) -> None:
        """The message is sent, with every description that was made for it; or it is not."""
        for key in () if arrived else self._untold:
            self._classes.pop(key, None)
        self._untold = []

    def own(self, number: Any) -> Any:
        """One's own object by its number. Raises WireError."""
        if type(number) is not int or not 0 <= number < len(self._objects):
            raise WireError(f"there is no object {number!r}")
        return self._objects[number]

    def knows(self, value: Any) -> bool:
        """True if the other side was given this very object."""
        number = self._numbers.get(id(value))
        return number is not None and self._objects[number] is value

    def export(self, value: Any, encoder: Encoder, depth: int) -> Any:
        """Encode a value that is not plain, for ``Encoder``. Raises BoundaryError, WireError."""
        origin = origin_of(value)
        if origin is not None and origin.peer is self._peer:
            return ["o", origin.number]
        if isinstance(value, types.TracebackType):
            return None  # as the third argument of an ``__exit__``
        self._rules.check_export(value)
        if isinstance(value, type):
            return ["K", self._class(value)] if self._named(value) is None else self._named(value)
        if isinstance(value, BaseException):
            return self.error(value, encoder, depth)
        if self._rules.names_functions():
            if isinstance(value, types.ModuleType) and is_standard(value.__name__):
                return ["M", value.__name__]
            if isinstance(value, types.ModuleType) and not isinstance(value, ModuleProxy):
                raise BoundaryError(f"the module {value.__name__} may not be passed to the work")
            if isinstance(value, _FUNCTIONS) and (named := self._named(value)) is not None:
                return named
            if type(value) is functools.partial:
                return encoder.contents("p", [value.func, value.args, value.keywords], depth)
        if isinstance(value, types.ModuleType):
            return ["W", self.number(value), str(value.__name__)]
        base = plain_base(type(value))
        shown = ["h", self.number(value), self._class(type(value), _is_async(value))]
        if base in FIXED:
            shown.append(encoder.encode(COPIES[base](value), depth + 1))
        return shown

    def error(self, error: BaseException, encoder: Encoder, depth: int) -> Any:
        """An exception. What its own methods do wrong is its own loss."""
        origin = origin_of(error)
        if origin is not None and origin.peer is self._peer:
            return ["o", origin.number]
        self._peer.failures.crosses(error)
        kind = type(error)
        named = self._named(kind)
        arguments: tuple[Any, ...] = error.args if type(error.args) is tuple else ()
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            arguments = (error.errno, error.strerror, error.filename)
        cause = error.__cause__ if depth < _MAX_CAUSES else None
        attributes = {n: v for n, v in vars(error).items() if type(n) is str and type(v) in PLAIN} if named else {}
        said: list[Any] = []
        for part in (arguments, attributes, cause):
            try:
                said.append(encoder.encode(part, depth + 1))
            except (WireError, BoundaryError):
                said.append(["t", _text(error)] if part is arguments else None)
        shown = self._class(kind) if named is None else named
        return ["x", self.number(error), shown, said[0], _text(error), said[1], said[2]]

    def number(self, value: Any) -> int:
        """The number by which the other side knows an object."""
        number = self._numbers.get(id(value))
        if number is None:
            if len(self._objects) >= MAX_OBJECTS:
                raise WireError(f"more than {MAX_OBJECTS} objects have crossed")
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    def _named(self, value: Any) -> list[Any] | None:
        """A type or function of the standard library, by name."""
        # Any object may come here; a function of C, or an instance, need not have a name.
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if type(module) is not str or type(name) is not str or not is_standard(module):
            return None
        here: Any = sys.modules.get(module)
        for part in name.split("."):
            # Past ``__getattr__``: that of a proxy would ask the other side.
            here = getattr(here, "__dict__", {}).get(part)
        if here is not value:
            return None
        if not self._rules.names_functions() and isinstance(value, type) and not is_harmless(value):
            return None
        fallback = nearest_builtin(value) if isinstance(value, type) and issubclass(value, BaseException) else None
        if fallback is not None and not may_be_raised(value):
            return ["n", "builtins", fallback, fallback]
        return ["n", module, name, fallback]

    def _class(self, kind: type, is_async: bool = False) -> Any:
        """A number where the other side knows the class, else its description."""
        key = (kind, is_async)
        if key in self._classes:
            return self._classes[key]
        if len(self._classes) > MAX_OBJECTS:
            raise WireError("too many classes have crossed")
        told = self._describe(kind, is_async)
        # Two objects, one class: a function and a coroutine function are told apart.
        number = self.number(kind) if not is_async else self.number((kind, is_async))
        self._classes[key] = number
        self._untold.append(key)
        return {"number": number, **told}

    def _describe(self, kind: type, is_async: bool) -> dict[str, Any]:
        exception = issubclass(kind, BaseException)
        base = None if exception else plain_base(kind)
        bases: list[Any] = []
        for one in kind.__bases__:
            origin = origin_of(one)
            if one is object or (origin is not None and origin.peer is self._peer):
                continue
            if exception and issubclass(one, BaseException):
                bases.append(self._named(one) or self._class(one))
            elif not exception and base is None and not is_standard(one.__module__):
                bases.append(self._class(one))
        abcs = [one.__name__ for one in kind.__mro__ if one.__module__ == "collections.abc"]
        return {
            "name": str(kind.__name__),
            "qualname": str(kind.__qualname__),
            "module": str(kind.__module__),
            "doc": kind.__doc__ if type(kind.__doc__) is str else None,
            "bases": bases,
            "specials": [] if exception or base in FIXED else specials_of(kind),
            "hashable": kind.__hash__ is not None,
            "exception": exception,
            "fixed": base if base in FIXED else None,
            "copies": base,
            "abcs": abcs,
            "async": is_async,
            "coroutine": kind is types.CoroutineType,
        }


def _is_async(value: Any) -> bool:
    function = value.__func__ if isinstance(value, types.MethodType) else value
    return isinstance(function, types.FunctionType) and bool(function.__code__.co_flags & _COROUTINE)


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:_MAX_TEXT]
    except BaseException as other:  # noqa: BLE001 - whatever the exception's own code raises
        return f"<its text cannot be made: {type(other).__name__}>"
