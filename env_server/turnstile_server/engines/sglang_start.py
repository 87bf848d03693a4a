"""Reads an SGLang server at start, and checks that it is the right one.

Owns the wait for readiness and the comparison of tokenizers. Every reason not to serve is a StartupError that
names what is wrong and what to do.

Endpoints (sglang 0.5.23): ``/model_info`` (model_path, served_model_name, weight_version), ``/server_info``
(server arguments, max_req_input_len), ``/v1/models`` (max_model_len), ``/tokenize``. None of them gives the
vocabulary size, so it is read from the server's model folder where that is readable from here, else from ours.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
    try:
        with anyio.fail_after(settings.start_timeout_s):
            model = await _ready(http, settings)
            server = await _get(http, settings, "/server_info")
            models = await _get(http, settings, "/v1/models")
            if vocab_size is None and expected_tokenizer is not None:
                vocab_size = expected_tokenizer.vocab_size
            facts = _facts(http.url, model, server, _window(models, server, settings), vocab_size)
            if expected_tokenizer is not None:
                await _compare_tokenizers(http, settings, expected_tokenizer, facts.capabilities, server)
    except TimeoutError as error:
        limit = settings.start_timeout_s
        raise StartupError(
            f"The engine at {http.url} was not ready within engine.start_timeout_s ({limit:g} s)."
        ) from error
    except StartupError:
        raise
    except TurnstileError as error:
        raise StartupError(
            f"The engine at {http.url} is no SGLang server that can be used: {error.message}"
        ) from error
    return facts


async def _ready(http: EngineHttp, settings: EngineSettings) -> dict[str, Any]:
    reported = False
    while True:
        try:
            return await _get(http, settings, "/model_info")
        except (EngineUnavailable, EngineTimeout) as error:
            if not reported:
                log.info("waiting for the engine at %s: %s", http.url, error.message)
                reported = True
            await anyio.sleep(POLL_S)


async def _get(http: EngineHttp, settings: EngineSettings, path: str) -> dict[str, Any]:
    status, body = await http.request("GET", path, timeout_s=settings.control_timeout_s)
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
