from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gate_support import Stage, requests_begun
from joined_stage import stage_as_asked
from transformers.convert_slow_tokenizer import bytes_to_unicode

from turnstile_server.http.connections import Seat
from turnstile_server.rendering.vocabulary import load_vocabulary


@pytest.fixture
async def stage(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage_as_asked(tiny_model, tmp_path) as running:
        yield running


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Seat]:
    """The places of the requests that servers of this process have begun to serve."""
    return requests_begun(monkeypatch)


@pytest.fixture(scope="session")
def token_bytes(tiny_model: Path) -> dict[int, bytes]:
    """The bytes of every ordinary token of the tiny tokenizer."""
    vocabulary = load_vocabulary(tiny_model)
    control = {token.id for token in vocabulary.control}
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    return {
        index: bytes(byte_of[char] for char in text)
        for text, index in vocabulary.tokenizer.get_vocab().items()
        if index not in control
    }
