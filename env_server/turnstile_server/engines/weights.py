"""New weights as they come to an engine: the ways, and the pieces of an update that comes in pieces.

Plain data. Tensors pass through as the trainer serialized them: no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

UpdateWay = Literal["disk", "tensors", "distributed", "ipc", "trainer"]
"""``disk``: a folder that the engine reads. ``tensors``: serialized in the request. ``distributed``: broadcast in
a process group that the engine has joined. ``ipc``: CUDA memory of the same machine, by handle. ``trainer``: past
this server, by the trainer's own means between the begin and the end."""


@dataclass(frozen=True, slots=True)
class TensorBucket:
    """Named tensors. ``serialized``: for each tensor-parallel rank, base64 of what SGLang's
    ``MultiprocessingSerializer`` makes; ``load_format`` ``flattened_bucket``: one flat tensor and its metadata."""

    serialized: tuple[str, ...]
    load_format: str | None = None


@dataclass(frozen=True, slots=True)
class BroadcastBucket:
    """Tensors that the trainer broadcasts now, in this order, in the group ``group``: names, torch dtypes
    (``float32``) and shapes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group: str


@dataclass(frozen=True, slots=True)
class IpcBucket:
    """CUDA memory by handle: for each device (UUID) the ZMQ socket that gives the handles."""

    handles: Mapping[str, str]


def adapter_version(version: str, adapter: str | None) -> str:
    """The name of the weights that sampled: those of the engine, with the LoRA adapter that the call named."""
    return version if adapter is None else f"{version}+{adapter}"


WeightBucket = TensorBucket | BroadcastBucket | IpcBucket


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A process group of the trainer (torch.distributed). The engine's ranks are ``rank_offset`` and up."""

    name: str
    address: str
    port: int
    world_size: int
    rank_offset: int
    backend: str = "nccl"
