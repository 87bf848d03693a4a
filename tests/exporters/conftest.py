"""A server with an engine of its own: these tests give its weights other names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from control_support import Door, EngineProcess, engine_process, running_door
from turnstile import Client
from turnstile.exporters.trl.servers import TurnstileServers


@pytest.fixture(scope="session")
def own_engine(tiny_model: Path, other_tiny_model: Path) -> Iterator[EngineProcess]:
    with engine_process(tiny_model, other_tiny_model) as process:
        yield process


@pytest.fixture(scope="session")
def door(own_engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with running_door(own_engine, tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def client(door: Door) -> Iterator[Client]:
    with Client(door.url, key=door.key) as made:
        yield made


@pytest.fixture
def servers(door: Door, client: Client, tiny_model: Path) -> TurnstileServers:
    """Weights number 1 of a run are loaded."""
    found = TurnstileServers(door.url, key=door.key, run="worker-test")
    client.update_weights(str(tiny_model), found.weight_name(1))
    return found
