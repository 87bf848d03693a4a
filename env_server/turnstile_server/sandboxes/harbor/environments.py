"""What is used of Harbor (0.26: ``harbor.environments.base.BaseEnvironment``), which needs Python 3.12 and is
imported only here, and only where this backend was chosen."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from turnstile.plugins import is_reference
from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.protocol import SandboxLimits

_PYTHON: Final = (3, 12)
_MIB: Final = 1 << 20
_OF_EVERY_CLASS: Final = "extra_docker_compose"
"""An option of ``harbor run`` itself, which environments take beside their own."""


class HarborExec(Protocol):
    """The end of a command. Some environments write both streams into the first."""

    stdout: str | None
    stderr: str | None
    return_code: int


class ProvidedEnvironment(Protocol):
    """One environment. Each method raises whatever the provider's library raises."""

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def upload_file(self, source_path: Path, target_path: str) -> None: ...

    async def exec(self, command: str, *, timeout_sec: int, user: str) -> HarborExec: ...


class HarborKind:
    """A kind of environment: ``name`` is Harbor's own, or ``package.module:Class``. ``options``: those of its
    class."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self._options = dict(options)
        self._class: Any = None
        self._modules: dict[str, Any] = {}

    def load(self) -> None:
        """Imports it, and has it check options and credentials. Blocks. Raises StartupError."""
        if sys.version_info < _PYTHON:
            raise StartupError(
                f"sandboxes.kind = harbor:{self.name} needs Python 3.12 or newer, as Harbor does; this server "
                f"runs on {'.'.join(map(str, sys.version_info[:2]))}"
            )
        try:
            for part in (
                "environments.factory",
                "models.environment_type",
                "models.task.config",
                "models.trial.paths",
            ):
                self._modules[part] = import_module(f"harbor.{part}")
        except ImportError as error:
            raise StartupError(
                f"sandboxes.kind = harbor:{self.name} needs Harbor: pip install 'turnstile-rl[harbor]' "
                f"'harbor[{self.name}]' ({error})"
            ) from error
        factory = self._modules["environments.factory"].EnvironmentFactory
        names = factory.registered_names()
        if self.name not in names and not is_reference(self.name):
            raise StartupError(
                f"Harbor has no environment {self.name!r}; it has {', '.join(names)}, and package.module:Class"
            )
        try:
            if self.name in names:
                kind = self._modules["models.environment_type"].EnvironmentType(self.name)
                self._class = factory.get_environment_class(kind)
            else:
                self._class = factory.get_environment_class(import_path=self.name)
            own = {name: value for name, value in self._options.items() if name != _OF_EVERY_CLASS}
            self._class.preflight(kwargs=own)
        except (Exception, SystemExit) as error:
            raise StartupError(f"sandboxes.kind = harbor:{self.name} cannot be used: {said(error)}") from error

    @property
    def limits(self) -> str:
        """Which limits this kind holds, in words."""
        can = self._class.resource_capabilities()
        if can is None:
            return "limits: not known"
        held = [word for word, holds in (("memory", can.memory_limit), ("cpus", can.cpu_limit)) if holds]
        asked = [word for word, asks in (("memory", can.memory_request), ("cpus", can.cpu_request)) if asks]
        rest = [word for word in asked if word not in held]
        return f"limits: {' and '.join(held) or 'none'}" + f" ({' and '.join(rest)} only reserved)" * bool(rest)

    def make(
        self, session: str, folder: Path, image: str, limits: SandboxLimits | None, reachable: str | None
    ) -> ProvidedEnvironment:
        """An environment that is not started. Blocks. ``folder``: of this environment alone, for what Harbor
        writes. ``reachable``: the one host that it may reach; None: whatever the provider gives. Raises what
        Harbor raises; ValueError where it cannot shut the network but for that host."""
        config, paths = self._modules["models.task.config"], self._modules["models.trial.paths"]
        given, policy = {}, config.NetworkPolicy()
        if limits is not None:
            can = self._class.resource_capabilities()
            fractions = can is not None and can.fractional_cpus
            given["cpus"] = limits.cpus if fractions else math.ceil(limits.cpus)
            given["memory_mb"] = limits.memory_bytes // _MIB
        if reachable is not None:
            policy = config.NetworkPolicy(network_mode=config.NetworkMode.ALLOWLIST, allowed_hosts=[reachable])
        for part in ("environment", "trial"):
            (folder / part).mkdir(exist_ok=True)
        made: ProvidedEnvironment = self._class(
            environment_dir=folder / "environment",
            environment_name="turnstile",
            session_id=session,
            trial_paths=paths.TrialPaths(folder / "trial"),
            task_env_config=config.EnvironmentConfig(docker_image=image, **given),
            network_policy=policy,
            **self._options,
        )
        return made


def said(error: BaseException) -> str:
    """The error of a provider's library in one line."""
    words = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        return words
    return f"{type(error).__name__}: {words[-1000:]}" if words else type(error).__name__
