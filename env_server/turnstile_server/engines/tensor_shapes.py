"""The tensors of a model folder, by name and shape, read from the heads of its safetensors files. Pure but for
disk.

An engine that is given other tensors than its model has may load half of them without an error, or die (SGLang
0.5.23 does both). So they are compared first, where the model's folder can be read from here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from turnstile_server.errors import EngineRefused

TensorShapes = Mapping[str, tuple[int, ...]]

LONGEST_HEAD: Final = 100 << 20
"""Bytes of the longest head that is read; the format's own limit."""
NAMED: Final = 3
"""Most tensors that an error names."""


def folder_shapes(folder: Path) -> TensorShapes | None:
    """None where the folder has no safetensors files, or is not on this machine.

    Raises EngineRefused for a file that is cut short or is no safetensors file.
    """
    try:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return None
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            shapes.update(_shapes_in(file))
    except OSError as error:
        raise EngineRefused(f"{error.filename or folder} cannot be read: {error.strerror}.") from error
    missing = set(_indexed(folder)) - shapes.keys()
    if missing:
        raise EngineRefused(f"{folder} lacks tensors that its index names: {_some(missing)}.")
    return shapes


def check_tensors(given: Iterable[tuple[str, tuple[int, ...]]], model: TensorShapes) -> None:
    """Raises EngineRefused for a tensor that the model does not have, or has in another shape."""
    unknown, wrong = [], []
    for name, shape in given:
        if name not in model:
            unknown.append(name)
        elif shape != model[name]:
            wrong.append(f"{name} is {list(shape)}, the model's is {list(model[name])}")
    if wrong:
        raise EngineRefused(f"The new weights do not fit the model: {_some(wrong)}. The old weights are kept.")
    if unknown:
        raise EngineRefused(
            f"The model has no tensors of these names: {_some(unknown)}. The old weights are kept. Names are "
            "those of the model's folder (engine.check_weights = false skips this check)."
        )


def check_folder(folder: Path, model: TensorShapes) -> None:
    """Raises EngineRefused for a folder here that is not a whole set of the model's weights."""
    given = folder_shapes(folder)
    if given is None:
        return
    check_tensors(((name, shape) for name, shape in given.items() if not _optional(name)), model)
    missing = [name for name in model if name not in given and not _optional(name)]
    if missing:
        raise EngineRefused(
            f"{folder} has only a part of the model's weights; it lacks {_some(missing)}. Loading it would mix "
            "old and new weights. The old weights are kept."
        )


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LONGEST_HEAD + 1
        head = opened.read(length) if length <= LONGEST_HEAD else b""
    try:
        tensors = json.loads(head)
        found = {name: entry for name, entry in tensors.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in found.values()), default=0)
        shapes = {name: tuple(int(side) for side in entry["shape"]) for name, entry in found.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise EngineRefused(
            f"{file} is no safetensors file, or is cut short. The old weights are kept."
        ) from error
    if size != 8 + length + end:
        raise EngineRefused(
            f"{file} has {size} bytes, and its head says {8 + length + end}: it is not written to its end. The "
            "old weights are kept."
        )
    return shapes


def _indexed(folder: Path) -> Mapping[str, Any]:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    named = index.get("weight_map") if isinstance(index, dict) else None
    return named if isinstance(named, dict) else {}


def _optional(name: str) -> bool:
    """Tensors that a folder may have or lack: a head that is tied to the embedding, and constants."""
    return name.endswith((".inv_freq", "lm_head.weight"))


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more
