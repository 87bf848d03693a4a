"""The sandbox backends, by the name that ``sandboxes.kind`` takes: the entry points of ``turnstile.sandboxes``.

A backend's object takes a ``ProviderSetup`` and returns a ``SandboxProvider``. Making one touches nothing; its
``start`` tries what the machine has. Where nothing works, the server still serves episodes that need no sandbox,
and ``create`` of the provider says what to install or to set.
"""

from __future__ import annotations

from collections.abc import Callable

from turnstile.plugins import PluginError, Plugins
from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import ProviderSetup, SandboxProvider


def create_provider(setup: ProviderSetup) -> SandboxProvider:
    """The backend that ``sandboxes.kind`` names, in a pool. Raises StartupError for one that cannot be loaded.

    ``start`` of what it returns raises StartupError where a backend was named and does not work on this machine;
    with ``auto`` and ``none`` it does not.
    """
    try:
        create: Callable[[ProviderSetup], SandboxProvider] = Plugins("turnstile.sandboxes").load(
            setup.settings.kind
        )
    except PluginError as error:
        raise StartupError(f"sandboxes.kind: {error}") from error
    return SandboxPool(create(setup), setup.settings)
