"""Pieces of new weights, from the client's call to what the engines are given."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import torch
from fastapi import FastAPI

from control_support import running_app
from turnstile import Client, weights
from turnstile.models import PauseMode
from turnstile_server.control.engine_routes import build_engine_router
from turnstile_server.control.errors import install_error_handlers
from turnstile_server.engines.admin import EngineAdmin
from turnstile_server.engines.protocol import EngineCapabilities, EngineState
from turnstile_server.engines.weights import BroadcastBucket, TensorBucket, UpdateWay, WeightBucket

NAMED = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class Engines(EngineAdmin):
    """Keeps the pieces that it is given."""

    def __init__(self) -> None:
        self.pieces: list[WeightBucket] = []

    async def state(self) -> EngineState:
        return EngineState(True, "v1", False)

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def load_weights(self, path: str, version: str, mode: PauseMode) -> None: ...
    async def begin_weights(self, way: UpdateWay, version: str, mode: PauseMode) -> None: ...
    async def end_weights(self) -> None: ...

    async def load_piece(self, bucket: WeightBucket) -> None:
        self.pieces.append(bucket)


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def url(engines: Engines) -> Iterator[str]:
    app = FastAPI()
    app.include_router(build_engine_router(engines, EngineCapabilities(4096, 4160, "tiny")))
    install_error_handlers(app, app.routes)
    with running_app(app) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def test_pieces_that_are_sent_reach_the_engines(client: Client, engines: Engines) -> None:
    client.update_weights_from_tensors(NAMED.items(), "v2")
    [piece] = engines.pieces
    assert isinstance(piece, TensorBucket)
    assert piece.load_format == weights.FLATTENED
    assert len(piece.serialized) == 1


def test_pieces_that_are_broadcast_reach_the_engines(
    client: Client, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "broadcast", lambda *_: None)
    client.broadcast_weights(NAMED.items(), "v2", group="g", process_group="ours")
    assert engines.pieces == [BroadcastBucket(("a", "b"), ("float32", "bfloat16"), ((2, 3), (4,)), "g")]


def test_a_trainer_that_cannot_broadcast_gets_its_own_error(
    client: Client, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the connection to rank 1 broke")

    monkeypatch.setattr(weights, "broadcast", broken)
    with pytest.raises(RuntimeError, match="rank 1 broke"):
        client.broadcast_weights(NAMED.items(), "v2", group="g", process_group="ours")


@pytest.mark.parametrize("piece", [{}, {"serialized": ["x"], "names": ["a"]}, {"serialized": [], "names": []}])
def test_a_piece_of_no_way_or_of_two_is_refused(url: str, engines: Engines, piece: dict[str, object]) -> None:
    answer = httpx.post(f"{url}/engine/weights/bucket", json=piece)
    assert answer.status_code == 422, answer.text
    assert "has one of" in answer.text
    assert engines.pieces == []
