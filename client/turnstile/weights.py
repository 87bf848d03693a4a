"""A trainer's tensors as the pieces of a weight update. Needs torch, which the trainer has.

    client.update_weights_from_tensors(model.state_dict().items(), version="step-7")

The clients call this module; it is of use alone for a trainer that sends its pieces by other means.
"""

from __future__ import annotations

import base64
import json
import pickle
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar

from turnstile import errors
from turnstile.models import PauseMode, TensorFormat, WeightBucketRequest

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")

BUCKET_BYTES: Final = 32 << 20
"""Bytes of tensors in one piece; a tensor that is larger is a piece of its own."""

FLATTENED: Final = "flattened_bucket"
SAFETENSORS: Final = "safetensors"
SAFETENSORS_DTYPES: Final = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bool": "BOOL"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"},
}
"""Names of the format, by torch's."""

PICKLE_PROTOCOL: Final = 4
"""The newest that every Python of the last ten years reads."""


class ToldServers(Protocol):
    """The part of ``Client`` that ``announced`` calls."""

    def begin_weights(self, version: str, *, mode: PauseMode = "retract") -> object: ...

    def commit_weights(self) -> object: ...

    def abort_weights(self) -> object: ...


def announced(
    update: Callable[P, T], client: ToldServers, version: Callable[P, str], *, mode: PauseMode = "retract"
) -> Callable[P, T]:
    """``update``, by which a trainer gives engines its weights, with Turnstile's servers told around each call:

        actor.update_weights = announced(actor.update_weights, client, lambda meta: str(meta.version))

    ``version``: the name of the new weights, from the arguments of the call. Model calls wait while it runs. Where
    it fails the update is given up (``abort_weights``), and its error is raised.
    """

    @wraps(update)
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        client.begin_weights(version(*args, **kwargs), mode=mode)
        try:
            result = update(*args, **kwargs)
        except BaseException as error:
            try:
                client.abort_weights()
            except errors.TurnstileError as failure:
                error.add_note(f"the servers could not be told: {failure}")
            raise
        client.commit_weights()
        return result

    return told


def tensor_pieces(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    tensor_format: TensorFormat = FLATTENED,
    copies: int = 1,
) -> Iterator[WeightBucketRequest]:
    """Pieces as the engine takes them: ``EngineInfo`` says its ``tensor_format`` and ``tensor_copies``."""
    if tensor_format == FLATTENED:
        return flattened_buckets(named_tensors, bucket_bytes, tensor_parallel=copies)
    return safetensors_buckets(named_tensors, bucket_bytes)


def safetensors_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[WeightBucketRequest]:
    """Pieces for vLLM, in the order given: each is a safetensors file. ``named_tensors`` as in
    ``flattened_buckets``. Raises InvalidRequest without torch, and for a dtype that such a file cannot have."""
    for bucket in tensor_buckets(named_tensors, bucket_bytes):
        yield WeightBucketRequest(serialized=(_safetensors(bucket),), load_format=SAFETENSORS)


def flattened_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    tensor_parallel: int = 1,
) -> Iterator[WeightBucketRequest]:
    """Pieces for SGLang, in the order given: one flat tensor each, and where in it each tensor lies.

    ``named_tensors``: names as in the model's folder; on any device, of any dtype. They are read as the pieces are
    taken. ``tensor_parallel``: the engine's ranks; each gets whole tensors and takes its share. Tensors are
    serialized by value, so that no memory is shared and the engine may be anywhere. Raises InvalidRequest without
    torch.
    """
    for bucket in tensor_buckets(named_tensors, bucket_bytes):
        serialized = _serialized(bucket)
        yield WeightBucketRequest(serialized=(serialized,) * tensor_parallel, load_format=FLATTENED)


def tensor_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors in lists of at most ``bucket_bytes``, except where one tensor is larger."""
    if bucket_bytes < 1:
        raise errors.InvalidRequest(f"bucket_bytes is {bucket_bytes}: it must be at least 1")
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + tensor_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor_bytes
    if bucket:
        yield bucket


def _safetensors(bucket: list[tuple[str, torch.Tensor]]) -> str:
    """Base64 of a safetensors file: the length of its header, the header, the numbers.

    Written here because the library refuses tensors that share memory, as tied layers do.
    """
    header, parts, start = {}, [], 0
    for name, tensor in bucket:
        dtype = SAFETENSORS_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise errors.InvalidRequest(f"the tensor {name!r} is {tensor.dtype}, which safetensors cannot hold")
        part = _flat_bytes(tensor).numpy().tobytes()
        end = start + len(part)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        parts.append(part)
        start = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return base64.b64encode(b"".join([struct.pack("<Q", len(head)), head, *parts])).decode("ascii")


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's numbers as uint8[bytes] in this process's memory."""
    return tensor.detach().to("cpu").contiguous().flatten().view(_torch().uint8)


def _serialized(bucket: list[tuple[str, torch.Tensor]]) -> str:
    """Base64 of a pickle of ``{"flattened_tensor": uint8[n], "metadata": [...]}``.

    Plain pickle writes a tensor's numbers; the pickler of multiprocessing, which SGLang's serializer uses, writes
    where they lie in shared memory. SGLang reads both, and reads its records as any object with their fields.
    """
    torch = _torch()
    flat, metadata, start = [], [], 0
    for name, tensor in bucket:
        part = _flat_bytes(tensor)
        end = start + part.numel()
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=part.numel(),
            )
        )
        flat.append(part)
        start = end
    value = {"flattened_tensor": torch.cat(flat), "metadata": metadata}
    return base64.b64encode(pickle.dumps(value, protocol=PICKLE_PROTOCOL)).decode("ascii")


@dataclass(frozen=True, slots=True)
class BroadcastPiece:
    """One piece that the trainer broadcasts: the request that announces it, and its tensors in order."""

    request: WeightBucketRequest
    tensors: tuple[torch.Tensor, ...]


def broadcast_pieces(
    named_tensors: Iterable[tuple[str, torch.Tensor]], group: str, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[BroadcastPiece]:
    """Pieces for the process group that the engines know as ``group``."""
    for bucket in tensor_buckets(named_tensors, bucket_bytes):
        request = WeightBucketRequest(
            names=tuple(name for name, _ in bucket),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket),
            shapes=tuple(tuple(tensor.shape) for _, tensor in bucket),
            group=group,
        )
        yield BroadcastPiece(request, tuple(tensor.detach().contiguous() for _, tensor in bucket))


def broadcast(piece: BroadcastPiece, process_group: Any) -> None:
    """Broadcasts the piece's tensors from the trainer's rank 0 of ``process_group``. Blocks until all have
    them."""
    distributed = _torch().distributed
    pending = [
        distributed.broadcast(tensor, src=0, group=process_group, async_op=True) for tensor in piece.tensors
    ]
    for work in pending:
        work.wait()


def open_store(address: str, port: int, world_size: int, *, timeout_s: float = 60.0) -> Any:
    """The store of a process group at ``address``:``port``, an address of this machine. Blocks for no rank.

    Raises InvalidRequest where it cannot be opened: the port is taken, the address is none of ours.
    """
    distributed, timeout = _torch().distributed, timedelta(seconds=timeout_s)
    _check_address(address)
    try:
        return distributed.TCPStore(address, port, world_size, True, timeout, wait_for_workers=False)
    except RuntimeError as error:  # torch's DistError is one
        said = str(error).strip().partition("\n")[0]
        raise errors.InvalidRequest(f"no store can be opened at {address}:{port}: {said}") from error


def _check_address(address: str) -> None:
    """Refuses at once what torch tries to reach until its time-out, with a stack trace for each attempt."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise errors.InvalidRequest(f"no store can be opened at {address}: {error}") from error
    for family, kind, protocol, _, at in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(at)
            return
    raise errors.InvalidRequest(
        f"no store can be opened at {address}: it is no address of this machine. "
        "Give one of this machine that the engines reach"
    )


def trainer_group(
    name: str,
    address: str,
    port: int,
    world_size: int,
    *,
    backend: str = "nccl",
    timeout_s: float = 60.0,
    store: Any = None,
) -> Any:
    """The trainer's side of a process group, as rank 0, with its store at ``address``:``port``. ``store``: one
    that is open there already (``open_store``).

    Blocks until all ranks are there: call it in a thread beside ``join_weight_group``, which makes the engines
    join. It is apart from the default group of ``torch.distributed``, as SGLang's, TRL's and slime's are.
    """
    if store is None:
        store = open_store(address, port, world_size, timeout_s=timeout_s)
    c10d = _torch().distributed.distributed_c10d
    timeout = timedelta(seconds=timeout_s)
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _torch() -> Any:
    try:
        import torch  # noqa: PLC0415 - optional
    except ImportError as error:
        raise errors.InvalidRequest(
            "weights from tensors need torch, which is not installed here: pip install torch"
        ) from error
    return torch
