"""The engines, by the name that ``engine.kind`` and ``--engine`` take: the entry points of ``turnstile.engines``.

An engine's object takes an ``EngineContext`` and returns an ``Engine`` that is not started yet. It is imported
when it is chosen, because an engine's libraries may be large or optional. For the same reason this module
imports none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from turnstile.plugins import Plugin, PluginError, Plugins, UnknownPlugin
from turnstile_server.engines.protocol import Engine, EngineContext, UpstreamKind
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import StartupError
from turnstile_server.settings import EngineSettings, LaunchSettings

ENGINES: Final = Plugins("turnstile.engines")

LAUNCHED: Final = ("turnstile_server.engines.launch.launched", "create")
"""Puts a process of our own below an engine's client, for ``--launch``."""

NO_ENGINE: Final = "none"
"""The kind of a server without a model: it answers ``/health`` and refuses everything else."""


def check_kind(kind: str) -> None:
    """Raises StartupError, naming the kinds there are, for a name that no package declares."""
    if kind == NO_ENGINE:
        return
    try:
        ENGINES.find(kind)
    except UnknownPlugin as error:
        raise StartupError(f"engine.kind: {error}") from None


def upstream_kind(kind: str) -> UpstreamKind | None:
    """The kind where its models are hosted ones; None for an engine that takes token ids. Raises StartupError."""
    check_kind(kind)
    if kind == NO_ENGINE:
        return None
    plugin = ENGINES.find(kind)
    try:
        found = plugin.load()
    except PluginError as error:
        lacks = plugin.ours and isinstance(error.__cause__, ModuleNotFoundError)
        how = f": pip install 'turnstile-rl[{kind}]'" if lacks else ""
        raise StartupError(f"engine.kind: {error}{how}") from error
    return found if isinstance(found, UpstreamKind) else None


def create_engine(
    settings: EngineSettings,
    model_dir: Path,
    expected_tokenizer: TokenizerProbe | None,
    launch: LaunchSettings | None = None,
    tell: Callable[[str], None] | None = None,
    *,
    replica: int = 0,
) -> Engine:
    """An engine that is not started yet. Raises StartupError when the settings lack what it needs.

    ``launch``: whether its process is to be ours. ``tell`` is given the progress of such a start.
    ``replica``: which of ``launch.replicas`` it is.
    """
    check_kind(settings.kind)
    if settings.url is not None and not settings.url.startswith(("http://", "https://")):
        raise StartupError(f"--engine-url {settings.url!r} is no URL: it must begin with http:// or https://.")
    try:
        plugin = ENGINES.find(settings.kind)
        create: Callable[[EngineContext], Engine] = partial(_created, plugin)
        plugin.load()
    except PluginError as error:
        raise StartupError(f"engine.kind: {error}") from error
    context = EngineContext(settings, model_dir, expected_tokenizer)
    if launch is not None and launch.enabled:
        launched: Engine = _launched()(context, launch, create, tell, replica)
        return launched
    return create(context)


def _created(plugin: Plugin, context: EngineContext) -> Engine:
    """Raises StartupError, as the engine does, and where it fails otherwise."""
    make = plugin.load()
    try:
        made: Engine = make(context)
    except StartupError:
        raise
    except (Exception, SystemExit) as error:
        if plugin.ours:
            raise
        raise StartupError(f"engine.kind: {plugin} cannot be made: {type(error).__name__}: {error}") from error
    if not plugin.ours and Engine not in type(made).__mro__:
        why = f"it makes a {type(made).__name__}, which does not derive from Engine"
        raise StartupError(f"engine.kind: {plugin} cannot be used: {why}")
    return made


def _launched() -> Any:
    module, function = LAUNCHED
    return vars(import_module(module))[function]
