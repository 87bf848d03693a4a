"""The server of a real engine as a process of the tests: started on a port of its own, waited for, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
POLL_S = 0.25
LOG_CHARS = 4000
ENGINE_NICENESS = 10


@dataclass(frozen=True)
class EngineServer:
    """A running server; ``pid`` leads its process group."""

    url: str
    pid: int

    def kill(self) -> None:
        """At once, with all its processes."""
        os.killpg(self.pid, signal.SIGKILL)


@contextmanager
def engine_server(
    name: str,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    *,
    start_s: float,
    stop_s: float,
) -> Iterator[EngineServer]:
    """Yields the server that ``command``, which gets its port, runs. Raises RuntimeError with the end of its log
    where it does not answer ``/health`` within ``start_s``. Leaving the block sends SIGTERM, and after ``stop_s``
    SIGKILL to its whole process group; for 0 that at once."""
    with held_port() as port, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command(port),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            url = f"http://{HOST}:{port}"
            _wait(process, url, start_s)
            _yield_to_tests(process.pid)
            yield EngineServer(url, process.pid)
        except _NotUp as error:
            log.seek(0)
            tail = log.read().decode("utf-8", "replace")[-LOG_CHARS:]
            raise RuntimeError(f"{name} did not start: {error}\n{tail}") from error
        finally:
            _stop(process, stop_s)


@contextmanager
def held_port() -> Iterator[int]:
    """A port that a server of the test can bind, and that nothing else gets meanwhile: a real engine loads for
    half a minute before it binds its port, and until then a connection or a listener of another program may take
    it. Both sockets need SO_REUSEADDR for that (Linux), which servers set."""
    with socket.socket() as held:
        held.bind((HOST, 0))  # without the flag, so that no port of another holder is given
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port: int = held.getsockname()[1]
        yield port


def _yield_to_tests(pid: int) -> None:
    """Linux gives each session a share of the processors (autogroup), and beside a busy vLLM in a session of its
    own a test's process got no turn for 8.5 s (kernel 6.18, two processors): the call that it was to pause or
    abort had ended by then. Measured as the longest wait for a turn: with 4 here 0.6 s, and 2 s where other
    sessions are busy too; with 10 it is 0.02 s in both cases. An engine that still loads keeps its whole share."""
    with suppress(OSError):  # where the kernel has no autogroups
        Path(f"/proc/{pid}/autogroup").write_text(str(ENGINE_NICENESS))


class _NotUp(Exception):
    pass


def _wait(process: subprocess.Popen[bytes], url: str, start_s: float) -> None:
    end = time.monotonic() + start_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise _NotUp(f"it ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        time.sleep(POLL_S)
    raise _NotUp(f"not ready within {start_s:g} s")


def _stop(process: subprocess.Popen[bytes], stop_s: float) -> None:
    if process.poll() is None and stop_s > 0:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(stop_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
