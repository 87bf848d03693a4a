"""The runtime of this server in the folder of installed agents: named by what it is made of, made where it is
missing."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.errors import AgentNotInstalled
from turnstile_server.runtimes.build import build_runtime
from turnstile_server.runtimes.install_folder import InstallFolder
from turnstile_server.runtimes.source import MACHINE, RuntimeNotMade, Source


@dataclass(frozen=True, slots=True)
class CarriedRuntime:
    """A runtime that is there. ``version``: of its Python, ``3.11.7``."""

    folder: Path
    version: str


class RuntimeStore:
    """Runtimes in ``folder``, made of ``source`` (None: this server's own Python) within ``timeout_s``."""

    def __init__(self, folder: InstallFolder, timeout_s: float, source: Source | None = None) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._source = source or Source.own()

    async def name(self) -> str:
        """Name of the runtime's folder. Raises RuntimeNotMade if no runtime can be made on this machine."""
        source = self._source

        def checked_digest() -> str:
            source.check()
            return source.digest()

        try:
            digest = await anyio.to_thread.run_sync(checked_digest)
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeNotMade(f"{source.executable} cannot be read: {error}") from error
        return f"runtime-{source.version}-{MACHINE}-{digest}"

    async def installed(self) -> bool:
        """True if the runtime is already there. Raises RuntimeNotMade."""
        return self._folder.exists(await self.name())

    async def get(self) -> CarriedRuntime:
        """The runtime, made if it is missing: some seconds, once. Raises RuntimeNotMade."""
        name = await self.name()
        try:
            with anyio.fail_after(self._timeout_s):
                await self._folder.fill_once(name, partial(build_runtime, self._source))
        except TimeoutError as error:
            raise RuntimeNotMade(
                f"the runtime for containers was not made within agents.install_timeout_s ({self._timeout_s:g} s)"
            ) from error
        except AgentNotInstalled as error:
            raise RuntimeNotMade(error.message) from error
        return CarriedRuntime(self._folder.path / name, self._source.version)
