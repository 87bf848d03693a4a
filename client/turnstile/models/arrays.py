"""NumPy arrays as Pydantic fields: one dtype each, one dimension, read-only, JSON as plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

TokenSequence = Sequence[int] | npt.NDArray[np.integer[Any]]
NumberSequence = Sequence[float] | npt.NDArray[np.floating[Any]]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


def frozen_array(value: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return ``value`` as a read-only 1-D array of ``dtype``.

    A writable array is copied, so that a recorded turn cannot be changed through an alias. Raises ValueError if
    the value is not one-dimensional, is not numbers, or has a number that does not fit.
    """
    source = np.asarray(value)
    if source.size == 0:
        source = source.astype(dtype).reshape(-1)
    if source.ndim != 1:
        raise ValueError(f"expected one dimension, got shape {source.shape}")
    if source.dtype == np.dtype(dtype):  # every number fits
        if not source.flags.writeable:
            return source
        copied = source.copy()
        copied.flags.writeable = False
        return copied
    if np.dtype(dtype).kind in "iu":
        if source.dtype.kind not in "iu":
            raise ValueError(f"expected whole numbers that fit {np.dtype(dtype)}, got {_kind(source)}")
        bounds = np.iinfo(np.dtype(dtype).name)
        if source.size and (int(source.min()) < bounds.min or int(source.max()) > bounds.max):
            raise ValueError(f"a number does not fit {np.dtype(dtype).name}")
    elif source.dtype.kind not in "iuf":  # numpy would read text and None as numbers too
        raise ValueError(f"expected numbers, got {_kind(source)}")
    with np.errstate(over="ignore"):  # too large becomes infinite; fields of finite numbers refuse that
        array = source.astype(dtype, copy=True)
    array.flags.writeable = False
    return array


def _kind(source: npt.NDArray[Any]) -> str:
    """The type that NumPy gave a list, for an error message."""
    return "a value that is no number or is too large" if source.dtype.kind == "O" else str(source.dtype)


def _field(dtype: npt.DTypeLike, json_type: str) -> tuple[Any, Any, Any]:
    return (
        BeforeValidator(lambda value: frozen_array(value, dtype)),
        PlainSerializer(lambda array: array.tolist(), return_type=list, when_used="json"),
        WithJsonSchema({"type": "array", "items": {"type": json_type}}),
    )


TokenIds = Annotated[Int32Array, *_field(np.int32, "integer")]
"""int32[n]: token ids of the model's vocabulary."""

Floats = Annotated[Float32Array, *_field(np.float32, "number")]
"""float32[n]."""

Mask = Annotated[UInt8Array, *_field(np.uint8, "integer")]
"""uint8[n]: 1 where trainable."""

Indices = Annotated[Int32Array, *_field(np.int32, "integer")]
"""int32[n]: indices, −1 for none."""
