"""Notices code that the work replaced in the process that judges, where both are one (``trust: in_process``).

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterator
from typing import Any

CODE = (types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property, type)


def function_of(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


class TamperCheck:
    """Remembers the code of modules and classes, and reports code that was replaced, rewritten or added.

    Added code counts where it hides other code: in a class an inherited method, in a module a builtin.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str, Any, str, Any, Any]] = []
        self._names: list[tuple[str, Any, frozenset[str], bool]] = []
        self._classes: set[type] = set()

    def add_module(self, module: types.ModuleType) -> None:
        self._add(module.__name__, vars(module), module.__name__.split(".")[0], False)

    def add_class(self, one: type) -> None:
        self._classes.add(one)
        self._add(one.__qualname__, vars(one), one.__module__.split(".")[0], True)

    def _add(self, owner: str, names: Any, package: str, is_class: bool) -> None:
        self._names.append((owner, names, frozenset(names), is_class))
        for name, value in list(names.items()):
            if not isinstance(value, CODE):
                continue
            # Functions of C have no code to change.
            self._seen.append((owner, names, name, value, getattr(function_of(value), "__code__", None)))
            if isinstance(value, type) and value not in self._classes:
                self._classes.add(value)
                if str(value.__module__).split(".")[0] == package:
                    self._add(owner + "." + name, vars(value), package, True)

    def broken(self) -> str | None:
        """The first change that is found, as a sentence; None: nothing has changed."""
        return next((sentence for sentence, _ in self.changes()), None)

    def changes(self) -> Iterator[tuple[str, Any]]:
        """Everything that has changed: a sentence, and what is there now."""
        for owner, names, name, value, code in self._seen:
            now = names.get(name)
            if now is not value:
                yield f"{owner}.{name} was replaced", now
            elif code is not None and function_of(value).__code__ is not code:
                yield f"{owner}.{name} was rewritten", now
        for owner, names, known, is_class in self._names:
            if len(names) == len(known):
                continue
            for name in frozenset(names) - known:
                if (is_class and isinstance(names[name], CODE)) or (not is_class and name in BUILTINS):
                    yield f"{owner}.{name} was added", names[name]


BUILTINS = frozenset(vars(builtins))


def watch_over(watch: TamperCheck, *packages: str) -> None:
    """The loaded modules of ``packages``, the builtins, and these programs."""
    own = __name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in packages or name.startswith(own):
            watch.add_module(module)
    watch.add_module(builtins)
