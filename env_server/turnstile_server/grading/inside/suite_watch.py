"""Notices what the work replaced in, or added to, the process that runs a repository's suite.

The repository's own suite may replace code, too: its ``conftest.py``, its plug-ins, installed packages. So a
change counts when the new code does not come from files of those. Code can lie about its file; the docs say so.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

from .tamper import TamperCheck, function_of, watch_over

WATCHED = ("_pytest", "pluggy", "unittest")


class WorkFiles:
    """Tells files of the work from those of the task, of Python and of installed packages."""

    def __init__(self, work: str, owned: Iterable[str]) -> None:
        self._work = os.path.realpath(work) + "/"
        self._owned = [os.path.join(self._work, path) for path in owned]
        schemes = sysconfig.get_paths()
        kinds = ("stdlib", "platstdlib", "purelib", "platlib")
        self._trusted = [os.path.realpath(schemes[kind]) + "/" for kind in kinds]
        self._trusted.append(os.path.dirname(os.path.abspath(__file__)) + "/")

    def of_work(self, path: str) -> bool:
        """Also of a place that anybody can write to."""
        if path.startswith("<frozen "):
            return False
        path = os.path.realpath(path) if path.startswith("/") else path
        if os.path.basename(path) == "conftest.py" and path.startswith(self._work):
            return False  # never the work's: they are left out of the diff
        if any(path == own or path.startswith(own + "/") for own in self._owned):
            return False
        return path.startswith(self._work) or not path.startswith(tuple(self._trusted))


def file_of_code(value: Any) -> str:
    """The file from which a function or class comes; empty where that cannot be told."""
    value = value.fget if isinstance(value, property) else function_of(value)
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename
    if isinstance(value, type):
        return file_of_module(sys.modules.get(value.__module__))
    return ""


def file_of_module(module: Any) -> str:
    return str(vars(module).get("__file__") or "") if isinstance(module, types.ModuleType) else ""


class SuiteWatch:
    """Watch over one pytest session. Begins when installed plug-ins are loaded, and nothing of the repository."""

    def __init__(self, files: WorkFiles) -> None:
        self._files = files
        self._code = TamperCheck()
        self._plugins: set[int] = set()
        self._manager: Any = None

    def begin(self, manager: Any) -> None:
        self._manager = manager
        self._plugins = {id(plugin) for plugin in manager.get_plugins()}
        watch_over(self._code, *WATCHED)

    def broken(self) -> str | None:
        """A change to the session by the work, as a sentence; None: nothing is seen."""
        for sentence, value in self._code.changes():
            if self._files.of_work(file_of_code(value)):
                return sentence
        return self._added_plugin()

    def _added_plugin(self) -> str | None:
        named: set[str] = set()
        added: list[tuple[str, Any]] = []
        for name, plugin in self._manager.list_name_plugin():
            file = file_of_module(plugin)
            if file and not self._files.of_work(file):
                wanted = vars(plugin).get("pytest_plugins", ())
                named.update([wanted] if isinstance(wanted, str) else wanted)
            elif plugin is not None and id(plugin) not in self._plugins:
                added.append((name, plugin))
        for name, plugin in added:
            file = file_of_module(plugin) or file_of_code(type(plugin))
            if name not in named and self._files.of_work(file):
                return f"the work registered the plug-in {name[:100]!r}"
        return None
