"""Rules of each side: what it lets the other side do, and what it believes.

``WorkRules`` are the work's: it has nothing to hide. ``TestsRules`` are those of the process that judges: the work
reaches what a test handed to it, by plain public names, and nothing of what judges; and of its own objects the
work does not decide whether they equal a plain value.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from typing import Any

from .proxies import BoundaryError

_JUDGES = ("unittest", "_pytest", "pytest", "pluggy", "boundary", "inside", "turnstile_server", "__main__")
_MOCK = "unittest.mock"
_OPAQUE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.FrameType,
    types.CodeType,
    types.TracebackType,
    types.ModuleType,
)
_OPEN_NAMES = ("__name__", "__qualname__", "__doc__")
# Python 3.9 has no list of them: there the few that tests share with the work.
_STANDARD = frozenset(getattr(sys, "stdlib_module_names", ())) or frozenset(
    (
        "asyncio",
        "collections",
        "decimal",
        "io",
        "json",
        "os",
        "queue",
        "subprocess",
        "threading",
        "time",
        "zipfile",
    )
)


_NAMED_MODULES = frozenset(
    ("collections", "datetime", "decimal", "enum", "fractions", "numbers", "pathlib", "types", "typing", "uuid")
)
_NOT_NAMED = frozenset(("type", "super", "map", "filter", "property", "classmethod", "staticmethod"))
_NOT_NAMED_TYPES = frozenset(
    ("FunctionType", "LambdaType", "CodeType", "MethodType", "function", "code", "method")
)


def is_harmless(kind: type) -> bool:
    """True if the process that judges may have this class of the standard library from the work. A test's function
    may call it, so it may not open files, run code or read attributes (``operator.attrgetter``)."""
    if issubclass(kind, BaseException):
        return True
    if kind.__module__ == "builtins":
        return vars(builtins).get(kind.__name__) is kind and kind.__name__ not in _NOT_NAMED
    return kind.__module__.split(".", maxsplit=1)[0] in _NAMED_MODULES and kind.__name__ not in _NOT_NAMED_TYPES


def is_standard(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in _STANDARD or module == "builtins"


def found(module: str, qualname: str) -> Any:
    """The object that a loaded module of the standard library has by this name. Raises LookupError."""
    if not is_standard(module) or module not in sys.modules:
        raise LookupError(f"{module} is not loaded here")
    value: Any = sys.modules[module]
    for part in qualname.split("."):
        if part not in vars(value):
            raise LookupError(f"{module}.{qualname} is not here")
        value = vars(value)[part]
    return value


class WorkRules:
    """The side of the work."""

    strict = False

    def check_export(self, value: Any) -> None:
        return

    def may_get(self, value: Any, name: str) -> bool:
        return True

    def may_set(self, value: Any, name: str) -> bool:
        return True

    def may_call(self, value: Any) -> bool:
        return True

    def names_functions(self) -> bool:
        """True if functions of the standard library go to the other side by name, to run there."""
        return False

    def named(self, module: str, qualname: str) -> Any:
        """The object here that a name from the other side means. Raises LookupError."""
        if is_standard(module):
            importlib.import_module(module)
        return found(module, qualname)

    def module(self, name: str) -> Any:
        if not is_standard(name):
            raise LookupError(name)
        return importlib.import_module(name)


class TestsRules:
    """The side that judges."""

    __test__ = False
    strict = True

    def check_export(self, value: Any) -> None:
        """Raises BoundaryError for what the work may not get."""
        kind = value if isinstance(value, type) else type(value)
        for base in kind.__mro__:
            module = str(base.__module__)
            if (
                module != _MOCK
                and module.split(".", maxsplit=1)[0] in _JUDGES
                and not issubclass(kind, BaseException)
            ):
                raise BoundaryError(
                    f"a test passed {kind.__qualname__} ({module}) to the work, which may not reach what "
                    "judges it; pass an object of your own, or mark the task `trust: in_process`"
                )
        if isinstance(value, (types.FrameType, types.CodeType)):
            raise BoundaryError(f"a {kind.__name__} may not be passed to the work")

    def may_get(self, value: Any, name: str) -> bool:
        if isinstance(value, (*_OPAQUE, type)) and name in _OPEN_NAMES:
            return True
        if name.startswith("_") or isinstance(value, _OPAQUE) or not self.may_call(value):
            return False
        if isinstance(value, str) and name in ("format", "format_map"):
            return False  # reads any attribute of what it is given
        return not (_is_mock(value) and _is_of_mocks(name))

    def may_set(self, value: Any, name: str) -> bool:
        return False

    def may_call(self, value: Any) -> bool:
        """Not a class of the standard library: the work knows it as that of an object it was handed. Those that a
        test passes go by name, and are called there."""
        return not (isinstance(value, type) and is_standard(str(value.__module__)))

    def names_functions(self) -> bool:
        return True

    def named(self, module: str, qualname: str) -> Any:
        """Only types that are loaded already, and of them none that judges."""
        if module.split(".", maxsplit=1)[0] in _JUDGES:
            raise LookupError(f"{module} is not for the work")
        value = found(module, qualname)
        if not isinstance(value, type) or (issubclass(value, BaseException) and not may_be_raised(value)):
            raise LookupError(f"{qualname} is not a type")
        if not is_harmless(value):
            raise LookupError(f"{module}.{qualname} is not for the work to name")
        return value

    def module(self, name: str) -> Any:
        raise LookupError(name)


def may_be_raised(kind: type) -> bool:
    """True if an exception of the work may be one of this class in the process that judges. ``SystemExit`` ends a
    test there, not the process."""
    allowed = issubclass(kind, Exception) or kind is SystemExit
    if not allowed and "asyncio" in sys.modules:
        allowed = kind is vars(sys.modules["asyncio"])["CancelledError"]
    return allowed


def without_meaning(error: BaseException, *, ends: bool) -> BaseException:
    """An exception of the work as it is raised in the process that judges. Those by which Python and asyncio steer
    what runs there (the end of an iteration, a cancelled task) would end a loop or a task of the test's as if all
    were well: they become a RuntimeError, as in a generator (PEP 479). ``ends``: the work was asked for what comes
    next, so it may say that nothing does."""
    if ends and isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    cancelled = vars(sys.modules["asyncio"])["CancelledError"] if "asyncio" in sys.modules else ()
    if not isinstance(error, (StopIteration, StopAsyncIteration, cancelled)):
        return error
    made = RuntimeError(
        f"the work raised {type(error).__qualname__}, which would end a loop or a task of the test's; a test of "
        "that needs `trust: in_process`"
    )
    made.__cause__ = error
    return made


def in_event_loop() -> bool:
    """True where an event loop of asyncio runs in this thread."""
    return "asyncio" in sys.modules and vars(sys.modules["asyncio"])["_get_running_loop"]() is not None


def nearest_builtin(kind: type) -> str:
    """The first base of a class of exceptions that is built in, and may be raised."""
    for base in kind.__mro__:
        if vars(builtins).get(base.__name__) is base and may_be_raised(base):
            return str(base.__name__)
    return "RuntimeError"


def _is_mock(value: Any) -> bool:
    return any(base.__module__ == _MOCK for base in type(value).__mro__)


def _is_of_mocks(name: str) -> bool:
    """Names by which a mock is told what to do and what it has seen."""
    steering = name in ("side_effect", "return_value", "called", "configure_mock", "reset_mock", "attach_mock")
    return steering or name.startswith(("assert_", "call_", "mock_", "method_", "await_"))
