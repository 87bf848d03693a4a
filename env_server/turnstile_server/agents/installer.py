"""Installs agents, once per version, into folders that sandboxes mount read-only.

A folder appears whole or not at all, and is named by everything that decides its content, so a changed spec is
installed anew beside the old. Packages are those of this interpreter's minor version: images must have the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import AgentNotInstalled
from turnstile_server.settings import AgentSettings

_LOG = logging.getLogger(__name__)
_ERROR_TAIL = 2000
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def default_install_dir() -> Path:
    """``turnstile/agents`` in the user's cache folder (XDG Base Directory Specification)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "turnstile" / "agents"


class Installer:
    def __init__(self, settings: AgentSettings) -> None:
        self.folder = (settings.install_dir or default_install_dir()).absolute()
        self._timeout_s = settings.install_timeout_s
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    def name_of(self, spec: AgentSpec) -> str:
        """The name of the agent's folder in ``folder``."""
        return f"{spec.name}-{_digest(spec)}-py{PYTHON_VERSION}"

    def installed(self, spec: AgentSpec) -> bool:
        return (self.folder / self.name_of(spec)).is_dir()

    async def install(self, spec: AgentSpec) -> None:
        """Installs the agent unless it is there; whoever asks meanwhile waits. Raises AgentNotInstalled."""
        async with self._locks[spec.name]:
            if self.installed(spec):
                return
            _LOG.info("installing agent %s %s", spec.name, spec.version)
            try:
                await anyio.to_thread.run_sync(lambda: self.folder.mkdir(parents=True, exist_ok=True))
                partial = Path(
                    await anyio.to_thread.run_sync(lambda: tempfile.mkdtemp(dir=self.folder, prefix="."))
                )
            except OSError as error:
                raise AgentNotInstalled(f"agents cannot be installed into {self.folder}: {error}") from error
            try:
                await self._fill(spec, partial)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(lambda: shutil.rmtree(partial, ignore_errors=True))

    async def _fill(self, spec: AgentSpec, partial: Path) -> None:
        if spec.install.pip:
            target = ("--target", str(partial / "python"))
            await self._pip(spec, ("install", "--quiet", "--no-input", "--disable-pip-version-check", *target))
        if spec.install.tree is not None:
            tree = spec.install.tree
            await anyio.to_thread.run_sync(
                lambda: shutil.copytree(tree, partial / "files", ignore=shutil.ignore_patterns("__pycache__"))
            )
        await anyio.to_thread.run_sync(self._publish, spec, partial)

    def _publish(self, spec: AgentSpec, partial: Path) -> None:
        partial.chmod(0o755)  # other users read it, through a read-only mount
        try:
            partial.rename(self.folder / self.name_of(spec))
        except OSError as error:
            if not self.installed(spec):  # else another server was faster
                raise AgentNotInstalled(f"agent {spec.name} cannot be put into {self.folder}: {error}") from error

    async def _pip(self, spec: AgentSpec, arguments: tuple[str, ...]) -> None:
        command = (sys.executable, "-m", "pip", *arguments, *spec.install.pip)
        try:
            code, output = await _run(command, self._timeout_s)
        except TimeoutError as error:
            raise AgentNotInstalled(
                f"agent {spec.name} was not installed within agents.install_timeout_s ({self._timeout_s:g} s)"
            ) from error
        if code != 0:
            tail = output[-_ERROR_TAIL:].decode(errors="replace").strip()
            raise AgentNotInstalled(f"agent {spec.name} could not be installed: pip ended with {code}: {tail}")


async def _run(command: tuple[str, ...], timeout_s: float) -> tuple[int, bytes]:
    """Exit code and output; the whole process group is gone when this returns."""
    with tempfile.TemporaryFile() as output:
        async with await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        ) as process:
            try:
                with anyio.fail_after(timeout_s):
                    code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read()


def _digest(spec: AgentSpec) -> str:
    """Of what is installed: requirements and files."""
    content = hashlib.sha256(json.dumps(spec.install.pip).encode())
    if spec.install.tree is not None:
        tree = Path(spec.install.tree)
        for path in sorted(tree.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content.update(f"{path.relative_to(tree)}\0".encode())
                content.update(path.read_bytes())
    return content.hexdigest()[:12]
