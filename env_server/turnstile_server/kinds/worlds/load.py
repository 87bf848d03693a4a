"""Finds worlds in Python code and checks them: import, class, signatures, tools. Runs when a server starts.

A world is named by ``package.module:Class``, ``path/file.py:Class`` or ``path/file.py`` (every world that the file
itself defines). The code is the operator's own and runs with the server's rights. Whatever is wrong with it is a
``WorldProblem`` that names file and line.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from turnstile_server.kinds.worlds.definition import (
    IN_FILE,
    IN_MODULE,
    WorldDefinition,
    WorldToolMethod,
    name_of,
    place_of,
)
from turnstile_server.kinds.worlds.world import World, WorldTask
from turnstile_server.own_tools.names import NamedTool, name_problem
from turnstile_server.own_tools.signature import FunctionSignature, UnusableFunction, declaration

_PARAMETERS = {"grade": (), "solve": (), "close": (), "respond": ("answer",)}
"""The optional methods of a world, with what they are called with."""


class WorldProblem(Exception):
    """A world cannot be used; the message says why. ``field``: of the task, dotted, where it is one task's."""

    def __init__(self, message: str, file: str, line: int | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.line = line
        self.field = field


def each_definition(source: str, at_most: int) -> Iterator[tuple[WorldTask, WorldDefinition] | WorldProblem]:
    """Every task of ``source`` with its world, and everything that is wrong with them."""
    try:
        found = worlds_of(source)
    except WorldProblem as problem:
        yield problem
        return
    for world_class in found:
        try:
            tools = checked_tools(world_class)
            tasks = tasks_of(world_class, at_most)
        except WorldProblem as problem:
            yield problem
            continue
        for task in tasks:
            try:
                yield task, define(world_class, task, tools)
            except WorldProblem as problem:
                yield problem


def worlds_of(source: str) -> list[type[World]]:
    """The worlds that ``source`` names, in the order of their definition. Raises WorldProblem."""
    match = IN_FILE.fullmatch(source)
    if match is not None:
        module = _import_file(Path(match["file"]), source)
        if match["name"] is None:
            return _all_worlds(module, source)
        return [_named_world(module, match["name"], source)]
    match = IN_MODULE.fullmatch(source)
    assert match is not None
    return [_named_world(_import_module(match["module"], source), match["name"], source)]


def tasks_of(world_class: type[World], at_most: int) -> list[WorldTask]:
    """The tasks that ``tasks`` of the class gives, checked. Raises WorldProblem."""
    try:
        found = list(islice(world_class.tasks(), at_most + 1))
    except (Exception, SystemExit) as error:
        raise _problem(world_class, f"tasks() raised {_shown(error)}") from error
    if len(found) > at_most:
        raise _problem(world_class, f"tasks() gives more than {at_most} tasks")
    if not found:
        raise _problem(world_class, "tasks() gives no task")
    for task in found:
        if not isinstance(task, WorldTask):
            raise _problem(world_class, f"tasks() gives a {type(task).__name__}, not a WorldTask")
    seen: set[str] = set()
    for task in found:
        if task.id in seen:
            raise _problem(world_class, f"tasks() gives two tasks with the id {task.id!r}", field="id")
        seen.add(task.id)
    return found


def define(world_class: type[World], task: WorldTask, tools: tuple[WorldToolMethod, ...]) -> WorldDefinition:
    """The world of one task. ``tools``: of ``checked_tools``. Raises WorldProblem."""
    if isinstance(task.seed, bool) or not isinstance(task.seed, int):
        raise _problem(world_class, f"{task.seed!r} is not a whole number", field="seed", task=task)
    _check_call(world_class, "reset", (task.seed,), task.parameters, task)
    return WorldDefinition(world_class, name_of(world_class), task.parameters, task.seed, tools)


def checked_tools(world_class: type[World]) -> tuple[WorldToolMethod, ...]:
    """Checks the class as a whole and gives its tools. Raises WorldProblem."""
    missing = sorted(world_class.__abstractmethods__)
    if missing:
        raise _problem(world_class, f"it does not define {', '.join(missing)}")
    try:
        inspect.signature(world_class).bind()
    except TypeError as error:
        raise _problem(world_class, f"it must be made without arguments, but {error}") from error
    for method, parameters in _PARAMETERS.items():
        _check_call(world_class, method, parameters, {})
    return _tools_of(world_class)


def _tools_of(world_class: type[World]) -> tuple[WorldToolMethod, ...]:
    """The methods that are marked as tools, in the order of their definition, those of base classes first."""
    found: dict[str, WorldToolMethod] = {}
    for name in dict.fromkeys(name for base in reversed(world_class.__mro__) for name in vars(base)):
        method = inspect.getattr_static(world_class, name)
        if not inspect.isfunction(method) or (declared := declaration(method)) is None:
            continue
        if name in vars(World):
            raise _problem(world_class, f"{name} is the world's own; the agent never calls it, so it is no tool")
        if declared.where != "host":
            raise _problem(world_class, f"tool {name}: the tools of a world run on the host, with its state")
        try:
            # What callers see: bound to anything at all, because only the parameters after `self` are read.
            signature = FunctionSignature(MethodType(method, world_class))
        except UnusableFunction as error:
            raise _problem(world_class, f"tool {name}: {error}") from error
        if signature.context_parameter is not None:
            raise _problem(
                world_class, f"tool {name}: a world's tool has no ToolContext; what it needs is in self"
            )
        found[name] = WorldToolMethod(name, signature)
    tools = tuple(found.values())
    problem = name_problem([NamedTool(tool.signature.spec.name, f"method {tool.method}") for tool in tools])
    if problem is not None:
        raise _problem(world_class, problem)
    return tools


def _check_call(
    world_class: type[World],
    method: str,
    positional: tuple[Any, ...],
    named: Mapping[str, Any],
    task: WorldTask | None = None,
) -> None:
    """Raises WorldProblem where the method cannot be called like this."""
    function = inspect.getattr_static(world_class, method)
    if not inspect.isfunction(function):
        raise _problem(world_class, f"{method} must be a plain method", task=task)
    try:
        inspect.signature(function).bind(None, *positional, **named)
    except TypeError as error:
        called = ", ".join([*("seed" if method == "reset" else "answer" for _ in positional), *named])
        message = f"it is called as {method}({called}), but {error}"
        raise _problem(world_class, message, field="parameters" if named else None, task=task) from error


def _import_file(path: Path, source: str) -> ModuleType:
    """Runs the file as a new module. Its folder is added at the end of the import path, for modules beside it."""
    if not path.is_file():
        raise WorldProblem("no such file", source)
    path = path.absolute()
    name = f"turnstile_world_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    _add_import_path(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and type hints look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise _import_problem(error, path, source) from error
    return module


def _import_module(name: str, source: str) -> ModuleType:
    """The current folder is added at the end of the import path, as ``python -m`` has it at the beginning."""
    _add_import_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _import_problem(error, None, source) from error


def _add_import_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_problem(error: BaseException, path: Path | None, source: str) -> WorldProblem:
    """Names the line of the world's own file on which the import failed, else the innermost line of all."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return WorldProblem(f"SyntaxError: {error.msg}", error.filename, error.lineno)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and frame.filename == str(path)]
    if not own:
        return WorldProblem(f"it cannot be imported: {_shown(error)}", source)
    return WorldProblem(f"it cannot be imported: {_shown(error)}", source, own[-1].lineno)


def _all_worlds(module: ModuleType, source: str) -> list[type[World]]:
    found = [
        value
        for name, value in vars(module).items()
        if _is_world(value) and value.__module__ == module.__name__ and not name.startswith("_")
        if not inspect.isabstract(value)
    ]
    if not found:
        raise WorldProblem("it defines no world: no class that derives from World and has a reset", source)
    return list(dict.fromkeys(found))


def _named_world(module: ModuleType, name: str, source: str) -> type[World]:
    value = vars(module).get(name)
    if value is None:
        there = ", ".join(key for key, each in vars(module).items() if _is_world(each)) or "none"
        raise WorldProblem(f"there is no class {name}; the worlds there are: {there}", source)
    if not _is_world(value):
        raise WorldProblem(f"{name} is not a class that derives from turnstile_server.worlds.World", source)
    world_class: type[World] = value
    return world_class


def _is_world(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, World) and value is not World


def _problem(
    world_class: type[World], message: str, field: str | None = None, task: WorldTask | None = None
) -> WorldProblem:
    file, line = place_of(world_class)
    about_task = f"task {task.id}: " if task is not None else ""
    return WorldProblem(f"{world_class.__name__}: {about_task}{message}", file, line, field)


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
