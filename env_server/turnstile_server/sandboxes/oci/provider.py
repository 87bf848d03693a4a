"""Sandboxes with images where there is no container engine: ``local``, with the files of an image as their root.

What it holds is what bubblewrap holds on the machine; an image adds no rights. The root is read-only, and shared
by all sandboxes of the image; a work folder of the image's own is an overlay in the sandbox's memory.
"""

from __future__ import annotations

import anyio.to_thread

from turnstile_server.errors import SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.choose_python import NO_RUNTIME, choose_python
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.local.image_root import ImageRoot
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.oci.store import ImageStore, remedy
from turnstile_server.sandboxes.protocol import ImageFacts, ProviderSetup, SandboxSpec


class OciProvider(LocalProvider):
    """A ``SandboxProvider``. ``store``: None is the user's own."""

    name = "oci"

    def __init__(
        self, setup: ProviderSetup, store: ImageStore | None = None, *, as_root: bool | None = None
    ) -> None:
        super().__init__(setup.settings, setup.run_dir, as_root=as_root, hidden=setup.hidden, egress=setup.egress)
        self._store = store or ImageStore()
        self._runtimes = setup.runtimes
        self._carried = NO_RUNTIME
        self._background: BackgroundTasks | None = None

    @property
    def carries_runtime(self) -> bool:
        return self._carried.runtime is not None

    @property
    def description(self) -> str:
        return f"{super().description}; images in {self._store.path}, {self._carried.description}"

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        if missing := self._store.lacking():
            raise StartupError(
                f"sandboxes of images need {' and '.join(missing)}: {remedy(missing)} (sandboxes.kind = oci)"
            )
        await super().start(agents, tasks)
        if self._frame is None or not self._frame.mounts_disk:
            why = self._together or "bubblewrap does not work here"
            raise StartupError(f"sandboxes of images need name spaces in which bubblewrap may mount: {why}")
        self._store.one_owner = not self._frame.privileged
        self._carried = await choose_python(self._settings.docker_python, self._runtimes)
        self._background = tasks

    async def root_of(self, spec: SandboxSpec) -> tuple[SandboxSpec, ImageRoot | None]:
        name = spec.image or self._settings.docker_image
        if self._background is None:
            raise SandboxUnavailable("the sandbox provider is not started, or closed")
        try:
            found = await self._store.get(name, self._background)
        except TaskFailed as error:
            if spec.image is not None:
                raise
            raise SandboxUnavailable(f"{error}; name another one (sandboxes.docker_image)") from error
        spec = containers.with_workdir(spec, found.image, name)
        runtime = self._carried.runtime if containers.can_carry(found.image) else None
        root = ImageRoot(found.root, found.image, None if runtime is None else runtime.folder)
        try:
            await anyio.to_thread.run_sync(root.prepare, spec)
        except OSError as error:
            raise SandboxUnavailable(f"the image {name} in {found.root} cannot be prepared: {error}") from error
        return spec, root

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        found = self._store.known(image or self._settings.docker_image)
        return None if found is None else ImageFacts(found.image_id, found.size)

    async def close(self) -> None:
        self._background = None
        self._store.close()
        await super().close()


def create(setup: ProviderSetup) -> OciProvider:
    """The backend that ``sandboxes.kind = oci`` names."""
    return OciProvider(setup)
