"""Reads which tensors a serialized bucket holds, without running anything that it names and without torch.

SGLang dies of a bucket that it cannot take (0.5.23: a wrong shape, a class that its unpickler blocks, a file
descriptor of another process). So a bucket is read here first. Nothing of it is executed: every class that it
names becomes an inert record.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import pickle
from collections.abc import Iterator
from typing import Any, Final

from turnstile_server.engines.weights import TensorBucket
from turnstile_server.errors import EngineRefused

FLATTENED: Final = "flattened_bucket"
SAFETENSORS: Final = "safetensors"

ITEM_BYTES: Final = {
    **dict.fromkeys(("float64", "double", "int64", "long", "complex64", "cfloat"), 8),
    **dict.fromkeys(("float32", "float", "int32", "int"), 4),
    **dict.fromkeys(("float16", "half", "bfloat16", "int16", "short", "uint16"), 2),
    **dict.fromkeys(
        ("uint8", "int8", "bool", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1
    ),
}
"""Bytes of one number, by torch dtype."""

_MODULES: Final = frozenset(
    {
        "builtins",
        "collections",
        "types",
        "copyreg",
        "functools",
        "_codecs",
        "torch",
        "torch.cuda",
        "torch.storage",
        "torch.serialization",
        "torch._utils",
        "torch._tensor",
        "torch.nn.parameter",
        "torch.multiprocessing.reductions",
        "multiprocessing.reduction",
        "multiprocessing.resource_sharer",
        "sglang.srt.utils.patch_torch",
        "sglang.srt.weight_sync.tensor_bucket",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.model_executor.model_runner_components.weight_updater",
    }
)
"""Modules of what SGLang's own unpickler takes (0.5.23, utils/common.py: SafeUnpickler)."""

_UNREADABLE: Final = (
    *(binascii.Error, pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError),
    *(AttributeError, RecursionError, OverflowError, MemoryError),
)
"""The errors of reading bytes that are no pickle, or a pickle of something else."""

_BY_DESCRIPTOR: Final = frozenset({"rebuild_storage_fd", "DupFd"})
_TENSOR_SHAPE_AT: Final = {
    "_rebuild_tensor": 2,
    "_rebuild_tensor_v2": 2,
    "rebuild_cuda_tensor": 1,
    "_rebuild_cuda_tensor_modified": 1,
}
"""The index of the shape among the arguments of a function that makes a tensor."""


def tensors_of(bucket: TensorBucket) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, from the copy of the first rank (one rank's tensors are whole ones).

    Raises EngineRefused for what SGLang could not take.
    """
    if not bucket.serialized:
        raise EngineRefused("The bucket is empty: `serialized` has no entry; it needs one for each rank.")
    if bucket.load_format not in (None, "direct", FLATTENED):
        raise EngineRefused(f"load_format is {bucket.load_format!r}; take {FLATTENED!r}, 'direct' or none.")
    try:
        data = base64.b64decode(bucket.serialized[0], validate=True)
        value = _Reader(io.BytesIO(data)).load()
        return list(_flattened(value) if bucket.load_format == FLATTENED else _listed(value))
    except _UNREADABLE as error:
        raise EngineRefused(
            f"The bucket cannot be read ({type(error).__name__}: {error}). It is base64 of a pickle, as "
            "turnstile.weights.flattened_buckets makes it. The engine was not asked."
        ) from error


def tensors_in_file(bucket: TensorBucket) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a bucket that is a safetensors file, as the embedded engine takes it.

    Raises EngineRefused for anything else.
    """
    if len(bucket.serialized) != 1 or bucket.load_format != SAFETENSORS:
        raise EngineRefused(
            "The embedded engine takes tensors as one base64 text of a safetensors file (load_format "
            f"{SAFETENSORS!r}), as turnstile.weights.safetensors_buckets makes it; this bucket has "
            f"{len(bucket.serialized)} texts and load_format {bucket.load_format!r}."
        )
    try:
        data = base64.b64decode(bucket.serialized[0], validate=True)
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return [(name, _sides(entry["shape"])) for name, entry in head.items() if name != "__metadata__"]
    except _UNREADABLE as error:
        raise EngineRefused(
            f"The bucket is no base64 of a safetensors file ({type(error).__name__}: {error}). The engine was not "
            "asked."
        ) from error


class _Record:
    """An inert record in place of what a class or function in the pickle would have made."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.fields: dict[str, Any] = {}

    def __call__(self, *arguments: Any) -> _Record:
        if self.name == "Size":
            return _Shape(arguments)
        return _Record(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.fields = dict(state) if isinstance(state, dict) else {"state": state}

    def __setitem__(self, key: Any, value: Any) -> None:
        """An OrderedDict is filled by items."""


class _Shape(_Record):
    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__("Size", arguments)


class _Fields:
    """A namespace or a data class: its fields by name."""

    fields: dict[str, Any]

    def __new__(cls, *_: Any) -> _Fields:
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fields = dict(state)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module not in _MODULES:
            raise EngineRefused(f"The bucket names {module}.{name}, which SGLang does not load. It was not asked.")
        if name in _BY_DESCRIPTOR:
            raise EngineRefused(
                "The bucket passes tensors by file descriptors of the trainer's process, which another process "
                "cannot open; SGLang would die of it. Serialize by value (turnstile.weights.flattened_buckets), "
                "or set torch.multiprocessing.set_sharing_strategy('file_system'). The engine was not asked."
            )
        if name in ("SimpleNamespace", "FlattenedTensorMetadata"):
            return _Fields
        return _Record(name)


def _flattened(value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    size = math.prod(_shape(value["flattened_tensor"]))
    for meta in value["metadata"]:
        fields = meta.fields
        name, shape = str(fields["name"]), _sides(fields["shape"])
        start, end, dtype = int(fields["start_idx"]), int(fields["end_idx"]), _dtype(fields["dtype"])
        item = ITEM_BYTES.get(dtype)
        if item is None:
            raise EngineRefused(f"The bucket's tensor {name!r} has the dtype {dtype!r}, which is not known.")
        if not 0 <= start <= end <= size or end - start != math.prod(shape) * item:
            raise EngineRefused(
                f"The bucket's tensor {name!r} of shape {list(shape)} ({dtype}) is said to lie at bytes {start} "
                f"to {end} of {size}: that does not fit. The engine was not asked."
            )
        yield name, shape


def _listed(value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in value:
        yield str(name), _shape(tensor)


def _shape(tensor: Any) -> tuple[int, ...]:
    """The shape in a record of a tensor. Raises ValueError for anything else."""
    at = _TENSOR_SHAPE_AT.get(tensor.name)
    if at is not None:
        return _sides(tensor.arguments[at])
    if tensor.name == "rebuild_tensor":  # (class, storage, (offset, shape, stride, …))
        return _sides(tensor.arguments[2][1])
    if tensor.name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        return _shape(tensor.arguments[0])
    raise ValueError(f"{tensor.name} is no tensor")


def _sides(shape: Any) -> tuple[int, ...]:
    sides = shape.arguments[0] if isinstance(shape, _Record) else shape
    return tuple(int(side) for side in sides)


def _dtype(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, _Record) else str(dtype)
