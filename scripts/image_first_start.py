"""Starts the server once while its image is built: the image is whole, and has the bytecode of what it imports.

In a container the root is read-only and belongs to another user, so Python could keep no bytecode there, and every
start would compile every module again. Here it runs as root and writes: the standard library of the base, every
package that a start imports, all modules of ours. What is imported by nobody is left without (transformers and
torch would take 150 MB). A base that lacks a library (libstdc++6, say) fails here, not in the container.
"""

from __future__ import annotations

import compileall
import importlib
import importlib.util
import json
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import requires
from pathlib import Path

import turnstile
import turnstile_server

READY_S = 300
STOP_S = 60
# Files that are copied into sandboxes, as they are.
COPIED = re.compile(r"/(tasks/shipped|agents/specs)/")
# Needed by parts of ours that the image has no packages for: a module that lacks another one is a fault.
ELSEWHERE = {"torch", "gymnasium", "trl", "openenv", "datasets", "pyarrow", "tensorboardX", "wandb"}
ELSEWHERE |= {"opentelemetry", "openai", "anthropic", "ray", "verifiers", "verl", "areal", "agentlightning"}


def check_torch() -> bool:
    """Whether torch is in the image. Ends the build where it is a CUDA build, which lacks its libraries here."""
    if importlib.util.find_spec("torch") is None:
        return False
    cuda = [need for need in requires("torch") or () if need.startswith(("nvidia-", "cuda-"))]
    if cuda:
        sys.exit(
            f"this torch is a CUDA build: it needs {cuda[0].split()[0]} and more, and the embedded engine runs on "
            "CPU. Name an index that has CPU builds: --build-arg TORCH_INDEX=URL, such as PyTorch's own for CPU"
        )
    return True


def start(*flags: str) -> None:
    """Starts the server, asks for what an OpenEnv client asks first, and stops it."""
    with tempfile.TemporaryDirectory() as data_dir:
        command = [
            "serve",
            "--data-dir",
            data_dir,
            "--sandbox",
            "none",
            "--control-port",
            "0",
            "--agent-port",
            "0",
        ]
        server = subprocess.Popen(
            [sys.executable, "-m", "turnstile", *command, *flags], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line:
                sys.exit(f"turnstile serve {' '.join(flags)} did not start: exit code {server.wait()}")
            key = Path(data_dir, "control.key").read_text().strip()
            urllib.request.urlopen(f"{json.loads(line)['control_url']}/k/{key}/schema", timeout=READY_S).read()
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(STOP_S)
        if code != 0:
            sys.exit(f"turnstile serve {' '.join(flags)} ended with {code}")


def import_all() -> None:
    """Imports every module of ours, with what it needs."""
    for package in (turnstile, turnstile_server):
        for path in package.__path__:
            compileall.compile_dir(path, quiet=1, rx=COPIED)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith(".__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").split(".")[0] not in ELSEWHERE:
                    raise


if __name__ == "__main__":
    has_torch = check_torch()
    import_all()
    start("--engine", "trainer", "--model", "tiny")
    if has_torch:
        start("--engine", "embedded", "--model", "tiny")
