"""Proxies for objects of the other side: a real class for each of its classes, an instance for each object.

A proxy's class has the special methods that the class it stands for has, and the same bases, so ``isinstance``,
``len``, ``in``, ``with``, iteration and operators work. Attributes are asked for as they are used. A class of
exceptions has its built-in bases, too, so ``assertRaises`` works with either.

What must hold: an instance of a subclass of ``int``, ``str``, ``tuple`` and their kind *is* its plain value here,
with that type's own methods; no method of the other side can change what it equals.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import collections.abc
import dis
import sys
import types
from collections.abc import Callable, Generator
from typing import Any, Protocol

from .operations import (
    ARITHMETIC,
    AWAITABLE,
    COMPARISONS,
    CONTENTS,
    IN_PLACE,
    JUDGED,
    MEASURES,
    OPERATIONS,
)

_MEMORY = ("__array", "__cuda_array", "__dlpack", "__dataframe", "__buffer")
"""Protocols by which an object names memory of this process, or takes over comparisons (numpy)."""


_FIELDS = "__dataclass_fields__"


class BoundaryError(BaseException):
    """The boundary refuses, or is broken. Not an ``Exception``: no ``assertRaises(Exception)`` may take it for
    something that the work raised."""


_STAR = 2
"""``INTRINSIC_IMPORT_STAR`` of CPython's bytecode, from 3.12 on."""


class Operators(Protocol):
    """The part of ``proxy_operators.ProxyOperators`` that proxies need."""

    def compare(self, name: str, own: Any, other: Any) -> Any: ...

    def plain(self, own: Any) -> Any: ...

    def arithmetic(self, name: str, own: Any, args: tuple[Any, ...]) -> Any: ...

    def measure(self, name: str, own: Any, args: tuple[Any, ...]) -> Any: ...

    def contains(self, own: Any, item: Any) -> bool: ...

    def content(self, name: str, own: Any) -> Any: ...

    def judged(self, name: str, own: Any) -> Any: ...

    def leave(self, own: Any, args: tuple[Any, ...]) -> Any: ...

    def leave_async(self, own: Any, args: tuple[Any, ...]) -> Any: ...


class Asker(Protocol):
    """The part of ``peer.Peer`` that proxies need."""

    @property
    def operators(self) -> Operators: ...

    @property
    def failures(self) -> Any: ...

    def ask(self, op: str, *args: Any) -> Any: ...

    def awaited(self, own: Any) -> Generator[Any, Any, Any]: ...


class Origin:
    """Origin of a proxy. ``copies``: the built-in base of its class whose value it has, or None."""

    __slots__ = ("apart", "copies", "given", "mixed", "number", "peer", "running", "steps")

    def __init__(self, peer: Asker, number: int, copies: str | None) -> None:
        self.peer = peer
        self.number = number
        self.copies = copies
        self.mixed = False
        """It came of arithmetic with a plain number (``proxy_operators``)."""
        self.apart: str | None = None
        """It says how far something is from a value of the test's: which of its numbers are not believed."""
        self.steps = False
        """A method of an iterator, or what such a method gave to be awaited: it may say that nothing is left."""
        self.given = False
        """A class or a module that came as a result, where a test expects a value."""
        self.running: Generator[Any, Any, Any] | None = None
        """The run of a coroutine, from the first ``send`` of an event loop on."""


def origin_of(value: Any) -> Origin | None:
    """None: not a proxy."""
    kind = type(value)
    if kind is ProxyClass:
        return type.__getattribute__(value, "_boundary_class_")  # type: ignore[no-any-return]
    if isinstance(value, (BaseException, ModuleProxy)):
        return vars(value).get("_boundary_")
    if type(kind) is ProxyClass:
        return object.__getattribute__(value, "_boundary_")  # type: ignore[no-any-return]
    return None


class ModuleProxy(type(sys)):  # type: ignore[misc] # types.ModuleType
    """A module of the other side."""

    def __getattr__(self, name: str) -> Any:
        origin: Origin = vars(self)["_boundary_"]
        if name == "__all__":
            _refuse_all_names(self.__name__, sys._getframe(1))
            return origin.peer.ask("names", self)
        if name.startswith("__") and name.endswith("__") and name not in ("__version__", "__author__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on this side")
        if name in JUDGED and origin.given:
            return origin.peer.operators.judged(name, self)
        return origin.peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets submodules as attributes, and its own names.
        if name.startswith("__") or isinstance(value, ModuleProxy):
            super().__setattr__(name, value)
        else:
            vars(self)["_boundary_"].peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            super().__delattr__(name)
        else:
            vars(self)["_boundary_"].peer.ask("del", self, name)

    def __dir__(self) -> list[str]:
        return list(vars(self)["_boundary_"].peer.ask("names", self))


def _refuse_all_names(module: str, frame: types.FrameType) -> None:
    """Refuses ``from module import *``: the other side would choose what names mean here, such as ``zip`` and
    ``all``. ``frame`` is at that instruction, which is a call of the interpreter's own from Python 3.12 on."""
    at = next((each for each in dis.get_instructions(frame.f_code) if each.offset == frame.f_lasti), None)
    if at is not None and (at.opname == "IMPORT_STAR" or (at.opname == "CALL_INTRINSIC_1" and at.arg == _STAR)):
        raise BoundaryError(
            f"`from {module} import *` lets the other process say what names mean in the hidden tests, those of "
            "builtins, too; import the names that you test, or mark the task `trust: in_process`"
        )


class ProxyClass(type):
    """The class of classes that stand for one of the other side."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **more: Any) -> Any:
        raise BoundaryError(
            f"the class {name!r} inherits from a class of the other process, which cannot be done across the "
            "boundary of tests and work; pass an object with its methods, or mark the task `trust: in_process`"
        )

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _class_origin(cls).peer.ask("call", cls, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name == "__abstractmethods__" or name.startswith(("_boundary_", *_MEMORY)):
            raise AttributeError(name)
        origin = _class_origin(cls)
        if name == _FIELDS:
            return _fields_here(origin.peer, cls)
        if name in JUDGED and origin.given:
            return origin.peer.operators.judged(name, cls)
        return origin.peer.ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith(("__abc", "_abc")):
            super().__setattr__(name, value)
        else:
            _class_origin(cls).peer.ask("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        _class_origin(cls).peer.ask("del", cls, name)

    def __iter__(cls) -> Any:
        return _class_origin(cls).peer.ask("op", "__iter__", cls, (), {})

    def __len__(cls) -> int:
        length: int = _class_origin(cls).peer.ask("op", "__len__", cls, (), {})
        return length

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls, item: Any) -> bool:
        return _class_origin(cls).peer.operators.contains(cls, item)

    def __getitem__(cls, item: Any) -> Any:
        return _class_origin(cls).peer.ask("op", "__getitem__", cls, (item,), {})


def _class_origin(cls: type) -> Origin:
    found: Origin = type.__getattribute__(cls, "_boundary_class_")
    return found


def _origin(proxy: Any) -> Origin:
    found: Origin = object.__getattribute__(proxy, "_boundary_")
    return found


def _get(self: Any, name: str) -> Any:
    if name == "_boundary_" or name.startswith(_MEMORY):
        raise AttributeError(name)
    if name == _FIELDS:
        return _fields_here(_origin(self).peer, self)
    if name in SPECIALS:  # as Python does, that of the class alone counts
        raise AttributeError(name)
    if name in JUDGED:
        return _origin(self).peer.operators.judged(name, self)
    return _origin(self).peer.ask("get", self, name)


def _fields_here(peer: Asker, own: Any) -> Any:
    """The fields of a dataclass, made here: ``dataclasses`` tells them by a mark that it knows by identity, so it
    would find none in what crosses, and every ``asdict`` be equal to every other."""
    told = peer.ask("get", own, _FIELDS)
    module = sys.modules.get("dataclasses")
    if module is None or type(told) is not dict:
        return told
    fields = [
        (name, object, vars(module)["field"](init=bool(field.init)))
        for name, field in told.items()
        if str(field._field_type.name) == "_FIELD"
    ]
    return vars(vars(module)["make_dataclass"]("Fields", fields))[_FIELDS]


def _set(self: Any, name: str, value: Any) -> None:
    _origin(self).peer.ask("set", self, name, value)


def _delete(self: Any, name: str) -> None:
    _origin(self).peer.ask("del", self, name)


def _dictionary(self: Any) -> Any:
    return _origin(self).peer.ask("get", self, "__dict__")


def _directory(self: Any) -> Any:
    return _origin(self).peer.ask("names", self)


def _no_copy(self: Any, protocol: int) -> Any:
    raise BoundaryError("an object of the other process cannot be copied or pickled across the boundary")


def _special(name: str) -> Callable[..., Any]:
    if name in COMPARISONS:
        return lambda self, other: _origin(self).peer.operators.compare(name, self, other)
    if name in ARITHMETIC or name in IN_PLACE:
        return lambda self, *args: _origin(self).peer.operators.arithmetic(name, self, args)
    if name in MEASURES:
        return lambda self, *args: _origin(self).peer.operators.measure(name, self, args)
    if name in CONTENTS:
        return lambda self: _origin(self).peer.operators.content(name, self)
    if name == "__contains__":
        return lambda self, item: _origin(self).peer.operators.contains(self, item)
    if name == "__exit__":
        return lambda self, *args: _origin(self).peer.operators.leave(self, args)
    if name == "__aexit__":
        return lambda self, *args: _origin(self).peer.operators.leave_async(self, args)
    if name == AWAITABLE:
        return lambda self: _origin(self).peer.awaited(self)
    return lambda self, *args, **kwargs: _origin(self).peer.ask("op", name, self, args, kwargs)


SPECIALS = {name: _special(name) for name in (*OPERATIONS, AWAITABLE)}


class _Coroutine:
    """``send``, ``throw`` and ``close`` for what stands for a coroutine, so that event loops take it for one."""

    __slots__ = ()

    def send(self, value: Any) -> Any:
        return self._running().send(value)

    def throw(self, *error: Any) -> Any:
        return self._running().throw(*error)

    def close(self) -> None:
        return

    def _running(self) -> Generator[Any, Any, Any]:
        origin = _origin(self)
        if origin.running is None:
            origin.running = origin.peer.awaited(self)
        return origin.running


def _marker(module: str, name: str) -> property:
    """The marker that ``iscoroutinefunction`` looks for. Private to asyncio and inspect: it may be missing."""
    return property(lambda self: vars(sys.modules[module])[name] if module in sys.modules else None)


_ASYNC_FUNCTION = {
    "_is_coroutine": _marker("asyncio.coroutines", "_is_coroutine"),
    "_is_coroutine_mark": _marker("inspect", "_is_coroutine_mark"),
}
_ROOT: dict[str, Any] = {
    "__getattr__": _get,
    "__setattr__": _set,
    "__delattr__": _delete,
    "__dir__": _directory,
    "__reduce_ex__": _no_copy,
}
_ABCS = ("Mapping", "MutableMapping", "Sequence", "MutableSequence", "Set", "MutableSet")


def make_class(peer: Asker, number: int, told: dict[str, Any], bases: tuple[type, ...]) -> type:
    """The class that stands for number ``number``. ``told``: what ``exports.describe`` said of it; ``bases``:
    those of its bases that are classes here."""
    namespace: dict[str, Any] = {
        "__module__": told["module"],
        "__qualname__": told["qualname"],
        "__doc__": told["doc"],
    }
    fixed, exception = told["fixed"], told["exception"]
    if exception:
        # Attributes that an exception here sets on itself (its traceback, a note) stay here.
        namespace.update({"__getattr__": _error_attribute, "__str__": _error_text, "__reduce_ex__": _no_copy})
        namespace.pop("__doc__")
    elif fixed is not None:
        namespace.update({"__getattr__": _get, "__reduce_ex__": _no_copy})
    else:
        namespace["__slots__"] = ()
        namespace["__dict__"] = property(_dictionary)
        namespace.update({name: SPECIALS[name] for name in told["specials"]})
        if not told["hashable"]:
            namespace["__hash__"] = None
        elif "__hash__" not in namespace:
            namespace["__hash__"] = object.__hash__
        if told["module"] == "builtins":
            # Of a function, not of the class of functions.
            namespace["__doc__"] = property(lambda self: _get(self, "__doc__"))
        if told["async"]:
            namespace.update(_ASYNC_FUNCTION)
    made: type = type.__new__(ProxyClass, told["name"], bases, namespace)
    type.__setattr__(made, "_boundary_class_", Origin(peer, number, None))
    for name in told["abcs"]:
        if name in _ABCS:
            getattr(collections.abc, name).register(made)
    if told["coroutine"]:
        collections.abc.Coroutine.register(made)
    return made


def root_class() -> type:
    """The base of every proxy that is neither an exception nor a plain value."""
    namespace = {**_ROOT, "__slots__": ("_boundary_", "__weakref__"), "__module__": "boundary"}
    return type.__new__(ProxyClass, "Remote", (), namespace)


def coroutine_class(root: type) -> type:
    """The same, of coroutines."""
    methods = {name: vars(_Coroutine)[name] for name in ("send", "throw", "close", "_running")}
    return type.__new__(
        ProxyClass, "RemoteCoroutine", (root,), {**methods, "__slots__": (), "__module__": "boundary"}
    )


def make_instance(cls: type, origin: Origin, value: Any = None) -> Any:
    """A proxy. ``value``: the plain value of one whose class has a fixed one."""
    if origin.copies is None or value is None:
        made: Any = object.__new__(cls)
    else:
        base = type(value)
        made = base.__new__(cls, value)
    object.__setattr__(made, "_boundary_", origin)
    return made


def _error_attribute(self: Any, name: str) -> Any:
    origin = vars(self).get("_boundary_")
    if origin is None or (name.startswith("__") and name.endswith("__")):
        raise AttributeError(name)
    if name in JUDGED:
        return origin.peer.operators.judged(name, self)
    return origin.peer.ask("get", self, name)


def _error_text(self: Any) -> str:
    text = vars(self).get("_boundary_text_")
    return text if isinstance(text, str) else ", ".join(map(str, self.args))
