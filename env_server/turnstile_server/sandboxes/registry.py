"""The sandbox backends, by the name that ``sandboxes.kind`` takes: the entry points of ``turnstile.sandboxes``.

A backend's object takes a ``ProviderSetup`` and returns a ``SandboxProvider``. ``NAME:WORDS`` names the backend
``NAME``, which reads the words itself and has all of it as its own name. Making one touches nothing; its ``start``
tries what the machine has. Where nothing works, the server still serves episodes that need no sandbox, and
``create`` of the provider says what to install or to set.
"""

from __future__ import annotations

from turnstile.plugins import BrokenPlugin, Plugin, PluginError, Plugins
from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import ProviderSetup, SandboxProvider


def create_provider(setup: ProviderSetup) -> SandboxProvider:
    """The backend that ``sandboxes.kind`` names, in a pool. Raises StartupError for one that cannot be loaded.

    ``start`` of what it returns raises StartupError where a backend was named and does not work on this machine;
    with ``auto`` and ``none`` it does not.
    """
    plugins, kind = Plugins("turnstile.sandboxes"), setup.settings.kind
    name, _, words = kind.partition(":")
    try:
        plugin = plugins.find(name if name in plugins.names() else kind)
        provider = plugin.checked(_created(plugin, setup), SandboxProvider)  # type: ignore[type-abstract]
    except PluginError as error:
        raise StartupError(f"sandboxes.kind: {error}") from error
    if words and plugin.name == name and provider.name != kind:
        raise StartupError(f"sandboxes.kind: {name} takes nothing after its name, so {kind!r} is none")
    return SandboxPool(provider, setup.settings)


def _created(plugin: Plugin, setup: ProviderSetup) -> object:
    """Raises StartupError, as a backend does, and BrokenPlugin where one of another package fails otherwise."""
    make = plugin.load()
    try:
        return make(setup)
    except StartupError:
        raise
    except (Exception, SystemExit) as error:
        if plugin.ours:
            raise
        raise BrokenPlugin(f"{plugin} cannot be made: {type(error).__name__}: {error}") from error
