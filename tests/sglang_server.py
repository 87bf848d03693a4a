"""A real SGLang server without a GPU, for tests: started as documented in `tests/sglang_cpu`, and stopped.

`TURNSTILE_SGLANG_PYTHON` is the Python of a virtual environment made by `scripts/install_sglang_cpu.sh`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "TURNSTILE_SGLANG_PYTHON"
SHIM = Path(__file__).resolve().parent / "sglang_cpu"
CONTEXT_LENGTH = 4096
START_S = 150.0
STOP_S = 10.0

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
    python = os.environ.get(VARIABLE)
    if python is None:
        raise RuntimeError(
            f"{VARIABLE} is not set: run scripts/install_sglang_cpu.sh DIR, set it to DIR/bin/python"
        )
    port = _free_port()
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, *extra]
    environment = os.environ | {
        "PYTHONPATH": str(SHIM),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url)
            yield url
        except _NotUp as error:
            log.seek(0)
            tail = log.read().decode("utf-8", "replace")[-4000:]
            raise RuntimeError(f"SGLang did not start: {error}\n{tail}") from error
        finally:
            _stop(process)


class _NotUp(Exception):
    pass


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise _NotUp(f"it ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.25)
    raise _NotUp(f"not ready within {START_S:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, a grace, then SIGKILL to its whole process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
