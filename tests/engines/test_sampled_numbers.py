"""Numbers that no model gives, from any engine, become no turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnstile.models import WeightSpan
from turnstile_server.engines.call_checks import check_chunk
from turnstile_server.engines.protocol import EngineChunk, EngineFinish
from turnstile_server.errors import EngineProtocolError

GOOD: dict[str, Any] = {"ids": [0, 9], "logprobs": [0.0, -1.0], "reason": "stop", "end": 2}


def check(**changes: Any) -> None:
    given = {**GOOD, **changes}
    finish = EngineFinish(given["reason"], None, (WeightSpan(start=0, end=given["end"], version="1"),))
    ids, logprobs = np.array(given["ids"], np.int32), np.array(given["logprobs"], np.float32)
    check_chunk(EngineChunk(ids, logprobs, finish), 10, len(ids))


def test_what_a_model_gives_passes() -> None:
    check()
    check(end=1)
    check(ids=[], logprobs=[], end=0)
    check(ids=[9], logprobs=[1e-7], end=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ids": [0, 10]}, "id 10, outside the vocabulary of 10"),
        ({"ids": [-5, 9]}, "id -5, outside"),
        ({"logprobs": [0.5, -1.0]}, "a logprob that is above 0"),
        ({"logprobs": [0.0, float("nan")]}, "not finite"),
        ({"logprobs": [0.0, -float("inf")]}, "not finite"),
        ({"logprobs": [float("inf"), 0.0]}, "not finite"),
        ({"logprobs": [0.0]}, "1 logprobs for 2 tokens"),
        ({"reason": "because"}, "finished a call by 'because'"),
        ({"end": 5}, "weights of 5 tokens and gave 2"),
    ],
)
def test_what_no_model_gives_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineProtocolError, match=said):
        check(**changes)
