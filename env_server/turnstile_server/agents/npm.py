"""npm packages of agents, and the one Node.js that all agents share.

Node.js itself is an npm package, so that nothing but the registry is asked for; the npm that is used is this
machine's own. Packages are chosen by the Node.js that will run them: npm picks older versions under an older one.
No package's scripts are run, so a package whose script would fetch something, or move a binary, is used as it is
in the registry.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import anyio.to_thread

from turnstile_server.agents.install_run import run_install
from turnstile_server.errors import AgentNotInstalled

NODE_VERSION = "24.21.0"
MACHINE = platform.machine().lower()
"""This machine's architecture, as Linux names it: x86_64, aarch64."""
ARCH = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(MACHINE, MACHINE)
"""The same, as npm names it (``process.arch``)."""
NODE = f"node-{NODE_VERSION}-{ARCH}"
"""The folder of Node.js in the folder of installed agents; its binary is ``bin/node`` in it."""

_FLAGS = (
    "--ignore-scripts",
    "--no-audit",
    "--no-fund",
    "--no-update-notifier",
    "--no-package-lock",
    "--no-save",
    "--prefer-offline",
    "--loglevel=error",
)


async def install_node(partial: Path) -> None:
    """Node.js into ``partial``. Raises AgentNotInstalled."""
    package = f"node-linux-{ARCH}"
    staging = partial / "staging"
    await _npm("Node.js could not be installed", (f"{package}@{NODE_VERSION}",), staging)
    await anyio.to_thread.run_sync(_keep_binary, staging / "node_modules" / package, partial)
    await anyio.to_thread.run_sync(shutil.rmtree, staging)


def _keep_binary(package: Path, target: Path) -> None:
    """Of headers, manuals and npm nothing is needed."""
    binary = package / "bin" / "node"
    if not os.access(binary, os.X_OK):
        raise AgentNotInstalled(f"Node.js could not be installed: {package.name}@{NODE_VERSION} has no bin/node")
    (target / "bin").mkdir()
    (target / "bin").chmod(0o755)  # whatever the server's umask
    binary.rename(target / "bin" / "node")
    for licence in package.glob("LICENSE*"):
        licence.rename(target / licence.name)


async def install_packages(agent: str, packages: tuple[str, ...], target: Path, node: Path) -> None:
    """``packages`` into ``target/node_modules``. ``node``: the folder of Node.js. Raises AgentNotInstalled."""
    what = f"agent {agent} could not be installed: npm"
    await _npm(what, tuple(package.format(arch=ARCH) for package in packages), target, node / "bin")


async def _npm(what: str, packages: tuple[str, ...], prefix: Path, first: Path | None = None) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise AgentNotInstalled(
            f"{what}: it comes from the npm registry, and there is no npm on the server's PATH: install Node.js "
            "with npm, in any version"
        )
    # npm starts by `env node`: whichever is first on the PATH runs it.
    path = os.environ.get("PATH", os.defpath)
    env = {"PATH": path if first is None else f"{first}{os.pathsep}{path}"}
    await run_install(what, (npm, "install", *_FLAGS, "--prefix", str(prefix), *packages), env)
