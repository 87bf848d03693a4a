"""Tries a failed model call again as the `openai` package does (version 3.52, `_base_client.py`).

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import math
import os

from .chat import OVER_A_LIMIT
from .ending import API_FAILED, LIMIT, REFUSED

FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_ASKED_S = 0.5, 8.0, 120.0
RETRIED = (408, 409, 429)


class SdkRetries:
    """``Failures`` of an SDK: it obeys ``x-should-retry``, ``retry-after-ms`` and ``retry-after``; else it tries
    again after no answer, 408, 409, 429 and 5xx, with a pause that doubles, less up to a quarter by chance."""

    def __init__(self, retries: int) -> None:
        self._retries = retries

    def pause_s(self, attempt: int, status: int, headers: dict[str, str]) -> float | None:
        asked = asked_pause_s(headers)
        if attempt >= self._retries or not _is_retried(status, headers, asked):
            return None
        if asked is not None and 0 < asked <= LONGEST_ASKED_S:
            return asked
        return min(FIRST_PAUSE_S * 2.0**attempt, LONGEST_PAUSE_S) * (1 - 0.25 * os.urandom(1)[0] / 256)

    def ending(self, status: int, code: str) -> int:
        if status in (0, 200, 429) or status >= 500:
            return API_FAILED
        return LIMIT if code in OVER_A_LIMIT else REFUSED


def _is_retried(status: int, headers: dict[str, str], asked: float | None) -> bool:
    if asked is not None and math.isfinite(asked) and asked > LONGEST_ASKED_S:
        return False
    told = headers.get("x-should-retry")
    if status and told in ("true", "false"):
        return told == "true"
    return status == 0 or status in RETRIED or status >= 500


def asked_pause_s(headers: dict[str, str]) -> float | None:
    """For how long the server asks to wait; None where it does not. A date in ``retry-after`` is not read: no
    server of ours sends one."""
    for name, divisor in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return float(headers[name]) / divisor
        except (KeyError, ValueError):
            continue
    return None
