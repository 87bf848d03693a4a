"""The parts that are installed, and from where: ``turnstile doctor``.

Turnstile's own are listed. Those of other packages are loaded too, as a server would load them.
"""

from __future__ import annotations

from typing import Final

from turnstile.plugins import GROUPS, BrokenPlugin, Plugin, Plugins
from turnstile_server.agents.registry import AGENTS, load_registry
from turnstile_server.errors import StartupError
from turnstile_server.gate.dialects.registry import DIALECTS, load_dialect
from turnstile_server.rendering.call_formats.protocol import CallFormat
from turnstile_server.rendering.call_formats.registry import CALL_FORMATS
from turnstile_server.tasks.grader_options import GRADERS, options_of
from turnstile_server.tasks.protocol import TaskSource
from turnstile_server.tasks.registry import TASK_SOURCES
from turnstile_server.tasks.rows.kinds import ROW_KINDS, table_of
from turnstile_server.testing.doctor import Finding

_MADE_OF_NOTHING: Final[dict[str, type[object]]] = {CALL_FORMATS.group: CallFormat, TASK_SOURCES.group: TaskSource}
"""Protocols of the results of objects that are called without arguments, by group."""


def installed_parts() -> list[Finding]:
    """A finding for each group, about Turnstile's own parts, and one for each part of another package."""
    not_launched = load_registry().broken
    findings: list[Finding] = []
    for group, word in GROUPS.items():
        declared = Plugins(group).declared()
        findings.append(_own(word, [plugin for plugin in declared if plugin.ours]))
        findings += [_of_others(word, plugin, not_launched) for plugin in declared if not plugin.ours]
    return findings


def _own(word: str, plugins: list[Plugin]) -> Finding:
    if not plugins:
        text = "Turnstile's own are missing: its package is installed without entry points, so install it again"
        return Finding(name=word, passed=False, text=text)
    names = ", ".join(plugin.name for plugin in plugins)
    return Finding(name=word, passed=None, text=f"{names} ({plugins[0].distribution})")


def _of_others(word: str, plugin: Plugin, not_launched: dict[str, str]) -> Finding:
    text = f"{plugin.name} ({plugin.distribution}, {plugin.target})"
    try:
        if plugin.group == AGENTS.group and plugin.name in not_launched:
            return Finding(name=word, passed=False, text=not_launched[plugin.name])
        if plugin.group == DIALECTS.group and plugin.conflict is None:
            load_dialect(plugin.name)
        elif plugin.group in _MADE_OF_NOTHING:
            plugin.create(_MADE_OF_NOTHING[plugin.group])
        elif plugin.group == GRADERS.group and plugin.conflict is None:
            options_of(plugin.name)
        elif plugin.group == ROW_KINDS.group:
            table_of(plugin)
        else:
            plugin.load()
    except (BrokenPlugin, StartupError) as error:
        return Finding(name=word, passed=False, text=str(error))
    return Finding(name=word, passed=True, text=text)
