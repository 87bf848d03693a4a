"""SGLang's routing of a mixture of experts: whether a server returns it, and its rows out of a reply.

Source (sglang 0.5.23): a call with ``return_routed_experts`` gets ``meta_info.routed_experts`` with its finish,
base64 of int32 [rows, layers, experts per token] (``srt/state_capturer/routed_experts.py``); rows are those of
positions ``[routed_experts_start_len, prompt + completion - 1)``
(``batch_result_processor._maybe_collect_routed_experts``). The last sampled token was not fed, so it has none.
Rows of a cached prefix are those of the call that computed it. Layers without experts have rows of zeros. A server
without ``--enable-return-routed-experts`` ignores the field.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from turnstile.models import ExpertArray, expert_array
from turnstile_server.engines.protocol import EngineCapabilities, EngineSampling, ExpertShape
from turnstile_server.engines.replies import refuse
from turnstile_server.errors import EngineRefused, StartupError

WIRE_BYTES: Final = 16 / 3
"""Bytes of one number of an expert in a reply: int32, in base64."""


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """A call's request for experts: the rows from position ``start`` of a call with a prompt of ``prompt``
    tokens."""

    shape: ExpertShape
    start: int
    prompt: int

    def fields(self) -> dict[str, Any]:
        """The fields of the request's body."""
        return {"return_routed_experts": True, "routed_experts_start_len": self.start}

    def read(self, meta: Mapping[str, Any], completion: int, *, aborted: bool) -> ExpertArray | None:
        """The rows in the finish of a call with ``completion`` tokens. None only where it was aborted before
        SGLang collected them. Raises EngineProtocolError."""
        encoded = meta.get("routed_experts")
        if encoded is None and aborted:
            return None
        if not isinstance(encoded, str):
            refuse("it has no routed_experts, which were asked for")
        try:
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
        except (binascii.Error, ValueError) as error:
            refuse(f"routed_experts is not base64 of int32: {error}")
        rows, width = self.prompt + completion - 1 - self.start, self.shape.layers * self.shape.top_k
        if len(flat) != rows * width:
            refuse(
                f"routed_experts has {len(flat)} numbers for {rows} tokens of {self.shape.layers} layers and "
                f"{self.shape.top_k} experts"
            )
        if len(flat) and (int(flat.min()) < 0 or int(flat.max()) >= self.shape.experts):
            refuse(f"routed_experts names an expert outside the {self.shape.experts} of a layer")
        return expert_array(flat.reshape(rows, self.shape.layers, self.shape.top_k))


def expert_request(engine: EngineCapabilities, sampling: EngineSampling, prompt: int) -> ExpertRequest | None:
    """The request for experts of a call with ``prompt`` tokens; None where it asks for none. Raises EngineRefused
    where the engine returns no experts."""
    if sampling.experts_from is None:
        return None
    if engine.experts is None:
        raise EngineRefused("This engine does not return routed experts.")
    return ExpertRequest(engine.experts, sampling.experts_from, prompt)


def check_experts(
    url: str, server: Mapping[str, Any], folders: tuple[Path | None, ...], window: int, max_reply_bytes: int
) -> ExpertShape:
    """The shape of the routing that the server returns. ``folders``: the model's, the first readable one counts.

    Raises StartupError where it returns none, or where that of a full context is larger than a reply may be.
    """
    if server.get("enable_return_routed_experts") is not True:
        raise StartupError(
            f"engine.routed_experts is on, but the engine at {url} does not return them: start it with "
            "--enable-return-routed-experts, or switch the setting off."
        )
    shape = next((found for folder in folders if folder is not None and (found := read_shape(folder))), None)
    if shape is None:
        raise StartupError(
            f"engine.routed_experts is on, but the model of the engine at {url} is no mixture of experts, as far "
            "as can be read here (num_experts_per_tok, num_hidden_layers and the number of experts in its "
            "config.json). Point --model at the engine's model folder, or switch the setting off."
        )
    needed = int(window * shape.layers * shape.top_k * WIRE_BYTES)
    if needed > max_reply_bytes:
        raise StartupError(
            f"engine.routed_experts is on: the experts of a full context ({window} tokens, {shape.layers} layers, "
            f"{shape.top_k} experts per token) take {needed} bytes in one answer, more than "
            f"engine.max_reply_bytes ({max_reply_bytes}). Set that higher, or engine.context_length lower."
        )
    return shape


def read_shape(folder: Path) -> ExpertShape | None:
    """From a Hugging Face ``config.json`` (or its ``text_config``), as SGLang reads it; None for another model."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    for known in (text if isinstance(text, dict) else {}, config):
        counts = [known.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
        experts = next((count for count in counts if isinstance(count, int)), None)
        layers, top_k = known.get("num_hidden_layers"), known.get("num_experts_per_tok")
        if isinstance(layers, int) and isinstance(top_k, int) and experts is not None:
            return ExpertShape(layers=layers, top_k=top_k, experts=experts)
    return None
