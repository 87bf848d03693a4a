"""The operations that one side does for the other, on its own objects.

``get``, ``set``, ``del`` (an attribute), ``call``, ``op`` (a special method), ``copy`` (the plain value of an
instance of a built-in type's subclass), ``items`` (what iterating gives), ``names``, ``await``, ``echo``; what
more there is (``import``; ``write`` and ``read`` of the standard streams) is added by the program of each side.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from .operations import COPIES, OPERATIONS, plain_base
from .proxies import BoundaryError

Operation = Callable[..., Any]
_OF_OBJECTS = frozenset(("get", "set", "del", "call", "copy", "items", "names", "await", "op"))
"""Their target is their first argument, of ``op`` the second."""


class _Thread(threading.local):
    """``loop``: a thread's event loop, for what it awaits for the other side."""

    loop: Any = None


class Service:
    """One side's operations. ``peer``: for its rules."""

    def __init__(self, peer: Any) -> None:
        self.after_each: Callable[[], None] | None = None
        """Called when an operation has ended, however it did."""
        self._peer = peer
        self._thread = _Thread()
        self._operations: dict[str, Operation] = {
            "get": self._get,
            "set": self._set,
            "del": self._delete,
            "call": self._call,
            "op": self._operate,
            "copy": self._copy,
            "items": list,
            "names": self._names,
            "await": self._await,
            "echo": lambda value: value,
        }

    def add(self, name: str, operation: Operation) -> None:
        self._operations[name] = operation

    def perform(self, name: str, args: tuple[Any, ...]) -> Any:
        """Raises whatever the operation raises."""
        if name not in self._operations:
            raise RuntimeError(f"there is no operation {name!r}")
        if self._peer.rules.strict and name in _OF_OBJECTS:
            # What a value can do here (``"{0.__globals__}".format``), it could do with a test's object.
            target = args[1 if name == "op" else 0 :][:1]
            if not target or not self._peer.exports.knows(target[0]):
                raise RuntimeError(f"{name} is for objects that a test handed out")
        try:
            return self._operations[name](*args)
        finally:
            if self.after_each is not None:
                self.after_each()

    def crossing(self, error: BaseException) -> BaseException:
        """The exception that the other side gets for one that ended an operation. One of the boundary itself is
        kept, to be raised again where the other side cannot catch it."""
        if isinstance(error, BoundaryError):
            self._peer.refused = self._peer.refused or error
            return RuntimeError(str(error))
        return error

    def _get(self, target: Any, name: str) -> Any:
        self._check(target, name, self._peer.rules.may_get(target, name), "read")
        return getattr(target, name)

    def _set(self, target: Any, name: str, value: Any) -> None:
        self._check(target, name, self._peer.rules.may_set(target, name), "set")
        setattr(target, name, value)

    def _delete(self, target: Any, name: str) -> None:
        self._check(target, name, self._peer.rules.may_set(target, name), "deleted")
        delattr(target, name)

    def _check(self, target: Any, name: str, allowed: bool, done: str) -> None:
        if type(name) is not str or not allowed:
            raise AttributeError(
                f"{type(target).__name__!s}.{name!s} cannot be {done} from the other process (without "
                "`trust: in_process`)"
            )

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(target, "__call__", self._peer.rules.may_call(target), "called")
        return target(*args, **kwargs)

    def _operate(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "__call__":
            return self._call(target, args, kwargs)
        return OPERATIONS[name](target, *args, **kwargs)

    def _copy(self, target: Any) -> Any:
        base = plain_base(type(target))
        if base is None:
            raise TypeError(f"{type(target).__name__} has no plain value")
        return COPIES[base](target)

    def _names(self, target: Any) -> list[str]:
        # A module need not say what is public.
        listed = getattr(target, "__all__", None) if isinstance(target, type(sys)) else None
        names = listed if isinstance(listed, (list, tuple)) else dir(target)
        return [str(name) for name in names if listed is not None or not str(name).startswith("_")]

    def _await(self, target: Any) -> Any:
        """Runs an awaitable to its end, in this thread's event loop, or where that runs already in another
        thread."""
        import asyncio  # noqa: PLC0415 - costs 50 ms, and few tests wait for anything

        async def run() -> Any:
            return await target

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop(asyncio).run_until_complete(run())
        outcome: list[Any] = []
        partners = self._peer.partners()

        def elsewhere() -> None:
            self._peer.speak_for(partners)
            try:
                outcome.append((True, asyncio.run(run())))
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
                outcome.append((False, error))

        thread = threading.Thread(target=elsewhere, name="boundary await", daemon=True)
        thread.start()
        thread.join()
        done, value = outcome[0]
        if not done:
            raise value
        return value

    def _loop(self, asyncio: Any) -> Any:
        if self._thread.loop is None:
            self._thread.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._thread.loop)
        return self._thread.loop
