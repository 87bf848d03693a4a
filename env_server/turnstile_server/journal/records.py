"""Converts the shared models to journal records and back. Pure and bit-exact.

A turn's arrays are arrays of the record (routed experts flat, their shape beside them); everything else is the
model's JSON. Neither direction derives, rounds or drops anything. (A NaN or infinity in ``asked_sampling`` has no
JSON form and becomes null.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from turnstile.models import Delivery, Discard, Turn
from turnstile_server.journal.protocol import Record, RecordType

_TURN_ARRAYS = ("context_ids", "completion_ids", "logprobs")
_EXPERTS, _EXPERTS_SHAPE = "routed_experts", "routed_experts_shape"
_TURN_META_EXCLUDES = {*_TURN_ARRAYS, _EXPERTS}
_ANSWER = TypeAdapter(str)


def turn_record(turn: Turn) -> Record:
    meta = turn.model_dump(mode="json", by_alias=True, exclude=_TURN_META_EXCLUDES)
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "context_ids": turn.context_ids,
        "completion_ids": turn.completion_ids,
        "logprobs": turn.logprobs,
    }
    if turn.routed_experts is not None:
        arrays[_EXPERTS] = turn.routed_experts.reshape(-1)
        meta[_EXPERTS_SHAPE] = list(turn.routed_experts.shape)
    return Record(RecordType.TURN, turn.episode_id, meta, arrays)


def turn_of(record: Record) -> Turn:
    """Raises pydantic.ValidationError when the record is not a turn of this schema."""
    arrays: dict[str, npt.NDArray[np.generic]] = {name: record.arrays[name] for name in _TURN_ARRAYS}
    meta = dict(record.meta)
    shape = meta.pop(_EXPERTS_SHAPE, None)
    if shape is not None:
        arrays[_EXPERTS] = record.arrays[_EXPERTS].reshape(shape)
    return Turn.model_validate({**meta, **arrays})


def episode_record(episode_id: str, meta: Mapping[str, Any]) -> Record:
    """``meta``: the whole state as JSON; of it the journal reads only ``status`` and ``timings``."""
    return Record(RecordType.EPISODE, episode_id, meta)


def exported_record(episode_id: str) -> Record:
    """A trainer has fetched the ended episode."""
    return Record(RecordType.EXPORTED, episode_id, {})


def delivery_record(episode_id: str, delivery: Delivery) -> Record:
    return Record(RecordType.DELIVERY, episode_id, delivery.model_dump(mode="json"))


def delivery_of(record: Record) -> Delivery:
    return Delivery.model_validate(record.meta)


def span_record(episode_id: str, meta: Mapping[str, Any]) -> Record:
    """``meta``: a span as JSON, or ``{"dropped": n}``."""
    return Record(RecordType.SPAN, episode_id, meta)


def answer_record(episode_id: str, answer: str) -> Record:
    return Record(RecordType.ANSWER, episode_id, {"answer": answer})


def answer_of(records: Iterable[Record]) -> str | None:
    """The answer that was submitted last; None: no record has one. Raises pydantic.ValidationError."""
    found = None
    for record in records:
        if record.type is RecordType.ANSWER:
            found = _ANSWER.validate_python(record.meta.get("answer"))
    return found


def discard_record(episode_id: str, discard: Discard) -> Record:
    return Record(RecordType.DISCARD, episode_id, discard.model_dump(mode="json"))


def discard_of(record: Record) -> Discard:
    return Discard.model_validate(record.meta)
