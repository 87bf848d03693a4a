"""The facts that an SGLang server reports about itself, read into what the engine must know. Pure but for
``config.json`` files.

Every reason not to serve is a StartupError that names what was asked, what came, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from turnstile_server.engines.model_config import read_config
from turnstile_server.engines.protocol import EngineCapabilities
from turnstile_server.engines.server_start import listed_window, vocabulary_size
from turnstile_server.engines.sglang.generate import NEUTRAL
from turnstile_server.engines.weights import UpdateWay
from turnstile_server.errors import StartupError
from turnstile_server.settings import EngineSettings

OLDEST: Final = (0, 5)
"""The oldest SGLang whose interface is used here: it names the weights of tokens."""

INPUT_MARGIN: Final = 6
"""SGLang keeps this many positions of its window free of prompt (managers/scheduler.py: max_req_input_len)."""

SCALED_INPUT_LOGPROBS: Final = "turnstile_scaled_input_logprobs"
"""Key in ``/server_info`` of our own worker: input logprobs follow the call's temperature; weights come from a
folder or as safetensors, and calls are computed again after every update."""

RESUMES_GRAMMARS: Final = "turnstile_resumes_grammars"
"""Key in ``/server_info`` of our own worker: ``grammar_from`` of a call is read."""

_DETAILS: Final = {
    "sglang": "version",
    "dtype": "dtype",
    "device": "device_name",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "attention_backend": "attention_backend",
    "sampling_backend": "sampling_backend",
    "speculative_algorithm": "speculative_algorithm",
    "deterministic": "enable_deterministic_inference",
    "tensor_parallel": "tp_size",
}
"""The settings of ``/server_info`` that explain numbers, under the names in ``EngineCapabilities.details``."""

_OVERRIDDEN: Final = frozenset(
    {
        *(name for name, value in NEUTRAL.items() if value is not None),
        *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "stop_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    }
)
"""Sampling parameters of which every call sends a value. A null is not counted: a router between may drop it."""

_MODEL_FACTS: Final = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
"""Keys of ``config.json`` that must be equal for two folders to be versions of one model."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server as it was at start.

    ``scales_input_logprobs``: its input logprobs follow the call's temperature. ``weight_version``: its weights.
    ``model_path``: the folder that it started with. ``quantized``: it has tensors of other shapes than its folder.
    ``prefill_tokens``: most prompt tokens computed at once; None: no bound. ``keeps_cache_in_place``: weights that
    are loaded in place leave calls their old cache. ``checks_folders``: it refuses a folder that does not
    fit, whole. ``loads``, ``metrics``: it has ``/v1/loads``, ``/metrics``. ``no_sleep``: why it cannot sleep.
    """

    capabilities: EngineCapabilities
    scales_input_logprobs: bool
    weight_version: str
    model_path: str = ""
    quantized: bool = False
    tensor_parallel: int = 1
    prefill_tokens: int | None = None
    keeps_cache_in_place: bool = True
    checks_folders: bool = False
    loads: bool = False
    metrics: bool = False
    no_sleep: str = ""


def facts_of(
    url: str, model: Mapping[str, Any], server: Mapping[str, Any], window: int | None, vocab_size: int | None
) -> ServerFacts:
    """From ``/model_info`` and ``/server_info``. Raises StartupError."""
    _check_release(url, server)
    for said in (model, server):
        _check_preferred(url, said.get("preferred_sampling_params"))
    if model.get("weight_version") is None:
        raise StartupError(
            f"The engine at {url} does not name its weights (no weight_version); SGLang 0.5 or newer is needed."
        )
    if window is None:
        raise StartupError(f"The engine at {url} does not say its context length (/v1/models max_model_len).")
    vocabulary = vocabulary_size(url, str(model.get("model_path", "")), vocab_size)
    own_worker = server.get(SCALED_INPUT_LOGPROBS) is True
    no_sleep, grammar = _no_sleep(server), server.get("grammar_backend")
    constrained = grammar not in (None, "none")
    updates: frozenset[UpdateWay] = frozenset({"disk", "tensors"}) if own_worker else _ways(server)
    capabilities = EngineCapabilities(
        context_length=window,
        vocab_size=vocabulary,
        model_name=str(model.get("served_model_name") or model.get("model_path")),
        constrained=constrained,
        no_grammar=_no_grammar(own_worker),
        structural_tags=constrained and (own_worker or grammar == "xgrammar"),
        resumes_grammars=server.get(RESUMES_GRAMMARS) is True,
        scores=True,
        longest_scored=_longest_scored(server, window),
        updates=updates,
        tensor_format="safetensors" if own_worker else "flattened_bucket",
        tensor_copies=_whole(server, "tp_size") or 1,
        adapters=server.get("enable_lora") is True,
        cache_tokens=_whole(server, "max_total_num_tokens"),
        keeps_prefixes=server.get("disable_radix_cache") is not True,
        sleeps=not no_sleep,
        details=_details(server),
    )
    return ServerFacts(
        capabilities,
        scales_input_logprobs=own_worker,
        weight_version=str(model["weight_version"]),
        model_path=str(model.get("model_path", "")),
        quantized=server.get("quantization") is not None,
        tensor_parallel=_whole(server, "tp_size") or 1,
        prefill_tokens=_whole(server, "chunked_prefill_size"),
        keeps_cache_in_place=not own_worker,
        checks_folders=own_worker,
        loads=not own_worker,
        metrics=server.get("enable_metrics") is True,
        no_sleep=no_sleep,
    )


def check_model(url: str, theirs: Path, ours: Path) -> None:
    """Raises StartupError where both folders can be read and hold different models."""
    their_config, our_config = read_config(theirs), read_config(ours)
    if their_config is None or our_config is None:
        return
    for name in _MODEL_FACTS:
        their_value, our_value = their_config.get(name), our_config.get(name)
        if None not in (their_value, our_value) and their_value != our_value:
            raise StartupError(
                f"The engine at {url} serves another model than --model: {name} is {their_value!r} in {theirs}, "
                f"{our_value!r} in {ours}. Point --model at the engine's model folder."
            )


def window_of(models: Mapping[str, Any], server: Mapping[str, Any], settings: EngineSettings) -> int | None:
    """The context length in tokens, at most that of the settings; None where the server says none."""
    window = listed_window(models) or server.get("context_length")
    if not isinstance(window, int):
        return None
    longest_input = server.get("max_req_input_len")
    if isinstance(longest_input, int):  # smaller than the window where the cache is smaller than the window
        window = min(window, longest_input + INPUT_MARGIN)
    return window if settings.context_length is None else min(window, settings.context_length)


def _longest_scored(server: Mapping[str, Any], window: int) -> int | None:
    """SGLang refuses inputs of ``max_req_input_len`` and more (managers/utils.py: validate_input_length), also
    those that it only scores. Our own worker takes the whole window."""
    if server.get(SCALED_INPUT_LOGPROBS) is True:
        return None
    longest_input = server.get("max_req_input_len")
    return (longest_input if isinstance(longest_input, int) else window - INPUT_MARGIN) - 1


def _ways(server: Mapping[str, Any]) -> frozenset[UpdateWay]:
    ways: set[UpdateWay] = {"disk", "tensors", "distributed", "trainer"}
    if server.get("device") == "cuda":
        ways.add("ipc")
    return frozenset(ways)


def _no_sleep(server: Mapping[str, Any]) -> str:
    """The reason that the server's memory cannot be freed; empty where it can, as in our own worker."""
    if server.get(SCALED_INPUT_LOGPROBS) is True:
        return ""
    if server.get("device") == "cpu":
        return "This SGLang runs on a CPU: it frees no memory (its memory saver is for GPUs)."
    if server.get("enable_memory_saver") is not True:
        return "This SGLang frees no memory: start it with --enable-memory-saver."
    return ""


def _no_grammar(own_worker: bool) -> str:
    """What to do where the server constrains nothing."""
    if own_worker:
        return "it needs the package llguidance: pip install 'turnstile-rl[embedded]'"
    return "start SGLang without --grammar-backend none"


def _details(server: Mapping[str, Any]) -> dict[str, str]:
    found = {name: server[key] for name, key in _DETAILS.items() if server.get(key) is not None}
    if "disable_radix_cache" in server:
        found["prefix_cache"] = not server["disable_radix_cache"]
    return {
        name: "yes" if value is True else "no" if value is False else str(value) for name, value in found.items()
    }


def _check_release(url: str, server: Mapping[str, Any]) -> None:
    """A server that does not say its release, or says it in another form, is taken as it is."""
    found = re.match(r"(\d+)\.(\d+)", str(server.get("version", "")))
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise StartupError(f"The engine at {url} is SGLang {server['version']}; {needed} or newer is needed.")


def _check_preferred(url: str, preferred: Any) -> None:
    """Raises StartupError for defaults of sampling that a call does not override. ``preferred``: an object, or its
    JSON as on the command line."""
    if isinstance(preferred, str):
        try:
            preferred = orjson.loads(preferred)
        except orjson.JSONDecodeError:
            preferred = {preferred: True}
    if not preferred:
        return
    names = preferred if isinstance(preferred, Mapping) else {str(preferred): True}
    left = sorted(name for name, value in names.items() if value is not None and name not in _OVERRIDDEN)
    if left:
        raise StartupError(
            f"The engine at {url} samples with {', '.join(left)} of its own (--preferred-sampling-params), which "
            "no call can undo, so its logprobs are not those of the model; start it without."
        )


def _whole(server: Mapping[str, Any], name: str) -> int | None:
    value = server.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
