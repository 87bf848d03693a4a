"""The commands of the proof on a GPU, and nothing that runs them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DTYPES: Final = ("bfloat16", "float32")
KIND: Final = "embedded"
THROUGH: Final = ("engine", "gate")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is played. ``concurrent``: calls in flight; each place makes ``calls`` of ``tokens`` tokens.
    ``audited``: episodes whose tokens are compared. ``learn``: flags of the learning run."""

    concurrent: tuple[int, ...]
    calls: int
    tokens: int
    audited: int
    updates: int
    learn: tuple[str, ...]


WHOLE: Final = Size(
    concurrent=(64, 256),
    calls=1,
    tokens=128,
    audited=32,
    updates=3,
    learn=(
        *("--steps", "20", "--groups", "6", "--max-concurrent", "32"),
        *("--final-episodes", "300", "--monitor-episodes", "50"),
    ),
)
SMALL: Final = Size(
    concurrent=(2, 4),
    calls=1,
    tokens=8,
    audited=2,
    updates=1,
    learn=("--steps", "1", "--groups", "1", "--final-episodes", "16", "--monitor-episodes", "16"),
)
"""Of a try on a CPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens: its control port, its agents' port, and the socket of its engine."""

    control: int
    agent: int
    socket: str


def environment(device: str, dtype: str, batch: int) -> dict[str, str]:
    """The settings of the embedded engine, for every server that the proof starts."""
    return {
        "TURNSTILE_ENGINE__DEVICE": device,
        "TURNSTILE_ENGINE__DTYPE": dtype,
        "TURNSTILE_ENGINE__MAX_BATCH": str(batch),
    }


def other_weights(model: Path, out: Path) -> list[str]:
    """Weights for the updates that differ from the model's."""
    return [sys.executable, "-m", "gpu_proof_parts.other_weights", str(model), str(out)]


def server(model: Path, data: Path, device: str, dtype: str, place: Place) -> list[str]:
    """The server, with its own engine on the device."""
    return [
        *(sys.executable, "-P", "-m", "turnstile", "serve", "--model", str(model), "--engine", KIND),
        *("--device", device, "--dtype", dtype, "--data-dir", str(data), "--log-level", "warning"),
        *("--control-port", str(place.control), "--agent-port", str(place.agent), "--sandbox", "none"),
    ]


def load(through: str, concurrent: int, size: Size, place: Place) -> list[str]:
    """Tokens per second with so many calls in flight; ``through``: ``engine`` or ``gate``."""
    return [
        *(sys.executable, "-m", "gpu_engines_parts.load", KIND, through, "--concurrent", str(concurrent)),
        *("--calls", str(size.calls), "--tokens", str(size.tokens)),
        *("--engine-socket", place.socket, "--control-port", str(place.control)),
    ]


def distances(model: Path, device: str, size: Size, place: Place, *, seed: int) -> list[str]:
    """Plays episodes, audits them, and computes their tokens again in float32 with the weights in ``model``."""
    return [
        *(sys.executable, "-m", "gpu_proof_parts.distances", str(model), "--device", device),
        *("--episodes", str(size.audited), "--tokens", str(size.tokens), "--control-port", str(place.control)),
        *("--seed", str(seed)),
    ]


def update(models: tuple[Path, Path], device: str, dtype: str, size: Size, place: Place) -> list[str]:
    """How long an update by tensors of ``dtype`` takes; the last one leaves the weights of the second model."""
    return [
        *(sys.executable, "-m", "gpu_engines_parts.update", KIND, "tensors", str(models[0]), str(models[1])),
        *("--control-port", str(place.control), "--updates", str(size.updates)),
        *("--device", device, "--dtype", dtype),
    ]


def learn(out: Path, size: Size) -> list[str]:
    """The learning run of docs/grpo.md, on the tiny policy; its server has the settings of ``environment``."""
    return [sys.executable, "-m", "grpo.grpo", str(out), "--sandbox", "local", *size.learn]


def measuring(
    models: tuple[Path, Path], device: str, dtype: str, size: Size, place: Place
) -> Iterator[tuple[str, list[str]]]:
    """The name of a part, and its command: what is measured of one server, in order."""
    yield "distances", distances(models[0], device, size, place, seed=1)
    for tensors in DTYPES if dtype == "bfloat16" else ("float32",):
        yield "update", update(models, device, tensors, size, place)
    # The same again with the weights that came as tensors: these sampled, and not those of before.
    yield "distances", distances(models[1], device, size, place, seed=2)
    for concurrent in size.concurrent:
        for through in THROUGH:
            yield "load", load(through, concurrent, size, place)
