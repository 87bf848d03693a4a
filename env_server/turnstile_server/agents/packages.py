"""Installs the Python and npm packages of agents, and the one Node.js that all npm agents share.

Every command runs under its caller's deadline, and its process group is gone when it returns. Files are readable
by every user of the machine, because the agent in the sandbox is another user.

Python packages come by pip, or by uv in an environment without pip. Node.js is itself an npm package, so that the
npm registry is the only place that is asked; the npm program is this machine's own. npm runs under the Node.js
that will run the agent, because it chooses package versions by it. No package's scripts are run, so a package
whose script would fetch something or move a binary is used as the registry has it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.errors import AgentNotInstalled

NODE_VERSION = "24.21.0"
MACHINE = platform.machine().lower()
"""This machine's architecture, as Linux names it: x86_64, aarch64."""
ARCH = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(MACHINE, MACHINE)
"""The same, as npm names it (``process.arch``)."""
NODE = f"node-{NODE_VERSION}-{ARCH}"
"""The folder of Node.js in the folder of installed agents; its binary is ``bin/node`` in it."""

_NPM_FLAGS = (
    "--ignore-scripts",
    "--no-audit",
    "--no-fund",
    "--no-update-notifier",
    "--no-package-lock",
    "--no-save",
    "--prefer-offline",
    "--loglevel=error",
)
_ERROR_TAIL = 2000
"""Bytes of a failed command's output that its error repeats."""


async def install_python_packages(agent: str, requirements: tuple[str, ...], target: Path) -> None:
    """Install ``requirements`` into the folder ``target``, for this interpreter. Raises AgentNotInstalled."""
    what = f"agent {agent} could not be installed"
    uv = shutil.which("uv")
    if find_spec("pip") is not None:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check")
        await run_install(f"{what}: pip", (*pip, "--target", str(target), *requirements))
    elif uv is not None:
        # Copies, because a link would share its permissions with uv's cache, which other users may not read.
        program = (uv, "pip", "install", "--quiet", "--link-mode", "copy", "--python", sys.executable)
        await run_install(f"{what}: uv", (*program, "--target", str(target), *requirements))
        await run_install(f"{what}: chmod", ("chmod", "-R", "a+rX", str(target)))
    else:
        raise AgentNotInstalled(
            f"{what}: {sys.executable} has no pip, and there is no uv on the server's PATH: install one of them"
        )


async def install_npm_packages(agent: str, packages: tuple[str, ...], target: Path, node: Path) -> None:
    """Install ``packages`` into ``target/node_modules``. ``node``: the folder of Node.js.

    Raises AgentNotInstalled.
    """
    what = f"agent {agent} could not be installed: npm"
    await _npm(what, tuple(package.format(arch=ARCH) for package in packages), target, node / "bin")


async def install_node(target: Path) -> None:
    """Install the binary of Node.js into ``target/bin``. Raises AgentNotInstalled."""
    package = f"node-linux-{ARCH}"
    staging = target / "staging"
    await _npm("Node.js could not be installed", (f"{package}@{NODE_VERSION}",), staging)
    await anyio.to_thread.run_sync(_keep_binary, staging / "node_modules" / package, target)
    await anyio.to_thread.run_sync(shutil.rmtree, staging)


def _keep_binary(package: Path, target: Path) -> None:
    """Move the binary and the licence to ``target``; headers, manuals and the package's npm are not needed."""
    binary = package / "bin" / "node"
    if not os.access(binary, os.X_OK):
        raise AgentNotInstalled(f"Node.js could not be installed: {package.name}@{NODE_VERSION} has no bin/node")
    (target / "bin").mkdir()
    (target / "bin").chmod(0o755)  # whatever the server's umask is
    binary.rename(target / "bin" / "node")
    for licence in package.glob("LICENSE*"):
        licence.rename(target / licence.name)


async def _npm(what: str, packages: tuple[str, ...], prefix: Path, first: Path | None = None) -> None:
    """Run `npm install` with the folder ``first`` in front of the PATH. Raises AgentNotInstalled."""
    npm = shutil.which("npm")
    if npm is None:
        raise AgentNotInstalled(
            f"{what}: it comes from the npm registry, and there is no npm on the server's PATH: install Node.js "
            "with npm, in any version"
        )
    # npm starts by `env node`: the first node on the PATH runs it.
    path = os.environ.get("PATH", os.defpath)
    env = {"PATH": path if first is None else f"{first}{os.pathsep}{path}"}
    await run_install(what, (npm, "install", *_NPM_FLAGS, "--prefix", str(prefix), *packages), env)


async def run_install(what: str, command: tuple[str, ...], env: Mapping[str, str] | None = None) -> None:
    """Run one command of an installation. ``env`` is added to the server's own environment.

    Files that the command makes are readable by every user, whatever the server's umask. Raises AgentNotInstalled
    when the command fails: ``what`` begins the message, the end of the command's output closes it.
    """
    with tempfile.TemporaryFile() as output:
        async with await anyio.open_process(
            ("/bin/sh", "-c", 'umask 022; exec "$@"', "sh", *command),  # uvloop takes no umask
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        ) as process:
            try:
                code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if code != 0:
            output.seek(0)
            tail = output.read()[-_ERROR_TAIL:].decode(errors="replace").strip()
            raise AgentNotInstalled(f"{what} ended with {code}: {tail}")
