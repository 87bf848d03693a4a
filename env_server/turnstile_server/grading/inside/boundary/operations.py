"""The special methods that cross: their names, and what the side that owns the object does for each.

Python looks special methods up on the type, so a proxy's class defines exactly those that the class it stands for
has.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import builtins
import math
import operator
import os
from collections.abc import Callable
from typing import Any

_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor", "matmul"]
_FUNCTION = {"and": operator.and_, "or": operator.or_}


def _function(name: str) -> Callable[[Any, Any], Any]:
    found: Callable[[Any, Any], Any] = _FUNCTION.get(name) or getattr(operator, name)
    return found


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda own, other: function(other, own)


def _method(name: str) -> Callable[..., Any]:
    return lambda own, *args, **kwargs: getattr(own, name)(*args, **kwargs)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": _function(name) for name in _BINARY},
    **{f"__r{name}__": _reflected(_function(name)) for name in _BINARY},
    "__divmod__": divmod,
    "__rdivmod__": _reflected(divmod),
    "__pow__": pow,
    "__rpow__": _reflected(pow),
}
"""Operations of two operands."""
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    f"__{name}__": getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge")
}
IN_PLACE: dict[str, Callable[..., Any]] = {
    **{f"__i{name}__": getattr(operator, "i" + name) for name in _BINARY},
    "__ipow__": operator.ipow,
}
_ALONE = ["abs", "bool", "ceil", "complex", "float", "floor", "index", "int", "invert", "neg", "pos", "round"]
MEASURES = frozenset(f"__{name}__" for name in (*_ALONE, "trunc"))
"""Those that make a number, or a truth, of an object alone."""
DISTANCES = frozenset(f"__{place}{name}__" for place in ("", "r", "i") for name in ("sub", "xor"))
"""Those by which a test finds how far a result is from what it expects."""
PREDICATES = frozenset(
    name
    for kind, names in (
        ("", "startswith endswith issubset issuperset isdisjoint"),
        ("is", "alnum alpha ascii decimal digit identifier lower numeric printable space title upper"),
        ("is_", "absolute dir file integer relative_to symlink"),
    )
    for name in (kind + each for each in names.split())
)
"""Methods of plain values (text, sets, paths, numbers) that say yes or no of what a test expects of them."""
SET_METHODS = {
    "difference": "__sub__",
    "symmetric_difference": "__xor__",
    "intersection": "__and__",
    "union": "__or__",
}
"""Those of sets that are operators, by another name."""
HELD = frozenset(("keys", "values", "items", "index", "count", "find", "rindex", "rfind"))
"""Methods of containers that say what they hold, and where."""
JUDGED = PREDICATES | HELD | frozenset(SET_METHODS)
"""Methods whose answers ``proxy_operators`` weighs."""
OPERATIONS: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    **COMPARISONS,
    **IN_PLACE,
    "__len__": len,
    "__length_hint__": operator.length_hint,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__contains__": operator.contains,
    "__iter__": iter,
    "__next__": next,
    "__reversed__": reversed,
    "__call__": lambda own, *args, **kwargs: own(*args, **kwargs),
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__index__": operator.index,
    "__round__": round,
    "__trunc__": math.trunc,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__invert__": operator.invert,
    "__abs__": abs,
    "__hash__": hash,
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__bytes__": bytes,
    "__fspath__": os.fspath,
    **{f"__{name}__": _method(f"__{name}__") for name in ("enter", "exit", "aenter", "aexit", "aiter", "anext")},
}
CONTENTS: dict[str, Callable[[Any], Any]] = {"__iter__": iter, "__len__": len, "__reversed__": reversed}
"""Those that say what an object holds."""
STEPS = frozenset(("__next__", "__anext__", "send", "throw", "asend", "athrow"))
"""Methods for which a StopIteration or StopAsyncIteration means that nothing is left."""
AWAITABLE = "__await__"
"""A special method, too; it takes a conversation of its own (``peer``)."""

COPIES: dict[str, Callable[[Any], Any]] = {
    "int": int.__pos__,
    "float": float.__pos__,
    "complex": complex.__pos__,
    "str": str.__str__,
    "bytes": lambda v: bytes.__getitem__(v, slice(None)),
    "tuple": lambda v: tuple.__getitem__(v, slice(None)),
    "frozenset": lambda v: frozenset(frozenset.__iter__(v)),
    "list": list,
    "dict": lambda v: {key: v[key] for key in v},
    "set": set,
    "bytearray": lambda v: bytearray(bytearray.__iter__(v)),
}
"""The plain value of an instance of a subclass, by the name of the built-in base: of what can change, what its own
iteration gives, so that what it holds and what it equals are one value."""
FIXED = ("int", "float", "complex", "str", "bytes", "tuple", "frozenset")
"""Bases whose instances cannot change, so that they cross with their value."""


def plain_base(kind: type) -> str | None:
    """The built-in base of a class whose instances have a plain value, as in ``COPIES``."""
    for base in kind.__mro__:
        if base.__module__ == "builtins" and base.__name__ in COPIES and getattr(builtins, base.__name__) is base:
            return str(base.__name__)
    return None


def specials_of(kind: type) -> list[str]:
    """The special methods that a class and its bases have, ``object`` and built-in bases of plain values apart."""
    found = set()
    for base in kind.__mro__:
        if base is object:
            continue
        for name in (*OPERATIONS, AWAITABLE):
            if vars(base).get(name) is not None:
                found.add(name)
    if getattr(kind, "__hash__", None) in (None, object.__hash__):
        found.discard("__hash__")
    return sorted(found)
