"""The dialects, by name: the entry points of ``turnstile.dialects``.

A dialect's object takes nothing and returns a ``Dialect`` of the name under which it is declared. The gate serves
every dialect that is installed, and those that agent specs name by ``package.module:object``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from turnstile.plugins import BrokenPlugin, Plugin, PluginError, Plugins, is_reference
from turnstile_server.errors import StartupError
from turnstile_server.gate.dialects.base import Dialect, Endpoint

DIALECTS: Final = Plugins("turnstile.dialects")

FALLBACK: Final = "chat"
"""Writes the errors of paths that no dialect serves."""

_LOG = logging.getLogger(__name__)


def load_dialect(name: str) -> Dialect:
    """The dialect of an agent spec: by its name, or ``package.module:object``. Raises StartupError."""
    try:
        return _created(DIALECTS.find(name))
    except PluginError as error:
        raise StartupError(str(error)) from error


def load_dialects(further: Iterable[str] = ()) -> tuple[Dialect, ...]:
    """Every installed dialect, ``FALLBACK`` first, then those of ``further`` that are references.

    Turnstile's come before those of other packages: where two serve one path, the earlier answers. An installed
    dialect of another package that cannot be loaded is told in the log and left out. Raises StartupError for one
    of ``further``.
    """
    made = {FALLBACK: load_dialect(FALLBACK)}
    for plugin in DIALECTS.declared():
        if plugin.name in made and plugin.ours:
            continue
        try:
            made[plugin.name] = _created(plugin)
        except BrokenPlugin as error:
            _LOG.warning("%s; the gate does not serve it", error)
    for name in dict.fromkeys(further):
        if not is_reference(name):
            load_dialect(name)  # raises for one that could not be loaded above
            continue
        dialect = load_dialect(name)
        other = made.setdefault(dialect.name, dialect)
        if type(other) is not type(dialect):
            raise StartupError(f"the dialect {name} has the name {dialect.name!r} of another dialect; rename it")
    return tuple(made.values())


def _created(plugin: Plugin) -> Dialect:
    """Raises BrokenPlugin."""
    dialect = plugin.create(Dialect)  # type: ignore[type-abstract]
    if not is_reference(plugin.name) and dialect.name != plugin.name:
        raise BrokenPlugin(f"{plugin} cannot be used: its name is {dialect.name!r}, not that of its declaration")
    for each in dialect.endpoints:
        plugin.checked(each, Endpoint)
    return dialect
