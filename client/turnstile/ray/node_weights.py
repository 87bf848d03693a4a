"""A folder of weights, from the driver's disk to the disks of nodes, through Ray's object store.

The driver puts each piece into the store once; Ray brings it to every node once, and a task there writes it. A
folder appears whole or not at all, under a new name each time: no engine can load old weights that bear the same
version. Nodes that share a disk write the same bytes to the same place.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from turnstile import errors

PIECE_BYTES = 256 << 20
"""Two of them are in the store at once."""
PARTIAL = ".partial"


def copy_to_nodes(folder: Path, into: str, version: str, nodes: Mapping[str, str]) -> str:
    """Copies ``folder`` to ``into``/VERSION-RANDOM on each node, and returns that path. ``nodes``: addresses by
    Ray's names of the nodes. Blocks. Raises SetupFault where the folder cannot be read here, or written there."""
    target = f"{into}/{version}-{secrets.token_hex(4)}"
    try:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            raise errors.SetupFault(f"there are no weights in {folder}")
        writing: list[Any] = []
        for path in files:
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            for offset in range(0, max(size, 1), PIECE_BYTES):
                count = min(PIECE_BYTES, size - offset)
                piece = ray.put(np.fromfile(path, np.uint8, count, offset=offset))
                ray.get(writing)
                writing = on_nodes(nodes, _write, f"{target}{PARTIAL}", name, offset, piece)
        ray.get(writing)
        ray.get(on_nodes(nodes, _finish, target))
    except (OSError, ray.exceptions.RayError) as error:  # it cannot be read or written, or a node was lost
        on_nodes(nodes, _remove, f"{target}{PARTIAL}")
        raise errors.SetupFault(f"the weights in {folder} cannot be copied to {target}: {error}") from error
    return target


def keep_only(target: str, nodes: Mapping[str, str]) -> None:
    """Removes the other folders beside ``target`` on each node that is there."""
    ray.wait(on_nodes(nodes, _remove_others, target), num_returns=len(nodes))


def on_nodes(nodes: Mapping[str, str], function: Callable[..., None], *arguments: Any) -> list[Any]:
    """Begins the function once on each node; the answers. No task waits for a core."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    return [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node in nodes
    ]


def _write(partial: str, name: str, offset: int, piece: npt.NDArray[np.uint8]) -> None:
    path = Path(partial, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    with open(descriptor, "wb") as file:
        file.seek(offset)
        file.write(piece.data)


def _finish(target: str) -> None:
    try:
        os.rename(f"{target}{PARTIAL}", target)
    except FileNotFoundError:
        if not Path(target).is_dir():  # by another node on the same disk
            raise


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _remove_others(target: str) -> None:
    for other in Path(target).parent.iterdir():
        if other != Path(target):
            shutil.rmtree(other, ignore_errors=True)
