"""Parts that packages add, by name: one entry-point group for each kind of part.

An installed package declares a part in its ``pyproject.toml``, as Turnstile does with its own::

    [project.entry-points."turnstile.engines"]
    uniform = "my_package.uniform:UniformEngine"

Wherever a part is named, ``package.module:object`` names one that no package declares. Reading names imports
nothing: a part is imported when it is loaded. A name that Turnstile declares stays Turnstile's; a name that two
other packages declare belongs to neither, and ``package.module:object`` still tells them apart.
Format: https://packaging.python.org/en/latest/specifications/entry-points/
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, TypeVar

OURS: Final = "turnstile-rl"
"""The distribution of Turnstile."""

GROUPS: Final = {
    "turnstile.engines": "engine",
    "turnstile.dialects": "dialect",
    "turnstile.call_formats": "call format",
    "turnstile.sandboxes": "sandbox backend",
    "turnstile.task_sources": "task source",
    "turnstile.row_kinds": "kind of row",
    "turnstile.graders": "grader",
    "turnstile.exporters": "export format",
    "turnstile.agents": "agent",
}
"""Every group of parts, with the word for one part. Commands have groups of their own (``cli/commands.py``)."""

RESERVED: Final = {
    "turnstile.engines": {"none"},
    "turnstile.call_formats": {"auto", "none"},
    "turnstile.agents": {"external"},
}
"""Names by group that mean something else than a part."""

T = TypeVar("T")

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class PluginError(Exception):
    """A part that cannot be used. ``str()`` is one sentence for people."""


class UnknownPlugin(PluginError):
    """No installed package declares the name."""


class BrokenPlugin(PluginError):
    """A part is declared and cannot be used: it cannot be imported, or another package has its name."""


def is_reference(name: str) -> bool:
    """True for ``package.module:object``."""
    return _REFERENCE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Plugin:
    """A part that was found, not imported yet.

    ``target``: ``package.module:object``. ``distribution``: name and version of the package that declares it, such
    as ``acme-parts 1.2``; None for a part that was named by its target. ``ours``: Turnstile declares it.
    ``conflict``: why the declaration is not used.
    """

    group: str
    name: str
    target: str
    distribution: str | None = None
    ours: bool = False
    conflict: str | None = None

    def load(self) -> Any:
        """The object. Raises BrokenPlugin, with distribution and error, whatever its import raises."""
        if self.conflict is not None:
            raise BrokenPlugin(f"{self} is not used: {self.conflict}")
        module, _, path = self.target.partition(":")
        try:
            found: Any = import_module(module)
            for attribute in path.split("."):
                found = getattr(found, attribute)
        except (Exception, SystemExit) as error:
            raise BrokenPlugin(f"{self} cannot be loaded: {type(error).__name__}: {error}") from error
        return found

    def create(self, protocol: type[T], *arguments: Any) -> T:
        """What the object returns for ``arguments``. ``protocol``: what that must be, checked by its members.

        Raises BrokenPlugin, whatever import and call raise, and for another object.
        """
        make = self.load()
        try:
            made = make(*arguments)
        except (Exception, SystemExit) as error:
            raise BrokenPlugin(f"{self} cannot be made: {type(error).__name__}: {error}") from error
        return self.checked(made, protocol)

    def checked(self, made: object, protocol: type[T]) -> T:
        """``made`` where it has the members of ``protocol``. Raises BrokenPlugin."""
        if not isinstance(made, protocol):
            raise BrokenPlugin(f"{self} cannot be used: it is a {type(made).__name__}, and no {protocol.__name__}")
        return made

    def __str__(self) -> str:
        if self.distribution is None:
            return f"the {GROUPS[self.group]} {self.target}"
        return f"the {GROUPS[self.group]} {self.name!r} ({self.distribution}, {self.target})"


class Plugins:
    """The parts of one group of ``GROUPS``."""

    def __init__(self, group: str) -> None:
        self.group = group
        self._word = GROUPS[group]

    def declared(self) -> tuple[Plugin, ...]:
        """Every declaration of an installed package, with those that conflict: Turnstile's first, then by name."""
        return _declared(self.group, tuple(sys.path))

    def usable(self) -> tuple[Plugin, ...]:
        """The declarations that do not conflict, in the order of ``declared``."""
        return tuple(plugin for plugin in self.declared() if plugin.conflict is None)

    def names(self) -> tuple[str, ...]:
        """Names of the usable parts, in the order of ``declared``."""
        return tuple(plugin.name for plugin in self.usable())

    def find(self, name: str) -> Plugin:
        """The part that ``name``, or ``package.module:object``, stands for. Raises UnknownPlugin."""
        if is_reference(name):
            return Plugin(self.group, name, name)
        found = _by_name(self.group, tuple(sys.path)).get(name)
        if found is not None:
            return found
        have = ", ".join((*self.names(), "package.module:object"))
        raise UnknownPlugin(f"there is no {self._word} {name!r}; there are {have}")

    def load(self, name: str) -> Any:
        """The object of ``find(name)``. Raises UnknownPlugin and BrokenPlugin."""
        return self.find(name).load()


@lru_cache(maxsize=len(GROUPS))
def _declared(group: str, path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """``path``: ``sys.path``, on which the result depends. Cached: a large environment has much metadata."""
    found = sorted(
        (_plugin(entry) for entry in entry_points(group=group)), key=lambda each: (not each.ours, each.name)
    )
    ours = {plugin.name for plugin in found if plugin.ours} | RESERVED.get(group, set())
    times = Counter(plugin.name for plugin in found)
    return tuple(replace(each, conflict=_conflict(each, ours, times)) for each in found)


@lru_cache(maxsize=len(GROUPS))
def _by_name(group: str, path: tuple[str, ...]) -> dict[str, Plugin]:
    """Of several declarations of a name the first, which is Turnstile's if one is."""
    return {plugin.name: plugin for plugin in reversed(_declared(group, path))}


def _plugin(entry: EntryPoint) -> Plugin:
    package = entry.dist.name if entry.dist is not None else "unknown"
    version = entry.dist.version if entry.dist is not None else "unknown"
    target, _, _extras = entry.value.partition("[")
    return Plugin(entry.group, entry.name, target.strip(), f"{package} {version}", package == OURS)


def _conflict(plugin: Plugin, ours: set[str], times: Counter[str]) -> str | None:
    if plugin.ours or (times[plugin.name] == 1 and plugin.name not in ours):
        return None
    owner = "Turnstile" if plugin.name in ours else "another package"
    written = plugin.target + ("=SOURCE" if plugin.group == "turnstile.task_sources" else "")
    return f"{owner} declares the name {plugin.name!r} too; write {written} to use this one"
