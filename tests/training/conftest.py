from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from training_support import TrainerServer, trainer_server


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerServer]:
    with trainer_server(tiny_model, tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
async def http(server: TrainerServer) -> AsyncIterator[httpx.AsyncClient]:
    async with server.http() as client:
        yield client
