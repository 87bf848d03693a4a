"""TRL's weight transfer: the trainer's weights, as model folders that the servers' engines load.

Implements ``WeightTransferProtocol`` of ``trl.experimental.async_grpo`` (TRL 1.16.0), which calls, for each
version: pause, send_weights, resume. What must hold:

- The n-th weights sent are TRL's ``model_version`` n. It counts from 1 in every run, also in one that is resumed.
- A folder has its name only when it is complete. It has every weight that the model's own folder has: those that
  the trainer does not send (frozen ones) are taken from there. One shard at a time is in memory.
- Folders of older weights are removed, ``keep`` of them excepted.

The folder is written while the engines go on generating; they are paused only while they load it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from turnstile import errors
from turnstile.exporters.trl.servers import TurnstileServers
from turnstile.sync import Client

_log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 2**30
"""The largest weight file, and what is held in memory at a time: as Hugging Face's checkpoints."""

_BESIDE = {".json", ".jinja", ".txt", ".model", ".py", ".tiktoken"}
"""Files beside the weights: configuration, tokenizer, templates, a model's own code."""
_INDEX = "model.safetensors.index.json"


class WrongWeights(ValueError):
    """The trainer's weights do not fit the model's own folder."""


class TurnstileWeightTransfer:
    """Sends the trainer's weights to all of ``servers``.

    ``model``: the folder that the trainer's model was loaded from (safetensors; a name on the Hub: its local
    snapshot); its tokenizer and configuration go with the weights. ``folder``: where folders of weights are made;
    the engines must see it. ``engine_folder``: its path as they see it, where that differs. ``keep``: folders
    kept, the newest included; at least 1, because an engine may load it again.
    """

    def __init__(
        self,
        servers: TurnstileServers,
        *,
        model: str | os.PathLike[str],
        folder: str | os.PathLike[str],
        engine_folder: str | os.PathLike[str] | None = None,
        keep: int = 2,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if keep < 1:
            raise errors.InvalidRequest(f"keep must be at least 1, not {keep}")
        self._servers = servers
        self._model = Path(model)
        self._folder = Path(folder).absolute()
        self._engine_folder = PurePosixPath(engine_folder or self._folder)
        self._keep = keep
        self._shard_bytes = shard_bytes
        self._client: Client | None = None
        self._version = 0
        self._kept: list[Path] = []
        self._paused = False

    @property
    def version(self) -> int:
        """TRL's number of the weights sent last; 0 before the first."""
        return self._version

    def init_weight_transfer(self) -> None:
        """Raises WrongWeights for a model that is no folder with safetensors, and the client's errors."""
        check_base(self._model)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._client = self._servers.client()
        self._client.engine()

    def pause(self) -> None:
        """The engines are paused in ``send_weights``, when the folder is there to be loaded."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes the tensors, pauses the engines (``retract``: running calls are queued again), loads the folder.

        Raises WrongWeights, OSError, and the client's errors; some servers may then have the weights.
        """
        client = self._connected()
        version = self._version + 1
        name = self._servers.weight_name(version)
        folder = self._folder / name
        write_model_folder(folder, self._model, iterator, shard_bytes=self._shard_bytes)
        self._kept.append(folder)
        self._paused = True
        client.pause("retract")
        client.update_weights(str(self._engine_folder / name), name)
        self._version = version
        for old in self._kept[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        del self._kept[: -self._keep]

    def resume(self) -> None:
        if self._paused:
            self._connected().resume()
            self._paused = False

    def destroy(self) -> None:
        """Resumes engines that are paused and closes the connections. The newest folders stay."""
        if self._client is None:
            return
        client, self._client = self._client, None
        try:
            if self._paused:
                client.resume()
        except errors.TurnstileError as error:
            _log.warning("an engine may be left paused: %s", error)
        finally:
            client.close()

    def _connected(self) -> Client:
        if self._client is None:
            raise errors.InvalidRequest("init_weight_transfer was not called, or destroy was")
        return self._client


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
    """``tensors``, then the weights that only ``base`` has."""
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
