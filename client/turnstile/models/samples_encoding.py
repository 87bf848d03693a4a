"""Samples on the wire: one safetensors file with concatenated arrays, and JSON metadata for the rest.

Tensors: ``input_ids`` int32[N], ``loss_mask`` uint8[N], ``logprobs`` float32[N], ``weight_version`` int32[N] and
``offsets`` int64[n + 1]: sample i owns ``[offsets[i], offsets[i + 1])`` of each. Where the experts of a mixture
were recorded, there are also ``routed_experts`` (uint8 or uint16 [R, layers, top_k]) and ``routed_offsets``
int64[n + 1]; a sample without rows has none. The file's metadata entry ``turnstile`` is the JSON of the sample set
without its arrays. A token forest has a file of the same kind, with the arrays of ``TokenForest``. The layout of
the file is that of https://github.com/huggingface/safetensors (8 bytes little-endian header length, JSON header,
data).

Decoding returns exactly the bits that were encoded. A file that is damaged or inconsistent is refused, never
repaired.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
from pydantic import ValidationError

from turnstile.models.base import SCHEMA_VERSION
from turnstile.models.forest import TokenForest
from turnstile.models.sample import Sample, SampleSet

MEDIA_TYPE = "application/x-safetensors"
METADATA_KEY = "turnstile"
PART_BYTES = 1 << 20

_NAMES = {"<i8": "I64", "<i4": "I32", "<f4": "F32", "<u2": "U16", "|u1": "U8"}
"""The names of array types (``numpy.dtype.str``) in the file."""

_OFFSETS = "offsets"
_ARRAYS: dict[str, npt.DTypeLike] = {
    "input_ids": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
    "weight_version": np.int32,
}
_EXPERTS, _EXPERT_OFFSETS = "routed_experts", "routed_offsets"
_DTYPES: dict[str, npt.DTypeLike] = {**_ARRAYS, _OFFSETS: np.int64}
_FOREST_ARRAYS: dict[str, npt.DTypeLike] = {
    **_ARRAYS,
    "parents": np.int32,
    _OFFSETS: np.int32,
    "completion_starts": np.int32,
    "trained_in": np.int32,
}


class WireError(ValueError):
    """Bytes that are not a sample set of this version."""


def encode_samples(samples: SampleSet) -> bytes:
    """The sample set as one safetensors file."""
    return b"".join(sample_parts(samples))


def sample_parts(samples: SampleSet) -> Iterator[bytes]:
    """The parts of that file, in order, none of more than ``PART_BYTES`` but the header.

    So a server can make and send hundreds of megabytes without a step that keeps the interpreter lock for long.
    """
    tensors: dict[str, npt.NDArray[Any]] = {
        name: _concatenate([getattr(sample, name) for sample in samples.samples], dtype)
        for name, dtype in _ARRAYS.items()
    }
    lengths = [len(sample.input_ids) for sample in samples.samples]
    tensors[_OFFSETS] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    rows = [sample.routed_experts for sample in samples.samples]
    if (known := [part for part in rows if part is not None]) and len({part.shape[1:] for part in known}) == 1:
        tensors[_EXPERTS] = np.concatenate(known)
        counts = [0 if part is None else len(part) for part in rows]
        tensors[_EXPERT_OFFSETS] = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    rest = samples.model_dump(mode="json", exclude={"samples": {"__all__": {*_ARRAYS, _EXPERTS}}})
    return _file_parts(tensors, rest)


def decode_samples(data: bytes) -> SampleSet:
    """The sample set in ``data``; its arrays are read-only views of one buffer each.

    Raises WireError when the file is damaged, misses an array, has one of another type or length, or was
    written with a newer schema.
    """
    rest = _metadata(data)
    tensors = _tensors(data, _DTYPES)
    offsets = tensors.pop(_OFFSETS)
    rows = rest.get("samples")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WireError("the metadata has no list of samples")
    if len(offsets) != len(rows) + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise WireError(f"{len(offsets)} offsets do not bound {len(rows)} samples")
    for name, array in tensors.items():
        if len(array) != offsets[-1]:
            raise WireError(f"{name} has {len(array)} entries, the offsets end at {offsets[-1]}")
    bounds = offsets.tolist()
    for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
        row.update({name: array[start:end] for name, array in tensors.items()})
    for row, experts in zip(rows, _expert_rows(data, len(rows)), strict=True):
        row[_EXPERTS] = experts
    try:
        return SampleSet.model_validate(rest)
    except ValidationError as error:
        raise WireError(f"the metadata is not that of a sample set: {error}") from error


def encode_forest(forest: TokenForest) -> bytes:
    """The forest as one safetensors file: its arrays as tensors, everything else as JSON in the metadata."""
    return b"".join(forest_parts(forest))


def forest_parts(forest: TokenForest) -> Iterator[bytes]:
    """The parts of that file, as ``sample_parts`` has them."""
    tensors = {name: np.ascontiguousarray(getattr(forest, name)) for name in _FOREST_ARRAYS}
    if forest.routed_experts is not None and forest.routed_offsets is not None:
        tensors |= {_EXPERTS: forest.routed_experts, _EXPERT_OFFSETS: forest.routed_offsets.astype(np.int64)}
    rest = forest.model_dump(mode="json", exclude={*_FOREST_ARRAYS, _EXPERTS, _EXPERT_OFFSETS})
    return _file_parts(tensors, rest)


def _file_parts(tensors: dict[str, npt.NDArray[Any]], rest: dict[str, Any]) -> Iterator[bytes]:
    """The library's own file, which it writes in a single step. The widest numbers come first: all are aligned."""
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(rest)}}
    arrays = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[1].dtype.str, item[0]))
    end = 0
    for name, array in arrays:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype.str], "shape": list(array.shape), "data_offsets": [begin, end]}
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    yield len(written).to_bytes(8, "little")
    yield written
    for _, array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(data), PART_BYTES):
            yield data[start : start + PART_BYTES].tobytes()


def decode_forest(data: bytes) -> TokenForest:
    """The forest in ``data``. Raises WireError as ``decode_samples`` does."""
    rest = _metadata(data)
    tensors = _tensors(data, _FOREST_ARRAYS)
    if (found := _experts(data)) is not None:
        tensors |= {_EXPERTS: found[0], _EXPERT_OFFSETS: found[1]}
    try:
        return TokenForest.model_validate({**rest, **tensors})
    except ValidationError as error:
        raise WireError(f"the file is not that of a token forest: {error}") from error


def _experts(data: bytes) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """The rows of experts in a file and their offsets, read-only; None where it has none."""
    found = safetensors.numpy.load(data)
    if _EXPERTS not in found:
        return None
    rows = found[_EXPERTS]
    offsets = found.get(_EXPERT_OFFSETS)
    if offsets is None or offsets.dtype != np.int64 or offsets.ndim != 1:
        raise WireError(f"{_EXPERTS} has no {_EXPERT_OFFSETS} of int64")
    if rows.dtype not in (np.uint8, np.uint16) or rows.ndim != 3:
        raise WireError(f"{_EXPERTS} is {rows.dtype}{list(rows.shape)}, not uint8 or uint16 of three dimensions")
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
        raise WireError(f"{_EXPERT_OFFSETS} do not bound {len(rows)} rows of experts")
    rows.flags.writeable = False
    return rows, offsets


def _expert_rows(data: bytes, count: int) -> list[npt.NDArray[Any] | None]:
    """The expert rows of each of ``count`` samples; None where a sample has none."""
    found = _experts(data)
    if found is None:
        return [None] * count
    rows, offsets = found
    if len(offsets) != count + 1:
        raise WireError(f"{len(offsets)} {_EXPERT_OFFSETS} do not bound {count} samples")
    bounds = offsets.tolist()
    return [rows[start:end] if end > start else None for start, end in pairwise(bounds)]


def sample_as_json(sample: Sample) -> dict[str, Any]:
    """One sample for JSON readers: arrays as lists, ``weight_version`` as version strings, None where the token
    was not sampled."""
    out = sample.model_dump(mode="json")
    names = (*sample.weight_version_names, None)  # the last entry answers the index −1
    out["weight_version"] = [names[index] for index in sample.weight_version.tolist()]
    return out


def _concatenate(arrays: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _metadata(data: bytes) -> dict[str, Any]:
    """The JSON under ``METADATA_KEY``; the library's in-memory reader drops a file's metadata."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise WireError("the file ends inside its header")
    try:
        rest = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][METADATA_KEY])
    except (KeyError, TypeError, RecursionError, ValueError) as error:  # no JSON, or more than Python reads
        raise WireError(f"not a file of Turnstile samples: {type(error).__name__}") from error
    if not isinstance(rest, dict):
        raise WireError("not a file of Turnstile samples: the metadata is no object")
    version = rest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise WireError(f"schema version {version!r}; this client reads {SCHEMA_VERSION}")
    return rest


def _tensors(data: bytes, dtypes: dict[str, npt.DTypeLike]) -> dict[str, npt.NDArray[Any]]:
    try:
        found = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise WireError(f"damaged safetensors file: {error}") from error
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in dtypes.items():
        if name not in found:
            raise WireError(f"the array {name} is missing")
        array = found[name]
        if array.dtype != np.dtype(dtype) or array.ndim != 1:
            raise WireError(f"{name} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)} of one dimension")
        array.flags.writeable = False  # so that the rows are views, not copies
        tensors[name] = array
    return tensors
