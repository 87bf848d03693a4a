from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from training_support import TrainerServer, trainer_server


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerServer]:
    with trainer_server(tiny_model, tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="session")
def playing_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerServer]:
    """With sandboxes, in which agents are launched, and a few sums to do."""
    tasks = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    sums = [{"id": f"sum-{n}", "instruction": f"{n} + 3?", "answer": {"value": str(n + 3)}} for n in (1, 2, 4)]
    tasks.write_text("".join(json.dumps(task) + "\n" for task in sums))
    settings = {"sandboxes": {"kind": "local"}, "tasks": {"sources": [tasks]}}
    with trainer_server(tiny_model, tmp_path_factory.mktemp("data"), **settings) as running:
        yield running


@pytest.fixture
async def http(server: TrainerServer) -> AsyncIterator[httpx.AsyncClient]:
    async with server.http() as client:
        yield client
