"""The call formats, by the name that ``rendering.tool_format`` takes: entry points of ``turnstile.call_formats``.

A format's object takes nothing and returns a ``CallFormat``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from turnstile.plugins import BrokenPlugin, PluginError, Plugins
from turnstile_server.errors import StartupError
from turnstile_server.rendering.call_formats.protocol import CallFormat

CALL_FORMATS: Final = Plugins("turnstile.call_formats")

_LOG = logging.getLogger(__name__)


def call_format(name: str, templates: Iterable[str]) -> CallFormat | None:
    """The format that ``rendering.tool_format`` names; None for ``none``.

    ``auto``: the first that asks for itself in the chat templates, Turnstile's before those of other packages;
    None where none does. Raises StartupError for a name that is not installed, and for a format that cannot be
    loaded.
    """
    if name == "none":
        return None
    if name == "auto":
        return _asked_for("\n".join(templates))
    try:
        return CALL_FORMATS.find(name).create(CallFormat)  # type: ignore[type-abstract]
    except PluginError as error:
        raise StartupError(f"rendering.tool_format: {error}") from error


def _asked_for(template: str) -> CallFormat | None:
    for plugin in CALL_FORMATS.declared():
        try:
            found = plugin.create(CallFormat)  # type: ignore[type-abstract]
        except BrokenPlugin as error:
            _LOG.warning("%s; no model's calls are read by it", error)
            continue
        try:
            if found.asked_by(template):
                return found
        except Exception:  # noqa: BLE001 - other people's code may raise anything, and keeps no model from its format
            _LOG.exception("%s cannot tell whether a chat template asks for it", plugin)
    return None
