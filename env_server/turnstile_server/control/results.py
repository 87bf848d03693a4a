"""Turns, samples and token trees as the bytes of an answer, in parts.

What must hold: writing the answer about an episode of any size delays no other call. A single step that
writes millions of numbers, or that joins or copies hundreds of megabytes, keeps the interpreter lock, in
whatever thread it is done. So no step here has more than ``SLICE_NUMBERS`` numbers or ``PART_BYTES`` bytes of
an array, and the parts are sent as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from turnstile.models import SampleSet, TokenForest, Turn, TurnOutlines
from turnstile.models.samples_encoding import PART_BYTES
from turnstile_server.control.body import json_bytes

SLICE_NUMBERS = 1 << 14
"""Numbers that are written as JSON in one step: about a millisecond."""

_NODE_ARRAYS = ("parents", "offsets", "completion_starts", "trained_in")

Written = Callable[[NDArray[Any]], list[Any]]
"""The JSON values of a slice of an array."""


async def parts_response(
    parts: Iterator[bytes],
    media_type: str,
    background: BackgroundTask | None,
    workers: anyio.CapacityLimiter,
) -> StreamingResponse:
    """An answer of these parts, which are made in a thread before it begins: one that fails has its own status."""
    made = await anyio.to_thread.run_sync(lambda: list(_merged(parts)), limiter=workers)

    async def sent() -> AsyncIterator[bytes]:
        for part in made:
            yield part

    length = {"content-length": str(sum(map(len, made)))}
    return StreamingResponse(sent(), headers=length, media_type=media_type, background=background)


def _merged(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in fewer parts, of ``PART_BYTES`` and what one of the given has."""
    held: list[bytes] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= PART_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def turns_json(turns: Iterable[Turn]) -> Iterator[bytes]:
    yield b'{"turns":'
    arrays = dict.fromkeys(("context_ids", "completion_ids", "logprobs", "routed_experts"), _numbers)
    yield from _list(_object(turn, arrays) for turn in turns)
    yield b"}"


def outlines_json(outlines: TurnOutlines) -> Iterator[bytes]:
    yield from _object(outlines, {}, {"turns": _list(_object(turn, {}) for turn in outlines.turns)})


def samples_json(samples: SampleSet) -> Iterator[bytes]:
    """``weight_version`` has version strings, None where the token was not sampled."""
    rows = (_object(sample, _of_tokens(sample.weight_version_names)) for sample in samples.samples)
    yield from _object(samples, {}, {"samples": _list(rows)})


def forest_json(forest: TokenForest) -> Iterator[bytes]:
    """``weight_version`` as in ``samples_json``."""
    places = dict.fromkeys((*_NODE_ARRAYS, "routed_offsets"), _numbers)
    yield from _object(forest, places | _of_tokens(forest.weight_version_names))


def _of_tokens(version_names: Sequence[str]) -> dict[str, Written]:
    names = (*version_names, None)  # the last entry answers the index −1

    def versions(part: NDArray[Any]) -> list[Any]:
        return [names[index] for index in part.tolist()]

    return {
        **dict.fromkeys(("input_ids", "loss_mask", "logprobs", "routed_experts"), _numbers),
        "weight_version": versions,
    }


def _numbers(part: NDArray[Any]) -> list[Any]:
    found: list[Any] = part.tolist()
    return found


def _object(
    model: BaseModel, arrays: Mapping[str, Written], own: Mapping[str, Iterator[bytes]] | None = None
) -> Iterator[bytes]:
    """The model as JSON, its fields in their order. ``own``: fields that are written already."""
    own = own or {}
    rest = model.model_dump(mode="json", exclude={*arrays, *own})
    before = b"{"
    for name, field in type(model).model_fields.items():
        key = field.serialization_alias or field.alias or name
        yield before + json_bytes(key) + b":"
        if name in arrays:
            yield from _array(getattr(model, name), arrays[name])
        elif name in own:
            yield from own[name]
        else:
            yield json_bytes(rest[key])
        before = b","
    yield b"}"


def _array(array: NDArray[Any] | None, written: Written) -> Iterator[bytes]:
    if array is None:
        yield b"null"
        return
    step = max(SLICE_NUMBERS // max(array[:1].size, 1), 1)
    yield b"["
    for start in range(0, len(array), step):
        numbers = json_bytes(written(np.asarray(array[start : start + step])))
        yield (b"," if start else b"") + numbers[1:-1]
    yield b"]"


def _list(values: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    before = b"["
    for value in values:
        yield before
        yield from value
        before = b","
    yield b"]" if before == b"," else b"[]"
