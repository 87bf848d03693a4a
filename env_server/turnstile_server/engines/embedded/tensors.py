"""Named tensors of a request, for an update of the weights: safetensors, so that nothing in it can be executed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from turnstile_server.engines.embedded.model import ModelError
from turnstile_server.engines.serialized_tensors import SAFETENSORS


def read_tensors(body: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of an ``/update_weights_from_tensor``, in the CPU's memory: ``serialized_named_tensors`` is one
    base64 text of a safetensors file. Raises ModelError."""
    serialized = body.get("serialized_named_tensors")
    if not isinstance(serialized, list) or len(serialized) != 1 or not isinstance(serialized[0], str):
        raise ModelError("serialized_named_tensors must be a list of one text")
    if body.get("load_format") != SAFETENSORS:
        raise ModelError(f"load_format is {body.get('load_format')!r}; the embedded engine takes {SAFETENSORS!r}")
    try:
        tensors: dict[str, Tensor] = load(base64.b64decode(serialized[0], validate=True))
    except (binascii.Error, SafetensorError) as error:
        raise ModelError(f"the tensors are no base64 of a safetensors file ({error})") from error
    return tensors
