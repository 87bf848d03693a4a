"""Imports of the work's modules, in the process that judges: they give proxies and run nothing here.

Which names are the work's is found by looking at its folders. The standard library, the hidden tests and the
image's packages come first, as they would on the path, because this finder is the last.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from .guard import is_standard
from .proxies import ModuleProxy
from .work_process import WorkProcess

_SUFFIXES = tuple(importlib.machinery.all_suffixes())


def names_of(paths: Sequence[str]) -> set[str]:
    """The top-level modules that could be imported from these folders. None with a name of the standard library,
    which looks for modules of other systems (``msvcrt``), and would take the work's for them."""
    found = set()
    for path in paths:
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue
        for entry in entries:
            if os.path.isdir(entry.path):  # unlike `is_dir`, False for a loop of links
                found.add(entry.name)
            for suffix in _SUFFIXES:
                if entry.name.endswith(suffix):
                    found.add(entry.name[: -len(suffix)])
    return {name for name in found if name.isidentifier() and not is_standard(name)}


class WorkImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads what ``names`` says is the work's."""

    def __init__(self, work: WorkProcess, names: set[str]) -> None:
        self._work = work
        self._names = names

    def install(self) -> None:
        sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of the work; None for any other. A submodule is the work's where its parent is."""
        top = name.split(".", maxsplit=1)[0]
        if top not in self._names or (path is not None and not isinstance(sys.modules.get(top), ModuleProxy)):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Imports the module there. Raises what that raised."""
        peer, told = self._work.import_module(spec.name)
        module = peer.imports.module(told["module"], spec.name, told["doc"])
        if told["file"] is not None:
            module.__dict__["__file__"] = told["file"]
        if told["package"]:
            spec.submodule_search_locations = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """``importlib.reload`` comes here a second time."""
        if vars(module).get("_boundary_loaded_"):
            self._work.peer.ask("reload", module.__name__)
        module.__dict__["_boundary_loaded_"] = True
