"""Routing of a mixture of experts: which experts each token of a path went through, layer by layer.

A row belongs to a token that the model was fed. The last sampled token of a call is not fed in it, so a call's
rows end one token before the call's end. The call that continues it feeds that token, and has its row as its
first. A path of T tokens thus has T - 1 rows, and the row of its last token was never computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

ExpertArray = npt.NDArray[np.unsignedinteger[Any]]

_MOST = int(np.iinfo(np.uint16).max)


def expert_array(value: Any) -> ExpertArray:
    """``value`` as a read-only array [rows, layers, top_k]: uint8 where every expert is below 256, else uint16.

    Raises ValueError for other dimensions, for what is no whole number and for a number that no expert has.
    """
    source = np.asarray(value)
    if source.ndim != 3:
        raise ValueError(f"expected [rows, layers, top_k], got shape {source.shape}")
    if source.size and source.dtype.kind not in "iu":
        raise ValueError(f"expected numbers of experts, got {source.dtype}")
    most = int(source.max()) if source.size else 0
    if most > _MOST or (source.size and int(source.min()) < 0):
        raise ValueError(f"a number of an expert is not from 0 to {_MOST}")
    dtype = np.uint8 if most < 256 else np.uint16
    if source.dtype == dtype and not source.flags.writeable:
        return source
    array: ExpertArray = source.astype(dtype, copy=True)
    array.flags.writeable = False
    return array


def _optional(value: Any) -> ExpertArray | None:
    return None if value is None else expert_array(value)


Experts = Annotated[
    ExpertArray | None,
    BeforeValidator(_optional),
    PlainSerializer(lambda array: None if array is None else array.tolist(), when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "array"}, {"type": "null"}]}),
]
"""uint8 or uint16 [rows, layers, top_k], or None."""


def join_experts(parts: Iterable[tuple[int, ExpertArray | None]]) -> ExpertArray | None:
    """The rows of a path, [T - 1, layers, top_k]. ``parts``: for each turn from the root on, the tokens of the
    path up to the turn's end, and the turn's rows, which end one token before.

    None where the routing of a token is not known, or where turns differ in layers or experts per token.
    """
    pieces: list[ExpertArray] = []
    covered = total = 0
    for end, rows in parts:
        total = end
        if rows is None:
            continue
        start = end - 1 - len(rows)
        if start > covered or (pieces and rows.shape[1:] != pieces[0].shape[1:]):
            return None
        pieces.append(rows[covered - start :])
        covered = end - 1
    if not pieces or covered != total - 1:
        return None
    joined = np.concatenate(pieces)
    joined.flags.writeable = False
    return joined
