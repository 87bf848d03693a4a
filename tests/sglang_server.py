"""A real SGLang server without a GPU, for tests: started as documented in `tests/sglang_cpu`, and stopped.

`TURNSTILE_SGLANG_PYTHON` is the Python of a virtual environment made by `scripts/install_sglang_cpu.sh`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from engine_server import HOST, EngineServer, engine_server

VARIABLE = "TURNSTILE_SGLANG_PYTHON"
SHIM = Path(__file__).resolve().parent / "sglang_cpu"
CONTEXT_LENGTH = 4096
START_S = 150.0
STOP_S = 0.0
"""After SIGTERM it takes 10 s to end, and leaves no less behind than one that is killed."""

FLAGS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--disable-overlap-schedule", "--max-total-tokens", "65536", "--max-running-requests", "16"),
    *("--random-seed", "42", "--skip-server-warmup"),
    "--sleep-on-idle",  # else the idle scheduler spins
    *("--context-length", str(CONTEXT_LENGTH)),
)


@contextmanager
def sglang_server(model: Path, extra: Sequence[str] = ()) -> Iterator[str]:
    """Yields the base URL of a server for ``model`` with ``extra`` flags."""
    with sglang_process(model, extra) as server:
        yield server.url


@contextmanager
def sglang_processes(model: Path, count: int, extra: Sequence[str] = ()) -> Iterator[list[EngineServer]]:
    """Several servers, started at once."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(count) as pool:
            starting = [pool.submit(stack.enter_context, sglang_process(model, extra)) for _ in range(count)]
        yield [start.result() for start in starting]


@contextmanager
def sglang_process(model: Path, extra: Sequence[str] = ()) -> Iterator[EngineServer]:
    """Yields a server for ``model`` with ``extra`` flags."""
    python = os.environ.get(VARIABLE)
    if python is None:
        raise RuntimeError(
            f"{VARIABLE} is not set: run scripts/install_sglang_cpu.sh DIR, set it to DIR/bin/python"
        )
    environment = os.environ | {
        "PYTHONPATH": str(SHIM),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }

    def command(port: int) -> list[str]:
        server = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
        return [*server, "--host", HOST, "--port", str(port), *FLAGS, *extra]

    with engine_server("SGLang", command, environment, start_s=START_S, stop_s=STOP_S) as server:
        yield server
