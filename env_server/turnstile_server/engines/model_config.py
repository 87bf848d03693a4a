"""The content of a model folder's ``config.json``, where the folder can be read here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson


def read_vocab_size(folder: Path) -> int | None:
    """``vocab_size`` of a Hugging Face ``config.json`` (or of its ``text_config``), None when unreadable."""
    config = read_config(folder)
    size = None if config is None else config.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """``config.json``, with what its ``text_config`` adds; None when unreadable."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else config
