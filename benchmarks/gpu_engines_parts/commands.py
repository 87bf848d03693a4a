"""The commands of the GPU benchmark, and nothing that runs them. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONCURRENT: Final = (64, 256)
CONTEXT: Final = 4096
ENGINES: Final = ("sglang", "vllm")


@dataclass(frozen=True, slots=True)
class Ports:
    engine: int
    control: int
    agent: int
    group: int
    """Of the process group of a weight update by NCCL."""


def make_model(out: Path, seed: int) -> list[str]:
    """A model of 0.6 billion random parameters, made on the spot: no hub."""
    return [sys.executable, "-m", "gpu_engines_parts.model", str(out), "--seed", str(seed)]


def engine(kind: str, python: str, model: Path, port: int) -> list[str]:
    """The engine's own command, with CUDA."""
    if kind == "sglang":
        command = [python, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
        return [
            *(*command, "--port", str(port), "--context-length", str(CONTEXT), "--enable-metrics"),
            *("--mem-fraction-static", "0.6"),  # the trainer's side of an update shares the card
        ]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    return [
        *(*command, "--port", str(port), "--max-model-len", str(CONTEXT), "--gpu-memory-utilization", "0.6"),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        "--enable-prompt-tokens-details",
    ]


def engine_environment(kind: str) -> dict[str, str]:
    """What the engine needs beside the caller's environment."""
    return {"HF_HUB_OFFLINE": "1", **({"VLLM_SERVER_DEV_MODE": "1"} if kind == "vllm" else {})}


def server(kind: str, model: Path, data_dir: Path, ports: Ports) -> list[str]:
    """Turnstile before the engine."""
    return [
        *(str(Path(sys.executable).with_name("turnstile")), "serve"),
        *("--engine", kind, "--engine-url", f"http://127.0.0.1:{ports.engine}", "--model", str(model)),
        *("--data-dir", str(data_dir), "--control-port", str(ports.control), "--agent-port", str(ports.agent)),
        *("--log-level", "warning"),
    ]


def load(kind: str, through: str, concurrent: int, ports: Ports, tokens: int) -> list[str]:
    """Tokens per second with so many calls in flight; ``through``: ``engine`` or ``gate``."""
    return [
        *(sys.executable, "-m", "gpu_engines_parts.load", kind, through),
        *("--concurrent", str(concurrent), "--tokens", str(tokens)),
        *("--engine-port", str(ports.engine), "--control-port", str(ports.control)),
    ]


def update(kind: str, way: str, models: tuple[Path, Path], ports: Ports) -> list[str]:
    """How long an update takes; ``way``: ``disk``, ``tensors`` or ``nccl``."""
    return [
        *(sys.executable, "-m", "gpu_engines_parts.update", kind, way, str(models[0]), str(models[1])),
        *("--engine-port", str(ports.engine), "--control-port", str(ports.control)),
        *("--group-port", str(ports.group)),
    ]
