"""The call formats by name: entry points of ``turnstile.call_formats``. A format's object takes nothing and
returns a ``CallFormat``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from turnstile.plugins import BrokenPlugin, PluginError, Plugins
from turnstile_server.errors import StartupError
from turnstile_server.rendering.call_formats.protocol import CallFormat

CALL_FORMATS: Final = Plugins("turnstile.call_formats")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A call format and the name that it is installed under."""

    name: str
    form: CallFormat


def named_format(name: str) -> NamedFormat:
    """The format of a name, or of ``package.module:object``. Raises StartupError where there is none."""
    try:
        return NamedFormat(name, CALL_FORMATS.find(name).create(CallFormat))  # type: ignore[type-abstract]
    except PluginError as error:
        raise StartupError(f"rendering.call_format: {error}") from error


def installed_formats() -> list[NamedFormat]:
    """All formats that can be loaded, Turnstile's before those of other packages."""
    found: list[NamedFormat] = []
    for plugin in CALL_FORMATS.usable():
        try:
            found.append(NamedFormat(plugin.name, plugin.create(CallFormat)))  # type: ignore[type-abstract]
        except BrokenPlugin as error:
            _LOG.warning("%s; no model's calls are read by it", error)
    return found
