"""TRL's weight transfer: the trainer's weights, as folders that the servers' engines load.

Implements ``WeightTransferProtocol`` of ``trl.experimental.async_grpo`` (TRL 1.16.0), which calls, for each
version: pause, send_weights, resume. Holds: the n-th weights sent are TRL's ``model_version`` n (it counts from 1
in every run, also in one that is resumed). Folders of older weights are removed, ``keep`` of them excepted.

The folder is written while the engines go on generating; they are paused only while they load it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import torch

from turnstile import errors
from turnstile.exporters.trl.folder import check_base, write_model_folder
from turnstile.exporters.trl.servers import TurnstileServers
from turnstile.sync import Client

_log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 2**30
"""The largest weight file, and what is held in memory at a time: as Hugging Face's checkpoints."""


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
        """Raises WrongWeights for a model that is no folder with safetensors, and what the client raises where a
        server or its engine does not answer."""
        check_base(self._model)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._client = self._servers.client()
        self._client.engine()

    def pause(self) -> None:
        """The engines are paused in ``send_weights``, when the folder is there to be loaded."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes the tensors, pauses the engines (running calls are queued again: ``retract``), has them load the
        folder. Raises WrongWeights, OSError, and what the client raises: some servers may then have the weights.
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
        """Closes the connections; leaves the newest folders, and no engine paused where that can be helped."""
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
