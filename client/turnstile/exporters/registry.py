"""The formats that ``--format`` takes: the entry points of ``turnstile.exporters``.

A format's object is an ``ExportFormat``, or only its ``Writer``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from turnstile import errors
from turnstile.exporters.formats import ExportFormat, Writer
from turnstile.plugins import BrokenPlugin, Plugin, PluginError, Plugins

EXPORTERS: Final = Plugins("turnstile.exporters")


def installed_formats() -> dict[str, ExportFormat]:
    """The installed formats by name, without those that cannot be loaded: asking for one says why."""
    found: dict[str, ExportFormat] = {}
    for plugin in EXPORTERS.usable():
        try:
            found[plugin.name] = _loaded(plugin)
        except BrokenPlugin:
            continue
    return found


def export_format(name: str) -> ExportFormat:
    """The format ``name``, or ``package.module:object``. Raises InvalidRequest where there is none."""
    try:
        return _loaded(EXPORTERS.find(name))
    except PluginError as error:
        raise errors.InvalidRequest(f"--format: {error}") from error


def writer_of(name: str) -> Writer:
    """The writer of a format. Raises InvalidRequest for an unknown format, and for one whose extra is missing."""
    wanted = export_format(name)
    if not isinstance(wanted.writer, str):
        return wanted.writer
    module, _, function = wanted.writer.partition(":")
    try:
        found: Writer = vars(import_module(module))[function]
    except ImportError as error:
        if wanted.extra is None:
            raise errors.InvalidRequest(f"--format {name}: {wanted.writer} cannot be imported: {error}") from error
        raise errors.InvalidRequest(
            f"--format {name} needs {error.name}: pip install 'turnstile-rl[{wanted.extra}]'"
        ) from error
    except KeyError:
        raise errors.InvalidRequest(f"--format {name}: there is no {wanted.writer}") from None
    return found


def _loaded(plugin: Plugin) -> ExportFormat:
    """Raises BrokenPlugin."""
    found = plugin.load()
    if isinstance(found, ExportFormat):
        return found
    if not callable(found):
        raise BrokenPlugin(f"{plugin} cannot be used: it is neither an ExportFormat nor a function that writes")
    return ExportFormat(found, f"written by {plugin.target}", ".out")
