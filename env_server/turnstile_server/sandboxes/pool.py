"""A pool of sandboxes over any provider: at most ``max_open`` of them, and some ready beforehand.

What must hold: never more than ``max_open`` sandboxes exist, warm ones and those being made or removed included;
calls that wait for room are served in order, and refused after ``wait_s``; a warm sandbox gives way to a waiting
call, and is never handed out after it has died; everything is destroyed at close, lent sandboxes too. The pool
does not know what a sandbox is made of: it is a provider itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from turnstile_server.errors import SandboxUnavailable, TaskFailed, TurnstileError
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.protocol import Sandbox, SandboxOrigin, SandboxProvider, SandboxSpec
from turnstile_server.sandboxes.wrapper import ProviderWrapper, SandboxWrapper
from turnstile_server.settings import Bounds, SandboxSettings

log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Pause after a warm sandbox could not be made, doubled after each failure."""

_LONGEST_RETRY_S = 60.0
"""Refills that fail are tried again ever more rarely, but an engine that came back is noticed within a minute."""

_KEPT_IMAGES = 64
"""Images that are told; the engine may have more."""


@dataclass(frozen=True)
class PoolBounds(Bounds):
    """Bounds that nobody has asked to change."""

    warm_specs: int = 2
    """How many of the latest sandbox specs have warm sandboxes."""


class PooledSandbox(SandboxWrapper):
    """A sandbox that was lent out. ``end`` begins to destroy ``inner`` and to free its place; it is called once,
    and every call of ``destroy`` waits for it."""

    def __init__(
        self, inner: Sandbox, end: Callable[[PooledSandbox], BackgroundTask[None]], origin: SandboxOrigin
    ) -> None:
        super().__init__(inner)
        self._origin = origin
        self._end = end
        self._ending: BackgroundTask[None] | None = None

    @property
    def origin(self) -> SandboxOrigin:
        return self._origin

    def begin_destroy(self) -> BackgroundTask[None]:
        if self._ending is None:
            self._ending = self._end(self)
        return self._ending

    async def destroy(self) -> None:
        await self.begin_destroy().wait()


class _Ticket:
    """A ``create`` that waits for room, in the order of arrival. ``woken`` is set when it may look again."""

    def __init__(self) -> None:
        self.woken = anyio.Event()


class SandboxPool(ProviderWrapper):
    """A ``SandboxProvider`` around another one."""

    def __init__(self, provider: SandboxProvider, settings: SandboxSettings) -> None:
        super().__init__(provider)
        self._settings = settings
        self._background: BackgroundTasks | None = None
        self._taken = 0
        self._waiting: deque[_Ticket] = deque()
        self._warm: OrderedDict[SandboxSpec, deque[Sandbox]] = OrderedDict()
        """The specs that are kept warm, the latest last."""
        self._images: OrderedDict[str, None] = OrderedDict()
        """Of the latest sandboxes, the last one at the end."""
        self._lent: set[PooledSandbox] = set()
        self._ending: set[BackgroundTask[None]] = set()
        """Sandboxes that are being destroyed."""
        self._refill_wanted = anyio.Event()
        self._refiller: BackgroundTask[None] | None = None
        self._closed = False

    @property
    def taken(self) -> int:
        """Sandboxes that exist, are being made or being removed."""
        return self._taken

    @property
    def warm(self) -> int:
        return sum(len(ready) for ready in self._warm.values())

    @property
    def images(self) -> tuple[str, ...]:
        """Images that sandboxes were made of, the last one first: the engine has them."""
        return tuple(reversed(self._images))

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        self._background = tasks
        await self.inner.start(agents, tasks)
        fine = self.inner.isolated and (self.inner.missing is None or self._settings.kind == "none")
        log.log(logging.INFO if fine else logging.WARNING, "sandboxes: %s", self.inner.description)
        if self._settings.warm:
            self._refiller = tasks.start(self._refill, name="sandbox refill", shielded=False)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        waited_s = 0.0
        while True:
            began = anyio.current_time()
            ready = await self._claim(spec)
            waited_s += anyio.current_time() - began
            warm = ready is not None
            if ready is None:
                try:
                    ready = await self._make(spec)
                except BaseException:
                    self._give_back()
                    raise
                break
            try:
                alive = await self._alive(ready)
            except BaseException:
                self._discard(ready)
                raise
            if alive:
                break
            self._discard(ready)
        self._keep_warm(spec)
        lent = PooledSandbox(ready, self._end, SandboxOrigin(waited_s, warm or ready.origin.warm))
        self._lent.add(lent)
        return lent

    async def close(self) -> None:
        self._closed = True
        if self._refiller is not None:
            await self._refiller.stop()
        for waiting in self._waiting:
            waiting.woken.set()
        self._forget_specs(keep=0)
        for lent in list(self._lent):
            lent.begin_destroy()
        while self._ending:
            await next(iter(self._ending)).ended.wait()
        await self.inner.close()

    # Room.

    async def _claim(self, spec: SandboxSpec) -> Sandbox | None:
        """A warm sandbox, or None: there is room to make one. Both count as taken by the caller."""
        ticket = _Ticket()
        self._waiting.append(ticket)
        try:
            with anyio.fail_after(self._settings.wait_s):
                while True:
                    if self._closed:
                        raise SandboxUnavailable("the server is closing")
                    if self._waiting[0] is ticket:
                        if ready := self._warm.get(spec):
                            return ready.popleft()
                        if self._taken < self._settings.places:
                            self._taken += 1
                            return None
                        if not self._ending:
                            self._evict_one()
                    ticket.woken = anyio.Event()
                    await ticket.woken.wait()
        except TimeoutError as error:
            raise SandboxUnavailable(
                f"all {self._settings.places} sandboxes (sandboxes.max_open) were in use for "
                f"{self._settings.wait_s:g} s (sandboxes.wait_s)"
            ) from error
        finally:
            self._waiting.remove(ticket)
            self._wake()

    def _give_back(self) -> None:
        self._taken -= 1
        self._wake()
        self._refill_wanted.set()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0].woken.set()

    def _evict_one(self) -> None:
        """Destroys a warm sandbox of the spec that was asked for longest ago."""
        for ready in self._warm.values():
            if ready:
                self._discard(ready.popleft())
                return

    # Warm sandboxes.

    def _keep_warm(self, spec: SandboxSpec) -> None:
        if not self._settings.warm or self._closed:
            return
        self._warm.setdefault(spec, deque())
        self._warm.move_to_end(spec)
        self._forget_specs(keep=self._settings.bounds_of(PoolBounds).warm_specs)
        self._refill_wanted.set()

    def _forget_specs(self, keep: int) -> None:
        while len(self._warm) > keep:
            _, ready = self._warm.popitem(last=False)
            for sandbox in ready:
                self._discard(sandbox)

    async def _refill(self) -> None:
        retry_s = _RETRY_S
        while True:
            await self._refill_wanted.wait()
            self._refill_wanted = anyio.Event()
            while (spec := self._cold_spec()) is not None:
                self._taken += 1
                try:
                    sandbox = await self._make(spec)
                except TaskFailed as error:
                    log.warning("no sandbox is kept warm for %s: %s", spec.image or "the default image", error)
                    self._warm.pop(spec, None)
                    self._give_back()
                except Exception as error:  # an error that ended the refilling would not be seen
                    self._give_back()
                    log.warning(
                        "a warm sandbox could not be made, again in %g s: %s",
                        retry_s,
                        error,
                        exc_info=not isinstance(error, TurnstileError),
                    )
                    await anyio.sleep(retry_s)
                    retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                except BaseException:
                    self._give_back()
                    raise
                else:
                    retry_s = _RETRY_S
                    if spec in self._warm:
                        self._warm[spec].append(sandbox)
                        self._wake()
                    else:
                        self._discard(sandbox)

    def _cold_spec(self) -> SandboxSpec | None:
        """The latest spec that lacks a warm sandbox, if there is room that no call waits for."""
        if self._waiting or self._taken >= self._settings.places:
            return None
        return next((s for s in reversed(self._warm) if len(self._warm[s]) < self._settings.warm), None)

    async def _alive(self, sandbox: Sandbox) -> bool:
        """True if a warm sandbox answers. Nothing has run in it, so there is nothing to stop."""
        try:
            await sandbox.stop_all()
        except TurnstileError as error:
            log.warning("a warm sandbox had died: %s", error)
            return False
        return True

    # Making and ending.

    async def _make(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self.inner.create(spec)
        self._has(spec.image)
        if self._closed:
            await sandbox.destroy()
            raise SandboxUnavailable("the server is closing")
        return sandbox

    def _has(self, image: str | None) -> None:
        if image is not None:
            self._images[image] = None
            self._images.move_to_end(image)
            if len(self._images) > _KEPT_IMAGES:
                self._images.popitem(last=False)

    def _end(self, lent: PooledSandbox) -> BackgroundTask[None]:
        self._lent.discard(lent)
        return self._discard(lent.inner)

    def _discard(self, sandbox: Sandbox) -> BackgroundTask[None]:
        """Destroys ``sandbox`` and frees its place, whether or not the caller waits for it."""

        async def discard() -> None:
            try:
                await sandbox.destroy()
            except Exception as error:
                log.warning("a sandbox could not be destroyed: %s", error)
                raise
            finally:
                self._ending.discard(task)
                self._give_back()

        if self._background is None:
            raise RuntimeError("the pool was not started")
        task = self._background.start(discard, name=f"destroy {sandbox.sandbox_id}")
        self._ending.add(task)
        return task
