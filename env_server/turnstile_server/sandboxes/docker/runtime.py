"""The engine's runtime that sandboxes run in, such as runc, gVisor's runsc or Kata's.

Most runtimes share the engine's kernel. One with a kernel of its own differs in two ways: its containers cannot
connect to Unix sockets of the host, and its own processes count to the container's memory and processes. A
container that says its kernel's release shows which kind a runtime is.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import anyio

from turnstile_server.errors import SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.settings import SandboxSettings

log = logging.getLogger(__name__)

ORDINARY = "runc"
"""Every engine has it, and it shares the kernel by definition."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """``own``: it is not the engine's. ``release``: None where the image could not say."""

    own: bool
    release: str | None = None


class ContainerRuntime:
    """``labels``: of the container that says which kernel it has."""

    def __init__(self, engine: DockerEngine, settings: SandboxSettings, labels: Mapping[str, str]) -> None:
        self._engine = engine
        self._settings = settings
        self._labels = labels
        self._kernel: Kernel | None = None
        self.name = ""

    @property
    def description(self) -> str:
        kernel = self._kernel
        if kernel is None or not kernel.own:
            return self.name
        release = "" if kernel.release is None else f" ({kernel.release})"
        return f"{self.name} with a kernel of its own{release}"

    async def check(self) -> None:
        """Raises StartupError where the engine does not know the runtime of the settings, SandboxUnavailable."""
        wanted = self._settings.docker_runtime
        self.name = wanted or await self._engine.default_runtime()
        if wanted is not None:
            known = await self._engine.runtimes()
            if wanted not in known:
                raise StartupError(
                    f"the Docker engine has no runtime {wanted} (sandboxes.docker_runtime), only "
                    f"{', '.join(known)}. Install it and name it in the engine's daemon.json, under `runtimes`"
                )
        self._take(Kernel(own=False) if self.name == ORDINARY else None)

    async def kernel(self, image: Image) -> Kernel:
        """Found out once, with a container of ``image``. Raises SandboxUnavailable where the runtime starts no
        container."""
        if self._kernel is None:
            self._take(await self._tried(image))
        assert self._kernel is not None
        return self._kernel

    def _take(self, kernel: Kernel | None) -> None:
        """Until the kind is known, containers get what one with its own kernel needs."""
        self._kernel = kernel
        if kernel is not None and not kernel.own:
            self._engine.overhead = {}
            return
        memory = self._settings.docker_runtime_memory_mb * _MIB
        self._engine.overhead = {
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": self._settings.docker_runtime_pids,
        }

    async def _tried(self, image: Image) -> Kernel:
        container = containers.name(f"kernel-{secrets.token_hex(6)}")
        try:
            await self._engine.create(
                container, containers.kernel_probe(image, self._labels), image_name=image.image_id
            )
            await self._engine.start(container, image_name=image.image_id)
            code = await self._engine.wait(container)
            said = await self._engine.log(container)
        except SandboxUnavailable as error:
            raise SandboxUnavailable(
                f"the runtime {self.name} (sandboxes.docker_runtime, or the engine's default) starts no "
                f"container: {error.message}"
            ) from error
        except TaskFailed:
            code, said = 1, ""
        finally:
            with anyio.CancelScope(shield=True):
                await self._engine.remove(container)
        if code != 0 or not said:
            log.warning(
                "the runtime %s is taken for one with a kernel of its own: %s has no `uname` that could tell",
                self.name,
                image.image_id,
            )
            return Kernel(own=True)
        return Kernel(own=said != await self._engine.kernel(), release=said)
