"""Reads an SGLang server at start, and checks that it is the right one.

Owns the wait for readiness and the comparison of tokenizers. An SGLang that loads a model answers nothing for
minutes, so a server that cannot be reached is waited for, for ``engine.start_timeout_s``, and the log says so at
intervals. Every reason not to serve is a StartupError that names what was asked, what came, and what to do.

Endpoints (sglang 0.5.23): ``/model_info`` (model_path, served_model_name, weight_version), ``/server_info``
(server arguments, max_req_input_len), ``/v1/models`` (max_model_len), ``/tokenize``. None of them gives the
vocabulary size, so it is read from the server's model folder where that is readable from here, else from ours.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import orjson

from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.protocol import EngineCapabilities
from turnstile_server.engines.sglang_wire import error_for_status, parse_json
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import (
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    StartupError,
    TurnstileError,
)
from turnstile_server.settings import EngineSettings

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
REPORT_S: Final = 10.0
"""Time between two log lines about an engine that is waited for."""
PROBE_S: Final = 10.0
"""Time for one answer while the engine is waited for, so that an engine that accepts and is silent is reported."""

INPUT_MARGIN: Final = 6
"""SGLang keeps this many positions of its window free of prompt (managers/scheduler.py: max_req_input_len)."""

SCALED_INPUT_LOGPROBS: Final = "turnstile_scaled_input_logprobs"
"""Key in ``/server_info`` of our own worker: input logprobs follow the call's temperature."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server as it was at start.

    ``scales_input_logprobs``: its input logprobs follow the call's temperature. ``weight_version``: its weights.
    """

    capabilities: EngineCapabilities
    scales_input_logprobs: bool
    weight_version: str


async def read_server(
    http: EngineHttp,
    settings: EngineSettings,
    *,
    expected_tokenizer: TokenizerProbe | None,
    vocab_size: int | None,
) -> ServerFacts:
    """Waits until the server is ready, reads it and compares tokenizers. Raises StartupError."""
    waiting = _Waiting(http.url, settings.start_timeout_s)
    try:
        with anyio.fail_after(settings.start_timeout_s):
            model = await waiting.model_info(http, settings)
            server = await _get(http, "/server_info", settings.control_timeout_s)
            models = await _get(http, "/v1/models", settings.control_timeout_s)
            if vocab_size is None and expected_tokenizer is not None:
                vocab_size = expected_tokenizer.vocab_size
            facts = _facts(http.url, model, server, _window(models, server, settings), vocab_size)
            if expected_tokenizer is not None:
                await _compare_tokenizers(http, settings, expected_tokenizer, facts.capabilities, server)
    except TimeoutError as error:
        raise waiting.given_up() from error
    except StartupError:
        raise
    except TurnstileError as error:
        raise StartupError(
            f"The engine at {http.url} is no SGLang server that can be used: {error.message}"
        ) from error
    return facts


class _Waiting:
    """The wait for an engine that does not answer yet, and what it has answered so far."""

    def __init__(self, url: str, limit_s: float) -> None:
        self._url = url
        self._limit_s = limit_s
        self._last = ""
        loopback = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        self._hint = " In a container this address is the container itself." if loopback else ""

    async def model_info(self, http: EngineHttp, settings: EngineSettings) -> dict[str, Any]:
        """Asks until the engine answers; the caller bounds the time."""
        started = report_at = anyio.current_time()
        patience_s = min(PROBE_S, settings.control_timeout_s)
        while True:
            try:
                return await _get(http, "/model_info", patience_s)
            except (EngineUnavailable, EngineTimeout) as error:
                self._last = error.message
            now = anyio.current_time()
            if now >= report_at:
                report_at = now + REPORT_S
                log.info(
                    "waiting for the engine at %s, %.0f of %g s (engine.start_timeout_s): GET /model_info: %s%s",
                    self._url,
                    now - started,
                    self._limit_s,
                    self._last,
                    self._hint,
                )
            await anyio.sleep(POLL_S)

    def given_up(self) -> StartupError:
        said = f" GET /model_info, at last: {self._last}" if self._last else ""
        return StartupError(
            f"The engine at {self._url} was not ready within engine.start_timeout_s ({self._limit_s:g} s).{said} "
            f"Check the address (--engine-url) and SGLang's own log; a model that loads for longer needs a larger "
            f"engine.start_timeout_s.{self._hint}"
        )


async def _get(http: EngineHttp, path: str, timeout_s: float) -> dict[str, Any]:
    status, body = await http.request("GET", path, timeout_s=timeout_s)
    if status != 200:
        raise error_for_status(status, body)
    value = parse_json(body, path)
    if not isinstance(value, dict):
        raise EngineProtocolError(f"{path} is not an object.")
    return value


def _facts(
    url: str, model: dict[str, Any], server: dict[str, Any], window: int | None, vocab_size: int | None
) -> ServerFacts:
    if model.get("weight_version") is None:
        raise StartupError(
            f"The engine at {url} does not name its weights (no weight_version); SGLang 0.5 or newer is needed."
        )
    if window is None:
        raise StartupError(f"The engine at {url} does not say its context length (/v1/models max_model_len).")
    vocabulary = read_vocab_size(Path(str(model.get("model_path", "")))) or vocab_size
    if vocabulary is None:
        raise StartupError(
            f"The vocabulary size of the engine at {url} is unknown: its model folder is not readable here. "
            "Give the model folder (--model)."
        )
    capabilities = EngineCapabilities(
        context_length=window,
        vocab_size=vocabulary,
        model_name=str(model.get("served_model_name") or model.get("model_path")),
        constrained=server.get("grammar_backend") not in (None, "none"),
        scores=True,
        longest_scored=_longest_scored(server, window),
    )
    return ServerFacts(capabilities, server.get(SCALED_INPUT_LOGPROBS) is True, str(model["weight_version"]))


def _window(models: dict[str, Any], server: dict[str, Any], settings: EngineSettings) -> int | None:
    listed = models.get("data")
    first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    window = first.get("max_model_len") or server.get("context_length")
    if not isinstance(window, int):
        return None
    longest_input = server.get("max_req_input_len")
    if isinstance(longest_input, int):  # smaller than the window where the cache is smaller than the window
        window = min(window, longest_input + INPUT_MARGIN)
    return window if settings.context_length is None else min(window, settings.context_length)


def _longest_scored(server: dict[str, Any], window: int) -> int | None:
    """SGLang refuses inputs of ``max_req_input_len`` and more (managers/utils.py: validate_input_length), also
    those that it only scores. Our own worker takes the whole window."""
    if server.get(SCALED_INPUT_LOGPROBS) is True:
        return None
    longest_input = server.get("max_req_input_len")
    return (longest_input if isinstance(longest_input, int) else window - INPUT_MARGIN) - 1


def read_vocab_size(folder: Path) -> int | None:
    """``vocab_size`` of a Hugging Face ``config.json`` (or of its ``text_config``), None when unreadable."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) and size > 0 else None


async def _compare_tokenizers(
    http: EngineHttp,
    settings: EngineSettings,
    probe: TokenizerProbe,
    capabilities: EngineCapabilities,
    server: dict[str, Any],
) -> None:
    if server.get("skip_tokenizer_init") is True:
        raise StartupError("The engine runs without a tokenizer; start it without --skip-tokenizer-init.")
    largest = max((token for ids in probe.ids for token in ids), default=0)
    if largest >= capabilities.vocab_size:
        raise StartupError(
            f"Our tokenizer has id {largest}, the engine's model only {capabilities.vocab_size} ids: "
            "--model and the engine's model are different."
        )
    body = orjson.dumps({"prompt": list(probe.texts), "add_special_tokens": False})
    status, answer = await http.request("POST", "/tokenize", body, timeout_s=settings.control_timeout_s)
    if status != 200:
        raise error_for_status(status, answer)
    value = parse_json(answer, "/tokenize")
    theirs = value.get("tokens") if isinstance(value, dict) else None
    if not isinstance(theirs, list) or not all(isinstance(ids, list) for ids in theirs):
        raise EngineProtocolError("/tokenize gave no tokens.")
    index = probe.first_difference(theirs)
    if index is not None:
        their_ids = theirs[index] if index < len(theirs) else None
        raise StartupError(
            f"The engine's tokenizer is not ours: for the text {probe.texts[index]!r} we have "
            f"{list(probe.ids[index])[:20]}, it has {their_ids[:20] if their_ids else their_ids}. "
            "Point --model at the engine's model folder."
        )
