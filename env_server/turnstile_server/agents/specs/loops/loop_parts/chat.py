"""The model API of these agents: Chat Completions, whole or streamed, and what is done when a call fails.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable

from .ending import API_FAILED, LIMIT, REFUSED, Ended
from .http_connection import BrokenHttp, Connection, Response

TYPE_CHECKING = False  # `typing` costs 2 ms to import
if TYPE_CHECKING:
    from typing import Any, Protocol

    Message = dict[str, Any]
else:
    Protocol, Message = object, dict

OVER_A_LIMIT = ("context_length_exceeded", "budget_exhausted")


class NoCompletion(Exception):
    """An answer with status 200 that is no reply, or a stream that broke off. A sentence."""


class Failures(Protocol):
    """The policy for a call that failed. ``status`` 0: there was no answer."""

    def pause_s(self, attempt: int, status: int, headers: dict[str, str]) -> float | None:
        """Seconds until it is tried again, after the try number ``attempt`` (from 0); None: it is not."""
        ...

    def ending(self, status: int, code: str) -> int:
        """The exit code after a call that is not tried again."""
        ...


class PlainRetries:
    """A pause that doubles, whatever the server says of it."""

    _STATUSES = (0, 200, 408, 409, 429, 500, 502, 503, 504)
    _PAUSE_S = 0.5

    def __init__(self, retries: int) -> None:
        self._retries = retries

    def pause_s(self, attempt: int, status: int, headers: dict[str, str]) -> float | None:
        if status not in self._STATUSES or attempt >= self._retries:
            return None
        return float(self._PAUSE_S * 2**attempt)

    def ending(self, status: int, code: str) -> int:
        return LIMIT if code in OVER_A_LIMIT else API_FAILED if status in self._STATUSES else REFUSED


class Model:
    """``remember``: makes of a reply the message for the history. ``headers``: of each call."""

    def __init__(
        self,
        http: Connection,
        name: str,
        failures: Failures,
        remember: Callable[[Message], Message],
        headers: dict[str, str],
        *,
        stream: bool = False,
    ) -> None:
        self._http = http
        self._name = name
        self._failures = failures
        self._remember = remember
        self._headers = headers
        self._stream = stream

    def ask(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """The reply, as the message to append to the history. A failed call is tried again, with the header by
        which SDKs say so. Raises Ended."""
        body: dict[str, Any] = {"model": self._name, "messages": messages}
        if tools:
            body["tools"] = tools
        if self._stream:
            body["stream"] = True
        attempt = 0
        while True:
            status, headers, code = 0, {}, ""
            try:
                response = self._http.post(body, {**self._headers, "x-stainless-retry-count": str(attempt)})
                status, headers = response.status, response.headers
                if status == 200:
                    return self._remember(streamed(response) if self._stream else whole(response.read()))
                code, why = _error(response.read())
            except NoCompletion as error:
                self._http.close()
                why = str(error)
            except (OSError, BrokenHttp) as error:
                self._http.close()
                status, why = 0, f"{type(error).__name__}: {error}"
            pause_s = None if code in OVER_A_LIMIT else self._failures.pause_s(attempt, status, headers)
            if pause_s is None:
                raise Ended(self._failures.ending(status, code), f"{status or 'no answer'}: {why}")
            time.sleep(pause_s)
            attempt += 1


def whole(body: bytes) -> Message:
    """The message of a chat completion. Raises NoCompletion."""
    try:
        message: Message = json.loads(body)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise NoCompletion(f"no chat completion: {body[:200]!r}") from error
    if not isinstance(message, dict):
        raise NoCompletion(f"no chat completion: {body[:200]!r}")
    return message


def streamed(response: Response) -> Message:
    """The message that the events of a stream make. Raises NoCompletion, OSError, BrokenHttp."""
    message: Message = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    finished = False
    try:
        for event in _events(response.lines()):
            if event == "[DONE]":
                break
            chunk = json.loads(event)
            if "error" in chunk:
                raise NoCompletion(f"the stream broke off: {_error(event.encode())[1]}")
            for choice in chunk.get("choices", ())[:1]:
                _add(message, calls, choice.get("delta") or {})
                finished = finished or choice.get("finish_reason") is not None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NoCompletion(f"no chat completion: {error}") from error
    if not finished:
        raise NoCompletion("the stream ended before the reply")
    response.read()
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def _events(lines: Iterable[bytes]) -> Iterable[str]:
    return (line[5:].strip().decode("utf-8") for line in lines if line.startswith(b"data:"))


def _add(message: Message, calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    for field in ("content", "reasoning_content"):
        if delta.get(field) is not None:
            message[field] = (message.get(field) or "") + delta[field]
    for part in delta.get("tool_calls") or ():
        call = calls.setdefault(
            part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _error(body: bytes) -> tuple[str, str]:
    """Code and message of a refusal. It may be plain text, from a proxy."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code")), str(error.get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", body[:200].decode("utf-8", "replace")
