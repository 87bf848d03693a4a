"""The common code for replies of engines over HTTP: JSON, errors, event streams, and single values. Pure.

What must hold: a value that cannot be recorded as it is, is an EngineProtocolError; none is filled in or changed.
"""

from __future__ import annotations

import math
import os
from typing import Any, Final, NoReturn

import numpy as np
import orjson

from turnstile.models import Float32Array
from turnstile_server.engines.protocol import ABOVE_ZERO
from turnstile_server.errors import EngineProtocolError, EngineRefused, EngineUnavailable, TurnstileError

MESSAGE_CHARS: Final = 2000
"""Most characters of the engine's text that an error message repeats."""

INT32_MAX: Final = int(np.iinfo(np.int32).max)

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


def version_name(version: Any) -> str:
    if isinstance(version, bool) or not isinstance(version, str | int):
        refuse(f"a weight version is {str(version)[:MESSAGE_CHARS]!r}, not a name")
    return str(version)


def entry_id(entry: Any) -> int:
    if (
        not isinstance(entry, list)
        or len(entry) < 2
        or not isinstance(entry[1], int)
        or isinstance(entry[1], bool)
    ):
        refuse(f"a logprob entry is {entry!r}")
    if not 0 <= entry[1] <= INT32_MAX:
        refuse(f"a sampled id is {entry[1]}")
    token: int = entry[1]
    return token


def entry_logprob(entry: list[Any]) -> float:
    value = entry[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(f"a logprob is {value!r}")
    if value > ABOVE_ZERO:
        refuse(f"a logprob is {value!r}, a probability above 1")
    return float(value)


def read_entries(entries: list[Any]) -> tuple[list[int], list[float]]:
    """The ids and the logprobs of logprob entries. Raises EngineProtocolError for one that is not finite in
    float32, and as ``entry_id`` and ``entry_logprob`` do."""
    ids, logprobs = [], []
    for entry in entries:
        if type(entry) is list and len(entry) >= 2:
            value, token = entry[0], entry[1]
            # What every entry is. Comparisons with NaN are False.
            if (
                type(value) is float
                and type(token) is int
                and 0 <= token <= INT32_MAX
                and -FLOAT32_MAX <= value <= ABOVE_ZERO
            ):
                ids.append(token)
                logprobs.append(value)
                continue
        ids.append(entry_id(entry))
        logprobs.append(entry_logprob(entry))
        if logprobs[-1] < -FLOAT32_MAX:
            refuse("a logprob does not fit float32")
    return ids, logprobs


def finite(values: list[float]) -> Float32Array:
    if not all(-FLOAT32_MAX <= value <= FLOAT32_MAX for value in values):  # NaN compares as False
        refuse("a logprob does not fit float32")
    return np.array(values, np.float32)


def same_folder(left: str, right: str) -> bool:
    """Compares by name only: the engine's folders may be on another machine."""
    return os.path.normpath(left) == os.path.normpath(right)


def refuse(what: str) -> NoReturn:
    raise EngineProtocolError(f"The engine's answer cannot be recorded: {what}.")


def error_for_status(status: int, body: bytes) -> TurnstileError:
    """The typed error for an answer that is not 200."""
    message = _error_message(body)
    if status in (400, 413, 422):
        return EngineRefused(f"The engine refused the request: {message}", detail={"engine_status": status})
    if status in (401, 403):
        return EngineUnavailable(f"The engine did not accept our credentials ({status}): {message}")
    if status == 429 or status >= 500:
        return EngineUnavailable(f"The engine answered {status}: {message}", detail={"engine_status": status})
    return EngineProtocolError(
        f"The engine answered {status}, which its interface does not define: {message}",
        detail={"engine_status": status},
    )


def _error_message(body: bytes) -> str:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MESSAGE_CHARS].decode("utf-8", "replace").strip() or "(empty body)"
    if isinstance(value, dict):
        inner = value.get("error", value)
        if isinstance(inner, dict):
            inner = next(
                (inner[name] for name in ("message", "detail", "error_message") if inner.get(name)), inner
            )
        return str(inner)[:MESSAGE_CHARS]
    return str(value)[:MESSAGE_CHARS]


def parse_json(body: bytes, what: str) -> Any:
    """Raises EngineProtocolError when ``body`` is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        start = body[:120].decode("utf-8", "replace")
        raise EngineProtocolError(f"{what} is not JSON ({error}); it begins with {start!r}.") from error


class SseSplitter:
    """Splits the bytes of an SSE stream into the payloads of its ``data:`` lines.

    Engines send one JSON object per ``data:`` line and end with ``data: [DONE]``. Other SSE fields and
    comments are ignored. ``limit``: most bytes of one unfinished line.
    """

    def __init__(self, limit: int) -> None:
        self._rest: list[bytes] = []
        """The pieces of the unfinished line."""
        self._rest_bytes = 0
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by ``data``. Raises EngineProtocolError for a line above the limit."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._rest:
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest, self._rest_bytes = [], 0
        payloads = []
        for line in lines:
            if line.startswith(b"data:"):
                payloads.append(line[5:].strip())
            elif line and not line.startswith(_OTHER_LINES) and line.strip(b"\r"):
                text = line[:120].decode("utf-8", "replace")
                raise EngineProtocolError(f"The engine's stream is not an event stream; it has {text!r}.")
        if rest:
            self._rest.append(rest)
            self._rest_bytes += len(rest)
            if self._rest_bytes > self._limit:
                raise EngineProtocolError(f"One chunk of the engine's stream is larger than {self._limit} bytes.")
        return payloads


_OTHER_LINES: Final = (b":", b"event:", b"id:", b"retry:")
