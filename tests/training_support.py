"""A server whose engine is the training loop (``--engine trainer``), for tests of it and of ``turnstile.gym``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from bounded import bounded_settings
from control_support import KEY, in_thread
from turnstile_server.process import running

SLOW_S = 60
GO = [{"role": "user", "content": "go"}]


@dataclass(frozen=True)
class TrainerServer:
    """Its doors, its key, and the model's tokenizer to write completions with."""

    url: str
    key: str
    model: Path

    def encode(self, text: str) -> list[int]:
        """As the policy would have sampled it: the text of a control token is that token."""
        return list(_tokenizer(self.model).encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Any) -> str:
        return str(_tokenizer(self.model).decode([int(index) for index in ids], skip_special_tokens=False))

    def http(self) -> httpx.AsyncClient:
        """The control door."""
        headers = {"authorization": f"Bearer {self.key}", "accept": "application/json"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=SLOW_S)


@cache
def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@contextmanager
def trainer_server(model: Path, data_dir: Path, **settings: Any) -> Iterator[TrainerServer]:
    """A whole server in a thread; ``settings`` are nested like the settings file."""
    wanted = bounded_settings(
        **{
            "model": model,
            "data_dir": data_dir,
            "journal": {"durability": "process"},
            "sandboxes": {"kind": "none"},
            "control": {"port": 0, "key": KEY},
            "gate": {"port": 0},
            **settings,
            "engine": {"kind": "trainer", **settings.get("engine", {})},
        }
    )

    @asynccontextmanager
    async def serving() -> AsyncIterator[TrainerServer]:
        async with running(wanted) as server:
            yield TrainerServer(server.control_url, KEY, model)

    with in_thread(serving) as server:
        yield server
