"""The common part of reading an SGLang and a vLLM at start: the wait until it answers, and what it must say.

A server that loads a model answers nothing for minutes, so one that cannot be reached is waited for, for
``engine.start_timeout_s``, and the log says so at intervals. Every reason not to serve is a StartupError.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import anyio

from turnstile_server.engines.bounds import EngineBounds
from turnstile_server.engines.model_config import read_vocab_size
from turnstile_server.errors import EngineTimeout, EngineUnavailable, StartupError, TurnstileError
from turnstile_server.settings import EngineSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S: Final = 0.25
REPORT_S: Final = 10.0
"""Time between two log lines about an engine that is waited for."""


class ServerStart:
    """The start of the server ``name`` (SGLang, vLLM) at ``url``. ``path``: what it is asked until it answers."""

    def __init__(self, url: str, settings: EngineSettings, *, name: str, path: str) -> None:
        self._url = url
        self._settings = settings
        self._bounds = settings.bounds_of(EngineBounds)
        self._name = name
        self._path = path
        self._last = ""
        """The outcome of the last question that had no answer."""
        loopback = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        self._hint = " In a container this address is the container itself." if loopback else ""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Bounds the block by ``engine.start_timeout_s``. Every error of the engine's in it is a StartupError."""
        limit_s = self._settings.start_timeout_s
        try:
            with anyio.fail_after(limit_s):
                yield
        except TimeoutError as error:
            said = f" GET {self._path}, at last: {self._last}" if self._last else ""
            raise StartupError(
                f"The engine at {self._url} was not ready within engine.start_timeout_s ({limit_s:g} s).{said} "
                f"Check the address (--engine-url) and {self._name}'s own log; a model that loads for longer "
                f"needs a larger engine.start_timeout_s.{self._hint}"
            ) from error
        except StartupError:
            raise
        except TurnstileError as error:
            raise StartupError(
                f"The engine at {self._url} is no {self._name} server that can be used: {error.message}"
            ) from error

    async def first_answer(self, ask: Callable[[float], Awaitable[T]]) -> T:
        """Asks until the engine answers; ``reading`` bounds the time. ``ask(timeout_s)``: one question."""
        started = report_at = anyio.current_time()
        patience_s = self._bounds.probe_timeout_s
        while True:
            try:
                return await ask(patience_s)
            except (EngineUnavailable, EngineTimeout) as error:
                self._last = error.message
            now = anyio.current_time()
            if now >= report_at:
                report_at = now + REPORT_S
                log.info(
                    "waiting for the engine at %s, %.0f of %g s (engine.start_timeout_s): GET %s: %s%s",
                    self._url,
                    now - started,
                    self._settings.start_timeout_s,
                    self._path,
                    self._last,
                    self._hint,
                )
            await anyio.sleep(POLL_S)


def listed_window(models: Mapping[str, Any]) -> Any:
    """``max_model_len`` of the first model in ``/v1/models``; None where it is not said."""
    listed = models.get("data")
    first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    return first.get("max_model_len")


def vocabulary_size(url: str, folder: str, ours: int | None) -> int:
    """That of the server's model ``folder`` where it can be read from here, else ``ours``: no server gives it.
    Raises StartupError where neither is known."""
    size = read_vocab_size(Path(folder)) or ours
    if size is None:
        raise StartupError(
            f"The vocabulary size of the engine at {url} is unknown: its model folder is not readable here. "
            "Give the model folder (--model)."
        )
    return size
