"""Loading a Hugging Face causal model, new tensors for it, and its forwards over the rows of a cache.

What must hold: every weight comes from the folder (a folder that lacks one cannot be loaded), and the model's
cached forward equals its plain forward. Both are checked at load.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from turnstile_server.engines.embedded.device import CPU_FLOAT32, ComputeDevice
from turnstile_server.engines.embedded.kv_rows import KvRows

SELF_CHECK_TOLERANCE: Final = 1e-3
SELF_CHECK_SHARE: Final = 1e-4
"""Largest difference of a cached and a plain logit in float32, absolute and as a share of the largest logit:
whichever is more. SmolLM2-135M is 2.5e-5 of its logit of 34 apart; a mask or a position that is off by one gives a
share of 0.035 and more."""


class ModelError(Exception):
    """The folder cannot be served; the message says why."""


def weights_name(folder: Path) -> str:
    """A name for the weights in ``folder`` by what they are: equal names, equal files."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with file.open("rb") as weights:
            digest.update(hashlib.file_digest(weights, "sha256").digest())
    return f"sha256-{digest.hexdigest()[:12]}"


class LoadedModel:
    """One set of weights. ``version`` names it; ``window`` is the model's context length, ``unknown`` the names in
    its folder that the model has no weights for. ``from_folder``: all weights are those of the folder; False once
    tensors were loaded. After ``release`` only these facts are left."""

    def __init__(self, folder: Path, version: str, compute: ComputeDevice = CPU_FLOAT32) -> None:
        """Raises ModelError."""
        self.folder = folder
        self.version = version
        self.compute = compute
        self.from_folder = True
        self._model: Any
        self._model, config, self.unknown = _load(folder, compute)
        self.vocab_size: int = config["vocab_size"]
        self.window: int = config["max_position_embeddings"]
        generation = self._model.generation_config.eos_token_id if self._model.generation_config else None
        self.eos_ids = frozenset(_as_list(config.get("eos_token_id")) + _as_list(generation))

    def release(self) -> None:
        """Forgets the network. No forward may follow."""
        self._model = None

    @torch.inference_mode()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes ``tensors`` into the weights of the same names, rounded to the model's dtype. All or none.

        Raises ModelError for a name that the model has not, or a tensor of another shape or without floats.
        """
        own = dict(self._model.named_parameters())
        for name, tensor in tensors.items():
            if name not in own:
                raise ModelError(f"the model has no weights of the name {name}")
            if tensor.shape != own[name].shape:
                raise ModelError(f"{name} is {list(tensor.shape)}, the model's is {list(own[name].shape)}")
            if not tensor.is_floating_point():
                raise ModelError(f"{name} is {tensor.dtype}, which is no type of weights")
        self.from_folder = False
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    @torch.inference_mode()
    def prefill(self, cache: KvRows, row: int, ids: list[int], *, all_logits: bool) -> Tensor:
        """Appends ``ids`` to ``row``. Gives logits float32 [len(ids), V], or [1, V] of the last one."""
        positions, mask = cache.aim_at_row(row, len(ids))
        logits = self._forward(self._ids([ids]), positions, mask, cache, keep=0 if all_logits else 1)
        cache.held[row] = cache.held[row] + ids
        return logits[0]

    @torch.inference_mode()
    def decode(self, cache: KvRows, last_ids: list[int]) -> Tensor:
        """Appends one id to each of the first rows. Gives logits float32 [rows, V]."""
        positions, mask = cache.aim_at_first(len(last_ids))
        logits = self._forward(self._ids(last_ids)[:, None], positions, mask, cache, keep=1)
        for row, token in enumerate(last_ids):
            cache.held[row].append(token)
        return logits[:, -1]

    def _ids(self, ids: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(ids, device=self.compute.device)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: KvRows, *, keep: int) -> Tensor:
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits.float()
        return logits

    @torch.inference_mode()
    def check_cache(self) -> None:
        """Raises ModelError when the cached forward, alone or in a batch, differs from the plain one.

        They are compared in float32, where a mistake stands out from the rounding; in bfloat16 they have to be
        finite."""
        if self.compute.dtype != torch.float32:
            exact = copy.copy(self)
            exact._model = copy.deepcopy(self._model).float()
            exact.compute = replace(self.compute, dtype=torch.float32)
            exact.check_cache()
        worst, largest = self._compare_forwards()
        limit = max(SELF_CHECK_TOLERANCE, SELF_CHECK_SHARE * largest)
        if not worst < (limit if self.compute.dtype == torch.float32 else math.inf):
            raise ModelError(
                f"its cached and plain logits differ by {worst:g}; this architecture is not supported"
            )

    def _compare_forwards(self) -> tuple[float, float]:
        """Largest |cached - plain| of any logit, and the largest |logit|. Raises ModelError."""
        ids = [i % self.vocab_size for i in range(3, 12)]
        try:
            plain = self._model(input_ids=self._ids([ids]), use_cache=False).logits[0].float()
            cache = KvRows(2, self.window, self.compute)
            first = self.prefill(cache, 0, ids[:5], all_logits=True)
            second = self.prefill(cache, 1, ids[:3], all_logits=True)
            both = self.decode(cache, [ids[5], ids[3]])
            rest = self.prefill(cache, 0, ids[6:], all_logits=True)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as error:
            raise ModelError(
                f"its attention cache cannot be used in rows ({type(error).__name__}: {error})"
            ) from error
        pairs = ((first, plain[:5]), (second, plain[:3]), (both, plain[[5, 3]]), (rest, plain[6:]))
        differences = torch.stack([(a - b).abs().max() for a, b in pairs])
        return float(differences.max()), float(plain.abs().max())


def load_tokenizer(folder: Path) -> Any:
    """Raises ModelError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        echo = str(tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)))
    except Exception as error:
        raise ModelError(f"its tokenizer cannot be loaded ({type(error).__name__}: {error})") from error
    if echo.strip() != "hello":  # transformers makes an empty one where the files are missing
        raise ModelError(f"its tokenizer turns 'hello' into {echo!r}; are its files there?")
    return tokenizer


def _load(folder: Path, compute: ComputeDevice) -> tuple[Any, dict[str, Any], frozenset[str]]:
    if not folder.is_dir():
        raise ModelError("it is a file, not a folder" if folder.exists() else "there is no such folder")
    if not (folder / "config.json").is_file():
        raise ModelError("it is no model folder (no config.json)")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _check_attention(config.to_dict())
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=compute.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name: the library's error points to its log
        )
    except ModelError:
        raise
    except Exception as error:  # loaders of many formats raise anything, and the old weights must serve on
        raise ModelError(f"{type(error).__name__}: {error}") from error
    model, report = loaded
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ModelError(f"{len(lacking)} weights are missing, the first is {lacking[0]}")
    misshapen = sorted(report["mismatched_keys"])
    if misshapen:
        name, found, wanted = misshapen[0]
        raise ModelError(
            f"{len(misshapen)} weights have another shape than its config.json says, the first is {name}: "
            f"{list(found)}, not {list(wanted)}"
        )
    model.eval()
    # The loader maps the file. Weights of our own stay as they are when the file is written again or removed.
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(compute.device, copy=True)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{compute.device_name} has not enough memory for its weights ({error})") from error
    values = config.to_dict()
    for name in ("vocab_size", "max_position_embeddings"):
        if not isinstance(values.get(name), int):
            raise ModelError(f"its config.json has no {name}")
    return model, values, frozenset(report["unexpected_keys"])


def _check_attention(config: dict[str, Any]) -> None:
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds - {"full_attention"}:
        raise ModelError(f"the embedded engine serves full attention only, this model has {sorted(kinds)}")
    if "layer_types" not in config and config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ModelError("the embedded engine serves full attention only, this model has a sliding window")


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list | tuple) else [int(value)]
