"""Reads a vLLM server at start, and checks that it is the right one and was started with the right flags.

Every reason not to serve is a StartupError that names the flag or variable to add. What is read: ``/version``,
``/v1/models`` (max_model_len), ``/server_info`` (all settings; in dev mode only), ``/weight_info``,
``/is_paused``, ``/tokenize``, and the worker extension's own state (vllm 0.32.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
import orjson

from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.protocol import EngineCapabilities
from turnstile_server.engines.replies import error_for_status, parse_json
from turnstile_server.engines.server_replies import get_object
from turnstile_server.engines.server_start import ServerStart, listed_window, vocabulary_size
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.engines.vllm.workers import WorkerCalls
from turnstile_server.engines.weights import UpdateWay
from turnstile_server.errors import EngineProtocolError, StartupError
from turnstile_server.settings import EngineSettings

OLDEST: Final = (0, 32)
"""Older servers do not say which weights sampled a token."""

TOKENIZE_PARALLEL: Final = 4

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """A server as it was at start. ``extended``: its workers have our extension. ``folder``: the weights it
    serves, None where nobody knows. ``by_priority``: it orders its queue by the calls' priorities. ``paused``:
    somebody paused it before we came."""

    capabilities: EngineCapabilities
    weight_version: str
    extended: bool
    folder: str | None
    by_priority: bool
    paused: bool


async def read_server(
    http: EngineHttp,
    settings: EngineSettings,
    *,
    expected_tokenizer: TokenizerProbe | None,
    vocab_size: int | None,
) -> VllmFacts:
    """Waits until the server is ready, reads it and compares tokenizers. Raises StartupError."""
    start = ServerStart(http.url, settings, name="vLLM", path="/version")
    with start.reading():
        # vLLM listens before its model is loaded, and answers nothing until then.
        version = await start.first_answer(partial(get_object, http, "/version"))
        if vocab_size is None and expected_tokenizer is not None:
            vocab_size = expected_tokenizer.vocab_size
        facts = await _read(http, settings, version, vocab_size)
        if expected_tokenizer is not None:
            await _compare_tokenizers(http, settings, expected_tokenizer, facts.capabilities)
    return facts


async def _read(
    http: EngineHttp, settings: EngineSettings, said: Mapping[str, Any], vocab_size: int | None
) -> VllmFacts:
    """``said``: its answer to ``/version``."""
    url, patience_s = http.url, settings.control_timeout_s
    _check_version(url, said.get("version"))
    window = _window(url, await get_object(http, "/v1/models", patience_s), settings)
    await _check_endpoint(http, patience_s)
    server = await _server_info(http, patience_s)
    _check_settings(url, server)
    model, version = server.section("model_config"), await _weight_version(http, patience_s)
    extended = await WorkerCalls(http, settings).status(server.section("parallel_config"))
    capabilities = EngineCapabilities(
        context_length=window,
        vocab_size=vocabulary_size(url, str(model.get("model", "")), vocab_size),
        model_name=str(model.get("served_model_name") or model.get("model")),
        constrained=True,
        structural_tags=not _reasons(server),
        longest_scored=window - 1,  # vLLM samples at least one token after what it scores
        exact_truncation=False,
        updates=frozenset[UpdateWay](
            {"disk", "tensors", "trainer"} if extended is not None else {"trainer"},
        ),
        tensor_format="safetensors" if extended is not None else None,
        cache_tokens=server.cache_tokens,
        keeps_prefixes=server.section("cache_config").get("enable_prefix_caching") is not False,
        sleeps=model.get("enable_sleep_mode") is True and server.device != "cpu",
        details=server.details(),
    )
    return VllmFacts(
        capabilities,
        version,
        extended=extended is not None,
        folder=None if extended is None else extended.path,
        by_priority=server.section("scheduler_config").get("policy") == "priority",
        paused=(await get_object(http, "/is_paused", patience_s)).get("is_paused") is True,
    )


def _reasons(server: _ServerInfo) -> bool:
    """True where it lets a grammar begin behind the reasoning (``--reasoning-parser``). A grammar that has the
    reasoning in it would then ask for it twice."""
    return bool(server.section("structured_outputs_config").get("reasoning_parser"))


@dataclass(frozen=True, slots=True)
class _ServerInfo:
    config: Mapping[str, Any]

    def section(self, name: str) -> Mapping[str, Any]:
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def device(self) -> str:
        return str(self.section("device_config").get("device"))

    @property
    def cache_tokens(self) -> int | None:
        """Tokens of the attention cache; None where the server does not say (older ones know it in the core
        only)."""
        cache = self.section("cache_config")
        blocks, size = cache.get("num_gpu_blocks"), cache.get("block_size")
        return blocks * size if isinstance(blocks, int) and isinstance(size, int) else None

    def details(self) -> dict[str, str]:
        """The settings that explain a distance between recorded and recomputed logprobs."""
        model, cache, parallel = map(self.section, ("model_config", "cache_config", "parallel_config"))
        speculative = self.section("speculative_config")
        return {
            "engine": "vllm",
            "device": self.device,
            "dtype": str(model.get("dtype")).removeprefix("torch."),
            "quantization": str(model.get("quantization") or "none"),
            "cache_dtype": str(cache.get("cache_dtype")),
            "prefix_caching": str(cache.get("enable_prefix_caching")).lower(),
            "speculative_decoding": str(speculative.get("method") or "none"),
            "logprobs_mode": str(model.get("logprobs_mode")),
            "enforce_eager": str(model.get("enforce_eager")).lower(),
            "tensor_parallel": str(parallel.get("tensor_parallel_size")),
        }


def _check_version(url: str, version: Any) -> None:
    found = re.match(r"(\d+)\.(\d+)", str(version))
    if found is None:
        raise StartupError(f"The engine at {url} does not say its version (/version): it is no vLLM server.")
    if (int(found[1]), int(found[2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise StartupError(
            f"The engine at {url} is vLLM {version}; {needed} or newer is needed: older ones do not say which "
            "weights sampled a token."
        )


async def _check_endpoint(http: EngineHttp, timeout_s: float) -> None:
    """An empty request is refused with 400 by the endpoint, and with 404 where there is none."""
    status, body = await http.request("POST", "/inference/v1/generate", b"{}", timeout_s=timeout_s)
    if status == 404:
        raise StartupError(
            f"The engine at {http.url} has no /inference/v1/generate: start it with --enable-scale-out."
        )
    if status == 401:
        raise StartupError(
            f"The engine at {http.url} wants a key (its --api-key): set TURNSTILE_ENGINE__API_KEY to it."
        )
    if status not in (400, 422):
        raise error_for_status(status, body)


async def _server_info(http: EngineHttp, timeout_s: float) -> _ServerInfo:
    status, body = await http.request("GET", "/server_info?config_format=json", timeout_s=timeout_s)
    if status == 404:
        raise StartupError(
            f"The engine at {http.url} is not in dev mode, which alone lets it pause and load weights: start it "
            "with VLLM_SERVER_DEV_MODE=1 in its environment, on a port that only this machine or network can "
            "reach."
        )
    if status != 200:
        raise error_for_status(status, body)
    value = parse_json(body, "/server_info")
    config = value.get("vllm_config") if isinstance(value, dict) else None
    if not isinstance(config, dict):
        raise EngineProtocolError("/server_info has no vllm_config.")
    return _ServerInfo(config)


def _check_settings(url: str, server: _ServerInfo) -> None:
    model = server.section("model_config")
    wrong: list[str] = []
    if model.get("logprobs_mode") != "processed_logprobs":
        wrong.append(
            f"--logprobs-mode processed_logprobs (it has {model.get('logprobs_mode')}: logprobs that ignore the "
            "temperature)"
        )
    if model.get("generation_config") != "vllm":
        wrong.append(
            "--generation-config vllm (it takes sampling defaults from the model folder, which change what is "
            "sampled)"
        )
    if model.get("skip_tokenizer_init") is True:
        raise StartupError(
            f"The engine at {url} runs without a tokenizer; start it without --skip-tokenizer-init."
        )
    if model.get("logits_processors"):
        raise StartupError(
            f"The engine at {url} changes the logits of every call (--logits-processors), which no call can undo; "
            "start it without."
        )
    if wrong:
        raise StartupError(f"The engine at {url} must be started with {' and '.join(wrong)}.")


def _window(url: str, models: Json, settings: EngineSettings) -> int:
    window = listed_window(models)
    if not isinstance(window, int):
        raise StartupError(f"The engine at {url} does not say its context length (/v1/models max_model_len).")
    return window if settings.context_length is None else min(window, settings.context_length)


async def _weight_version(http: EngineHttp, timeout_s: float) -> str:
    version = (await get_object(http, "/weight_info", timeout_s)).get("weight_version")
    if not isinstance(version, str):
        raise StartupError(f"The engine at {http.url} does not name its weights (/weight_info).")
    return version


async def _compare_tokenizers(
    http: EngineHttp, settings: EngineSettings, probe: TokenizerProbe, capabilities: EngineCapabilities
) -> None:
    probe.check_fits(capabilities.vocab_size)
    theirs: list[list[int]] = [[] for _ in probe.texts]
    slots = anyio.Semaphore(TOKENIZE_PARALLEL)

    async def tokenize(index: int, text: str) -> None:
        body = orjson.dumps({"prompt": text, "add_special_tokens": False})
        async with slots:
            status, answer = await http.request("POST", "/tokenize", body, timeout_s=settings.control_timeout_s)
        if status != 200:
            raise error_for_status(status, answer)
        value = parse_json(answer, "/tokenize")
        tokens = value.get("tokens") if isinstance(value, dict) else None
        if not isinstance(tokens, list):
            raise EngineProtocolError("/tokenize gave no tokens.")
        theirs[index] = tokens

    try:
        async with anyio.create_task_group() as group:
            for index, text in enumerate(probe.texts):
                group.start_soon(tokenize, index, text)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    probe.check_same(theirs)
