"""Measures how soon a started server answers, beside a plain OpenEnv environment started in the same run.

    python benchmarks/start.py [--rounds N] [--server-image TAG] [--embedded-image TAG] [--write-docs]

Seconds from the start of the process until `GET /health` is 200, and until the server is ready (`GET /ready`). The
peer is what `openenv init` makes, served by uvicorn with the same packages; it has no `/ready`, and is ready with
`/health`. All are started one after the other, N times, and the medians are compared. Images are started as
docs/openenv.md says: read-only, without rights, on two cores. Then the sizes of the images are printed too.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gate_parts.report import write_docs

DOCS = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
START_MARK, END_MARK = "<!-- benchmarks/start.py writes from here -->", "<!-- to here, start -->"
BIN = Path(sys.executable).parent
LIMIT_S = 120.0
STOP_S = 30.0
ENVIRONMENT = "bench_env"
HARDENED = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--cpus", "2"),
    *("--tmpfs", "/tmp", "--tmpfs", "/data:uid=10001,mode=700,exec"),
)
ENGINES = {
    "no model": {"TURNSTILE_ENGINE__KIND": "none"},
    "engine elsewhere": {"TURNSTILE_ENGINE__KIND": "trainer", "TURNSTILE_MODEL": "tiny"},
    "engine inside": {"TURNSTILE_ENGINE__KIND": "embedded", "TURNSTILE_MODEL": "tiny"},
}
"""Settings by name. The training loop as the engine needs nothing at the start, like an SGLang that is there."""


@dataclass(frozen=True)
class Subject:
    """What is started. ``start(port)`` runs it for the length of the block."""

    name: str
    start: Callable[[int], AbstractContextManager[None]]
    ready_path: str | None
    """None: it never becomes ready (no model)."""


@dataclass(frozen=True)
class Times:
    """Seconds from the start; ``ready_s`` None where it never becomes ready."""

    health_s: float
    ready_s: float | None


def measure(subject: Subject) -> Times:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
    began = time.monotonic()
    with subject.start(port):
        health_s = _wait(f"http://127.0.0.1:{port}/health", began)
        ready = subject.ready_path
        return Times(health_s, None if ready is None else _wait(f"http://127.0.0.1:{port}{ready}", began))


def _wait(url: str, began: float) -> float:
    """Seconds from ``began`` until ``url`` is 200."""
    while True:
        passed = time.monotonic() - began
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (OSError, urllib.error.HTTPError) as error:
            if passed > LIMIT_S:
                raise SystemExit(f"{url} did not answer 200 within {LIMIT_S:g} s: {error}") from error
            time.sleep(0.01)
        else:
            return time.monotonic() - began


@contextmanager
def _process(command: list[str], cwd: Path, env: dict[str, str]) -> Iterator[None]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    process = subprocess.Popen(
        command, cwd=cwd, env={**clean, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


def peer(folder: Path) -> Subject:
    """A plain environment of OpenEnv's own making."""
    made = [str(BIN / "openenv"), "init", ENVIRONMENT, "-o", str(folder)]
    subprocess.run(made, check=True, capture_output=True, timeout=LIMIT_S)

    def start(port: int) -> AbstractContextManager[None]:
        command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
        return _process(command, folder / ENVIRONMENT, {})

    return Subject("OpenEnv's own environment", start, "/health")


def process(engine: str, folder: Path) -> Subject:
    """``turnstile serve`` of this checkout."""

    def start(port: int) -> AbstractContextManager[None]:
        data = tempfile.mkdtemp(dir=folder)
        command = [str(BIN / "turnstile"), "serve", "--control-port", str(port), "--agent-port", "0"]
        return _process([*command, "--sandbox", "none", "--data-dir", data], folder, ENGINES[engine])

    return Subject(f"process, {engine}", start, None if engine == "no model" else "/ready")


def container(engine: str, image: str) -> Subject:
    """The image, hardened, on two cores; the time of ``docker run`` counts."""

    @contextmanager
    def start(port: int) -> Iterator[None]:
        settings = [word for name, value in ENGINES[engine].items() for word in ("-e", f"{name}={value}")]
        published = ["-p", f"127.0.0.1:{port}:8000", "-v", "/data"]
        command = ["docker", "run", "-d", *published, *HARDENED, *settings, image]
        name = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
        try:
            yield
        finally:
            subprocess.run(["docker", "rm", "-fv", name], check=True, capture_output=True, timeout=60)

    return Subject(f"container, {engine}", start, None if engine == "no model" else "/ready")


def size_mb(image: str) -> float:
    command = ["docker", "image", "inspect", "-f", "{{.Size}}", image]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout) / 1e6


def report(times: dict[str, list[Times]], images: dict[str, str], load: float) -> str:
    """Two tables in Markdown. The first subject is the peer. ``images``: tags by what they are."""
    peer_s = statistics.median(one.health_s for one in next(iter(times.values())))
    busy = " (other work on the machine: compare the ratios)" if load > 1.0 else ""
    lines = [
        f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}; "
        f"load average before the run {load:.1f}{busy}; {time.strftime('%Y-%m-%d')}; medians of "
        f"{len(next(iter(times.values())))}.",
        "",
        "| started | `/health` s | times the peer's | ready s |",
        "|---|---:|---:|---:|",
    ]
    for name, measured in times.items():
        health_s = statistics.median(one.health_s for one in measured)
        ready = [one.ready_s for one in measured if one.ready_s is not None]
        ready_s = f"{statistics.median(ready):.1f}" if ready else "-"
        lines.append(f"| {name} | {health_s:.1f} | {health_s / peer_s:.2f} | {ready_s} |")
    if images:
        sizes = (f"| {name} | {size_mb(image):.0f} |" for name, image in images.items())
        lines += ["", "| image | MB |", "|---|---:|", *sizes]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server-image", default="", help="of `openenv build`")
    parser.add_argument("--embedded-image", default="", help="the same with EXTRAS=server,embedded")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {DOCS.name}")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        subjects = [peer(folder), *(process(engine, folder) for engine in ENGINES)]
        if arguments.server_image:
            subjects += [container(engine, arguments.server_image) for engine in ENGINES if "inside" not in engine]
        if arguments.embedded_image:
            subjects.append(container("engine inside", arguments.embedded_image))
        times: dict[str, list[Times]] = {subject.name: [] for subject in subjects}
        for _ in range(arguments.rounds):
            for subject in subjects:
                times[subject.name].append(measure(subject))
    images = {"server": arguments.server_image, "with the engine inside": arguments.embedded_image}
    text = report(times, {name: image for name, image in images.items() if image}, load)
    print(text)
    if arguments.write_docs:
        write_docs(DOCS, text, START_MARK, END_MARK)


if __name__ == "__main__":
    main()
