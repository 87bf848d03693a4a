"""A model folder in Hugging Face's form, made from a stream of tensors.

Holds: a folder has its name only when it is complete. It has every weight that its model's own folder has: those
that the trainer does not send (frozen ones) are taken from there. Memory: one shard at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_BESIDE = {".json", ".jinja", ".txt", ".model", ".py", ".tiktoken"}
"""Files beside the weights: configuration, tokenizer, templates, a model's own code."""
_INDEX = "model.safetensors.index.json"


class WrongWeights(ValueError):
    """What the trainer sends does not fit the model's own folder."""


def write_model_folder(
    folder: Path, base: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int
) -> None:
    """Makes ``folder`` with ``tensors`` as its weights and the other files of ``base``.

    Raises WrongWeights where ``base`` has no weight of that name (an engine would not know it either); OSError.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file in base.iterdir():
            if file.is_file() and file.suffix in _BESIDE and not file.name.endswith(".index.json"):
                shutil.copyfile(file, partial / file.name)
        _write_shards(partial, _completed(base, tensors), shard_bytes)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_base(base: Path) -> None:
    """Raises WrongWeights where ``base`` is no model folder with safetensors."""
    if not (base / "config.json").is_file() or not any(base.glob("*.safetensors")):
        raise WrongWeights(f"{base} is no model folder: it must have a config.json and weights as safetensors")


def _completed(base: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """``tensors``, then what ``base`` has besides them."""
    place, tied = _places(base), _tied_head(base)
    left = set(place)
    for name, tensor in tensors:
        if name not in place and name != tied:
            raise WrongWeights(
                f"the trainer sends {name}, which {base} does not have: its layout differs from the checkpoint's, "
                "and an engine that loads checkpoints cannot load it"
            )
        left.discard(name)
        yield name, tensor
    for name in sorted(left - {tied}):
        with safe_open(place[name], framework="pt") as file:
            yield name, file.get_tensor(name)


def _places(base: Path) -> dict[str, Path]:
    """The file of each weight."""
    places = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places.update(dict.fromkeys(file.keys(), path))
    return places


def _tied_head(base: Path) -> str | None:
    """The output layer where it is the embedding again: checkpoints may have a copy, which would be stale."""
    config: Mapping[str, Any] = json.loads((base / "config.json").read_text())
    text = config.get("text_config", {})
    return "lm_head.weight" if config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)) else None


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """One file, or several and their index, as ``save_pretrained`` names them."""
    names: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        save_file(shard, folder / f"{len(names)}.shard", metadata={"format": "pt"})
        names.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(names) == 1:
        (folder / "0.shard").replace(folder / "model.safetensors")
        return
    weight_map = {}
    for number, held in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"{number}.shard").replace(folder / file)
        weight_map.update(dict.fromkeys(held, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        held += tensor.nbytes
    if shard:
        yield shard
