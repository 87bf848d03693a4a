"""The engine behind a server, from a training loop: pauses, new weights every way, adapters, sleep, workers.

``AsyncClient`` and ``Client`` have these methods. Each is one call: the order that a way needs, and what can go
wrong on it, is the server's business. Every method acts on every server of the client, or on ``server`` alone,
and returns the engine as it is afterwards, by server URL.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from turnstile import _engine_requests as requests
from turnstile import errors, weights
from turnstile._operations import Operations
from turnstile._retry import ClientSettings
from turnstile.models import EngineInfo, PauseMode, TensorFormat

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")

Engines = dict[str, EngineInfo]
"""The engine of each server, by URL."""

JOINING = ("serving", "fenced")
"""Statuses of the workers that take weights."""

CANCEL_S = 30.0
"""Time to tell the servers that an update will not be finished, when one of its pieces failed."""


class AsyncEngineControl:
    """The methods of ``AsyncClient`` that control engines."""

    _operations: Operations
    _settings: ClientSettings

    async def engine(self, server: str | None = None) -> Engines:
        """The engine of ``server``, or of every server, by URL."""
        return await self._operations.on_servers(requests.engine(), server)

    async def pause(self, mode: PauseMode = "retract", *, server: str | None = None) -> Engines:
        """Pauses generation. ``retract`` queues running calls again, ``in_place`` holds them, ``abort`` cuts
        them with the tokens they have."""
        return await self._operations.on_servers(requests.pause(mode, self._slow_s), server)

    async def resume(self, *, server: str | None = None) -> Engines:
        return await self._operations.on_servers(requests.resume(self._slow_s), server)

    async def update_weights(
        self, path: str, version: str, *, mode: PauseMode = "retract", server: str | None = None
    ) -> Engines:
        """Loads the weights in folder ``path``, a path on the engine's machine. Later tokens carry ``version``.

        ``mode``: what happens to calls in flight. ``retract`` computes their cache again and is exact;
        ``in_place`` keeps it, and marks what they sample afterwards as ``stale_kv``; ``abort`` cuts them.
        """
        call = requests.update_weights(path, version, mode, self._slow_s)
        return await self._operations.on_servers(call, server)

    async def update_weights_from_tensors(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: str,
        *,
        mode: PauseMode = "retract",
        bucket_bytes: int = weights.BUCKET_BYTES,
        tensor_parallel: int | None = None,
        server: str | None = None,
    ) -> Engines:
        """Sends the weights themselves, in pieces of ``bucket_bytes``; ``named_tensors`` as in a ``state_dict``
        with the names of the model's folder. They are written as the engine takes them. ``tensor_parallel``:
        copies of each piece; unless given as many as the engine says. Needs torch."""
        tensor_format, copies = await self._tensor_format(server)
        pieces = weights.tensor_pieces(
            named_tensors, bucket_bytes, tensor_format=tensor_format, copies=tensor_parallel or copies
        )
        async with self._update(version, "tensors", mode, server):
            async for piece in _in_thread(pieces):
                await self._operations.on_servers(requests.load_bucket(piece, self._slow_s), server)
        return await self._end_update(server)

    async def _tensor_format(self, server: str | None) -> tuple[TensorFormat, int]:
        """The format in which the engines take tensors, and the number of copies. An engine that takes none
        refuses the update."""
        said = {(info.tensor_format, info.tensor_copies) for info in (await self.engine(server)).values()}
        if len(said) > 1:
            raise errors.InvalidRequest(
                "the servers' engines take tensors in different formats or numbers: update each with server="
            )
        [(tensor_format, copies)] = said
        return tensor_format or weights.FLATTENED, copies

    async def broadcast_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: str,
        *,
        group: str,
        process_group: Any,
        mode: PauseMode = "retract",
        bucket_bytes: int = weights.BUCKET_BYTES,
        server: str | None = None,
    ) -> Engines:
        """Broadcasts the weights from rank 0 of ``process_group`` (``turnstile.weights.trainer_group``, or the
        trainer's own), which the engines joined as ``group``. Needs torch.

        When this fails in the middle, the group may hang: leave it on both sides and make a new one.
        """
        pieces = weights.broadcast_pieces(named_tensors, group, bucket_bytes)
        async with self._update(version, "distributed", mode, server):
            async for piece in _in_thread(pieces):
                await self._broadcast(piece, process_group, server)
        return await self._end_update(server)

    async def _broadcast(self, piece: weights.BroadcastPiece, process_group: Any, server: str | None) -> None:
        """The engines receive while the trainer sends. An engine that refuses ends the wait for the trainer, and a
        trainer that cannot send that for the engines; the first error is raised."""
        call = requests.load_bucket(piece.request, self._slow_s)

        async def receive() -> None:
            try:
                await self._operations.on_servers_at_once(call, server)
            except errors.TurnstileError as error:
                failed.append(error)
                sending.cancel()

        failed: list[Exception] = []
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as sending:
                tasks.start_soon(receive)
                send = partial(weights.broadcast, piece, process_group)
                try:
                    await anyio.to_thread.run_sync(send, abandon_on_cancel=True)
                except Exception as error:  # noqa: BLE001 - torch's; raised below, outside of the task group
                    failed.append(error)
                    tasks.cancel_scope.cancel()
        if failed:
            raise failed[0]

    @asynccontextmanager
    async def _update(
        self, version: str, way: Literal["tensors", "distributed"], mode: PauseMode, server: str | None
    ) -> AsyncIterator[None]:
        """An update in pieces, which is cancelled where one of them fails: the servers then know that it will not
        come to its end."""
        try:
            call = requests.begin_update(version, way, mode, self._slow_s)
            await self._operations.on_servers(call, server)
            yield
        except BaseException as error:
            with anyio.move_on_after(CANCEL_S, shield=True):
                try:
                    await self._operations.on_servers(requests.cancel_update(self._slow_s), server)
                except errors.TurnstileError as failure:
                    error.add_note(f"the update could not be cancelled: {failure}")
            raise

    async def _end_update(self, server: str | None) -> Engines:
        return await self._operations.on_servers(requests.end_update(self._slow_s), server)

    async def begin_weights(
        self, version: str, *, mode: PauseMode = "retract", server: str | None = None
    ) -> Engines:
        """The trainer gives the engines new weights by its own means from here on, until ``commit_weights`` or
        ``abort_weights``: model calls wait, and none is sampled by a mixture.

        ``mode`` as in ``update_weights``, but for ``in_place``. What an engine samples before the commit, because
        the trainer resumed it, is of weights called ``unknown``. Raises InvalidRequest for an engine that cannot
        (``EngineInfo.updates`` lacks ``trainer``), Conflict for a name that other weights had.
        """
        call = requests.begin_update(version, "trainer", mode, self._slow_s)
        return await self._operations.on_servers(call, server)

    async def commit_weights(self, *, server: str | None = None) -> Engines:
        """The trainer's weights are on the engines: they are served, and waiting calls go on. An engine that says
        that it has others is fenced. Raises EngineFailed where all do, Conflict without ``begin_weights``."""
        return await self._end_update(server)

    async def abort_weights(self, *, server: str | None = None) -> Engines:
        """The trainer gives its update up. What it wrote is not known here, so the engines serve nothing until a
        whole update comes. No-op where none is under way."""
        return await self._operations.on_servers(requests.cancel_update(self._slow_s), server)

    async def join_weight_group(
        self,
        name: str,
        address: str,
        port: int,
        world_size: int,
        *,
        rank_offset: int = 1,
        ranks_per_worker: int = 1,
        backend: Literal["nccl", "gloo"] = "nccl",
        server: str | None = None,
    ) -> Engines:
        """The engines join the process group whose store the trainer's rank 0 has at ``address``:``port``.
        Returns when the group is complete, so the trainer joins beside this call
        (``turnstile.weights.trainer_group``). Each worker has ranks of its own, from ``rank_offset`` on: first
        those of the first server."""
        fields = {
            "name": name,
            "address": address,
            "port": port,
            "world_size": world_size,
            "rank_offset": rank_offset,
            "ranks_per_worker": ranks_per_worker,
            "backend": backend,
        }
        if server is not None or len(self._operations.servers) == 1:
            return await self._operations.on_servers_at_once(requests.join_group(fields, self._slow_s), server)
        calls = {}
        for url, info in (await self.engine()).items():
            ranks = ranks_per_worker * sum(worker.status in JOINING for worker in info.workers)
            if not ranks:
                raise errors.InvalidRequest(f"{url} has no worker that can join a group")
            own = fields | {"rank_offset": rank_offset, "ranks": ranks}
            calls[url] = requests.join_group(own, self._slow_s)
            rank_offset += ranks
        if rank_offset != world_size:
            raise errors.InvalidRequest(
                f"the group has world_size {world_size}, and with the workers of all servers it has {rank_offset}"
            )
        return await self._operations.at_once(calls)

    async def leave_weight_group(self, name: str, *, server: str | None = None) -> Engines:
        """The engines leave the group; one that they never joined is ignored."""
        return await self._operations.on_servers_at_once(requests.leave_group(name, self._slow_s), server)

    async def load_adapter(self, name: str, path: str, *, server: str | None = None) -> Engines:
        """Loads the LoRA adapter in folder ``path``, a path on the engine's machine. Episodes name it; their turns
        carry the version ``WEIGHTS+NAME``. A name stands for one adapter."""
        return await self._operations.on_servers(requests.load_adapter(name, path, self._slow_s), server)

    async def unload_adapter(self, name: str, *, server: str | None = None) -> Engines:
        return await self._operations.on_servers(requests.unload_adapter(name, self._slow_s), server)

    async def sleep(self, *, server: str | None = None) -> Engines:
        """Frees the engine's memory, once no call runs. It serves nothing until ``wake``."""
        return await self._operations.on_servers(requests.sleep(self._slow_s), server)

    async def wake(self, *, server: str | None = None) -> Engines:
        """Takes the memory back. Load weights, then ``resume``."""
        return await self._operations.on_servers(requests.wake(self._slow_s), server)

    async def add_worker(self, url: str, *, server: str | None = None) -> Engines:
        """An engine of the same kind and model joins those that a server spreads its calls over."""
        return await self._operations.on_servers(requests.add_worker(url, self._slow_s), server)

    async def remove_worker(self, worker_id: str, *, server: str | None = None) -> Engines:
        """A worker gets no more calls, and is let go when those that it has have ended."""
        return await self._operations.on_servers(requests.remove_worker(worker_id, self._slow_s), server)

    @property
    def _slow_s(self) -> float:
        return self._settings.slow_s


async def _in_thread(values: Iterator[T]) -> AsyncIterator[T]:
    """The values, each made in a worker thread: copying and serializing tensors takes long.

    A cancelled caller waits for the thread: one that is inside torch when Python ends aborts the process.
    """
    making = threading.Lock()

    def make() -> T | None:
        with making:
            return next(values, None)

    try:
        while (value := await anyio.to_thread.run_sync(make)) is not None:
            yield value
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(making.acquire)
        raise


class EngineControl:
    """The methods of ``Client`` that control engines."""

    @abstractmethod
    def _run(self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a method of the async client on the client's loop."""
        ...

    def engine(self, server: str | None = None) -> Engines:
        """The engine of ``server``, or of every server, by URL."""
        return self._run(AsyncEngineControl.engine, server)

    def pause(self, mode: PauseMode = "retract", *, server: str | None = None) -> Engines:
        """Pauses generation. ``retract`` queues running calls again, ``in_place`` holds them, ``abort`` cuts
        them with the tokens they have."""
        return self._run(AsyncEngineControl.pause, mode, server=server)

    def resume(self, *, server: str | None = None) -> Engines:
        return self._run(AsyncEngineControl.resume, server=server)

    def update_weights(
        self, path: str, version: str, *, mode: PauseMode = "retract", server: str | None = None
    ) -> Engines:
        """Loads the weights in folder ``path``, a path on the engine's machine. Later tokens carry ``version``.

        ``mode``: what happens to calls in flight. ``retract`` computes their cache again and is exact;
        ``in_place`` keeps it, and marks what they sample afterwards as ``stale_kv``; ``abort`` cuts them.
        """
        return self._run(AsyncEngineControl.update_weights, path, version, mode=mode, server=server)

    def update_weights_from_tensors(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: str,
        *,
        mode: PauseMode = "retract",
        bucket_bytes: int = weights.BUCKET_BYTES,
        tensor_parallel: int | None = None,
        server: str | None = None,
    ) -> Engines:
        """Sends the weights themselves, in pieces of ``bucket_bytes``; ``named_tensors`` as in a ``state_dict``
        with the names of the model's folder. They are written as the engine takes them. ``tensor_parallel``:
        copies of each piece; unless given as many as the engine says. Needs torch."""
        return self._run(
            AsyncEngineControl.update_weights_from_tensors,
            named_tensors,
            version,
            mode=mode,
            bucket_bytes=bucket_bytes,
            tensor_parallel=tensor_parallel,
            server=server,
        )

    def broadcast_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: str,
        *,
        group: str,
        process_group: Any,
        mode: PauseMode = "retract",
        bucket_bytes: int = weights.BUCKET_BYTES,
        server: str | None = None,
    ) -> Engines:
        """Broadcasts the weights from rank 0 of ``process_group`` (``turnstile.weights.trainer_group``, or the
        trainer's own), which the engines joined as ``group``. Needs torch.

        When this fails in the middle, the group may hang: leave it on both sides and make a new one.
        """
        return self._run(
            AsyncEngineControl.broadcast_weights,
            named_tensors,
            version,
            group=group,
            process_group=process_group,
            mode=mode,
            bucket_bytes=bucket_bytes,
            server=server,
        )

    def begin_weights(self, version: str, *, mode: PauseMode = "retract", server: str | None = None) -> Engines:
        """The trainer gives the engines new weights by its own means from here on, until ``commit_weights`` or
        ``abort_weights``: model calls wait, and none is sampled by a mixture.

        ``mode`` as in ``update_weights``, but for ``in_place``. What an engine samples before the commit, because
        the trainer resumed it, is of weights called ``unknown``. Raises InvalidRequest for an engine that cannot
        (``EngineInfo.updates`` lacks ``trainer``), Conflict for a name that other weights had.
        """
        return self._run(AsyncEngineControl.begin_weights, version, mode=mode, server=server)

    def commit_weights(self, *, server: str | None = None) -> Engines:
        """The trainer's weights are on the engines: they are served, and waiting calls go on. An engine that says
        that it has others is fenced. Raises EngineFailed where all do, Conflict without ``begin_weights``."""
        return self._run(AsyncEngineControl.commit_weights, server=server)

    def abort_weights(self, *, server: str | None = None) -> Engines:
        """The trainer gives its update up. What it wrote is not known here, so the engines serve nothing until a
        whole update comes. No-op where none is under way."""
        return self._run(AsyncEngineControl.abort_weights, server=server)

    def join_weight_group(
        self,
        name: str,
        address: str,
        port: int,
        world_size: int,
        *,
        rank_offset: int = 1,
        ranks_per_worker: int = 1,
        backend: Literal["nccl", "gloo"] = "nccl",
        server: str | None = None,
    ) -> Engines:
        """The engines join the process group whose store the trainer's rank 0 has at ``address``:``port``.
        Returns when the group is complete, so the trainer joins beside this call
        (``turnstile.weights.trainer_group``). Each worker has ranks of its own, from ``rank_offset`` on: first
        those of the first server."""
        return self._run(
            AsyncEngineControl.join_weight_group,
            name,
            address,
            port,
            world_size,
            rank_offset=rank_offset,
            ranks_per_worker=ranks_per_worker,
            backend=backend,
            server=server,
        )

    def leave_weight_group(self, name: str, *, server: str | None = None) -> Engines:
        """The engines leave the group; one that they never joined is ignored."""
        return self._run(AsyncEngineControl.leave_weight_group, name, server=server)

    def load_adapter(self, name: str, path: str, *, server: str | None = None) -> Engines:
        """Loads the LoRA adapter in folder ``path``, a path on the engine's machine. Episodes name it; their turns
        carry the version ``WEIGHTS+NAME``. A name stands for one adapter."""
        return self._run(AsyncEngineControl.load_adapter, name, path, server=server)

    def unload_adapter(self, name: str, *, server: str | None = None) -> Engines:
        return self._run(AsyncEngineControl.unload_adapter, name, server=server)

    def sleep(self, *, server: str | None = None) -> Engines:
        """Frees the engine's memory, once no call runs. It serves nothing until ``wake``."""
        return self._run(AsyncEngineControl.sleep, server=server)

    def wake(self, *, server: str | None = None) -> Engines:
        """Takes the memory back. Load weights, then ``resume``."""
        return self._run(AsyncEngineControl.wake, server=server)

    def add_worker(self, url: str, *, server: str | None = None) -> Engines:
        """An engine of the same kind and model joins those that a server spreads its calls over."""
        return self._run(AsyncEngineControl.add_worker, url, server=server)

    def remove_worker(self, worker_id: str, *, server: str | None = None) -> Engines:
        """A worker gets no more calls, and is let go when those that it has have ended."""
        return self._run(AsyncEngineControl.remove_worker, worker_id, server=server)
