"""From the ``function`` of a setting or a task to a function: imported by module, or from a file.

A file is imported once for each path, under a name of its own; its folder is not on the import path. Importing
runs its code with the server's rights, so only operators name files: an inline task cannot.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from turnstile_server.own_tools.signature import UnusableFunction, declaration
from turnstile_server.settings.own_tools import FunctionSpec, Where


def load_function(spec: FunctionSpec) -> tuple[Callable[..., Any], Where]:
    """The function, and where it runs. Raises UnusableFunction."""
    place, _, name = spec.function.rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    function = vars(module).get(name)
    if not callable(function) or isinstance(function, type):
        raise UnusableFunction(f"{place} has no function {name!r}")
    declared = declaration(function)
    where = spec.where or (Where(declared.where) if declared is not None else None)
    if where is None:
        raise UnusableFunction(
            "it does not say where it runs: add `where: host` or `where: sandbox`, or the decorator "
            '@tool(where="host")'
        )
    if spec.where is not None and declared is not None and declared.where != spec.where:
        raise UnusableFunction(f"its decorator says where={declared.where!r}, its entry says {spec.where.value!r}")
    return function, where


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UnusableFunction(f"the module {name!r} cannot be imported: {_said(error)}") from error


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"turnstile_own_tools_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise UnusableFunction(f"there is no file {path}")
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses and pydantic look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UnusableFunction(f"{path} cannot be imported: {_said(error)}") from error
    return module


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
