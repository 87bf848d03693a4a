"""A real vLLM server without a GPU, for tests, and one that runs already.

`TURNSTILE_VLLM_PYTHON` is the Python of a virtual environment made by `scripts/install_vllm_cpu.sh`. A server
takes a minute to start; while tests are written, `TURNSTILE_VLLM_URL` names one that was started for the same
model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine_server import HOST, engine_server
from local import tiny_model
from turnstile_server.engines.vllm.workers import EXTENSION, EXTENSION_FOLDER

VARIABLE = "TURNSTILE_VLLM_PYTHON"
RUNNING = "TURNSTILE_VLLM_URL"
CONTEXT_LENGTH = 4096
START_S = 480.0
"""It takes 50 s on an idle machine, and five minutes on one that is kept busy."""
STOP_S = 20.0
TIMEOUT_S = START_S + 120.0
"""Of a test that may be the first, and starts the server."""

FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--seed", "42"),
    *("--max-model-len", str(CONTEXT_LENGTH), "--max-num-seqs", "16"),
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
    *("--enable-prompt-tokens-details", "--worker-extension-cls", EXTENSION),
    "--disable-uvicorn-access-log",
)

ENVIRONMENT = {
    "PYTHONPATH": str(EXTENSION_FOLDER),
    "VLLM_SERVER_DEV_MODE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first call with logprobs compiles C++
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is half the machine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONWARNINGS": "ignore",
}


def vllm_model(seed: int = 1) -> Path:
    """A tiny model that vLLM's attention on a CPU can compute, with a tied output layer: the one that a careless
    update leaves old."""
    return tiny_model(seed, "--head-dim=32", "--tied")


@contextmanager
def vllm_server(
    model: Path, extra: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yields the base URL of a server for ``model`` with ``extra`` flags; of the one that runs already, if it has
    none. ``environment``: variables to change; an empty one is removed."""
    running = os.environ.get(RUNNING)
    if running is not None and not extra and not environment:
        yield running
        return
    python = os.environ.get(VARIABLE)
    if python is None:
        raise RuntimeError(f"{VARIABLE} is not set: run scripts/install_vllm_cpu.sh DIR, set it to DIR/bin/python")
    variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
    variables = {name: value for name, value in variables.items() if value}

    def command(port: int) -> list[str]:
        # Not the command `vllm`: it looks for a distribution of that name, and this one is called vllm-cpu.
        # It takes all of a machine for 400 tokens a second; a test that is to change a call in flight must get a
        # turn.
        server = ["nice", "-n", "10", python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        return [*server, "--served-model-name", "policy", "--host", HOST, "--port", str(port), *FLAGS, *extra]

    with engine_server("vLLM", command, variables, start_s=START_S, stop_s=STOP_S) as server:
        yield server.url
