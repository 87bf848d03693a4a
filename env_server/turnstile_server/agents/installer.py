"""Installs each agent once, into a folder that sandboxes mount read-only.

Invariants: a folder appears whole or not at all. Its name is a digest of everything that decides its content, so a
changed spec is installed anew beside the old one.

Python packages are those of this interpreter's minor version, npm packages those of this machine's architecture:
images must have the same. All agents share one folder with Node.js.

Packages have programs and libraries, so the folder must not be mounted noexec; that is checked, because the agent
that fails by it ("failed to map segment from shared object") would bear the blame.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.agents.packages import (
    ARCH,
    NODE,
    NODE_VERSION,
    NPM,
    has_npm,
    install_node,
    install_npm,
    install_npm_packages,
    install_python_packages,
)
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import AgentNotInstalled
from turnstile_server.settings import AgentSettings

_LOG = logging.getLogger(__name__)
_CLIENT = "files/turnstile_launch.py"
"""In the install folder of an agent that starts its model's commands by the launcher."""
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def default_install_dir() -> Path:
    """``turnstile/agents`` in the user's cache folder (XDG Base Directory Specification)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "turnstile" / "agents"


class Installer:
    """Installs agents below ``folder``. Callers that ask for the same agent at once share one installation."""

    def __init__(self, settings: AgentSettings, launch_client: Path) -> None:
        """``launch_client``: the module that asks the sandbox's launcher, for specs with ``launches``."""
        self._launch_client = launch_client
        self.folder = (settings.install_dir or default_install_dir()).absolute()
        self._timeout_s = settings.install_timeout_s
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    def name_of(self, spec: AgentSpec) -> str:
        """The name of the agent's folder below ``folder``; an agent shares that of the one it extends, where both
        install the same."""
        return f"{spec.extends or spec.name}-{self._digest(spec)}-py{PYTHON_VERSION}"

    def installed(self, spec: AgentSpec) -> bool:
        """Whether the agent can be launched without an installation."""
        return self._exists(self.name_of(spec)) and (not spec.install.npm or self._exists(NODE))

    async def install(self, spec: AgentSpec) -> None:
        """Install the agent unless it is installed. Concurrent callers wait for the same installation.

        Raises AgentNotInstalled, also after ``agents.install_timeout_s``.
        """
        if (spec.install.pip or spec.install.npm) and (problem := self.place_problem()) is not None:
            raise AgentNotInstalled(f"agent {spec.name} cannot run: {problem}")
        if self.installed(spec):
            return
        try:
            with anyio.fail_after(self._timeout_s):
                if spec.install.npm:
                    npm = self.folder / NPM
                    if not has_npm():
                        await self._fill_once(NPM, install_npm)
                    await self._fill_once(NODE, lambda partial: install_node(partial, npm))
                await self._fill_once(self.name_of(spec), lambda partial: self._install_into(partial, spec))
        except TimeoutError as error:
            raise AgentNotInstalled(
                f"agent {spec.name} was not installed within agents.install_timeout_s ({self._timeout_s:g} s)"
            ) from error

    def place_problem(self) -> str | None:
        """Why agents with packages cannot run from the folder, where it is mounted noexec; None: they can."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not os.statvfs(there).f_flag & os.ST_NOEXEC:
            return None
        return (
            f"agents are installed in {self.folder}, which is mounted noexec: no program or library there runs. "
            "Set agents.install_dir (TURNSTILE_AGENTS__INSTALL_DIR) to a folder that is not, such as one on a "
            "volume, or mount it with exec (`--tmpfs /data:exec`)"
        )

    def _exists(self, name: str) -> bool:
        return (self.folder / name).is_dir()

    async def _fill_once(self, name: str, fill: Callable[[Path], Awaitable[None]]) -> None:
        """Make the folder ``name`` unless it exists: fill a temporary folder, then rename it."""
        async with self._locks[name]:
            if self._exists(name):
                return
            _LOG.info("installing %s", name)
            try:
                await anyio.to_thread.run_sync(lambda: self.folder.mkdir(parents=True, exist_ok=True))
                partial = Path(
                    await anyio.to_thread.run_sync(lambda: tempfile.mkdtemp(dir=self.folder, prefix="."))
                )
            except OSError as error:
                raise AgentNotInstalled(
                    f"agents cannot be installed into {self.folder} by uid {os.geteuid()}: {error.strerror}; "
                    "make it writable, or name another folder (agents.install_dir)"
                ) from error
            try:
                await fill(partial)
                await anyio.to_thread.run_sync(self._publish, name, partial)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(lambda: shutil.rmtree(partial, ignore_errors=True))

    async def _install_into(self, partial: Path, spec: AgentSpec) -> None:
        install = spec.install
        if install.pip:
            await install_python_packages(spec.name, install.pip, partial / "python")
        if install.npm:
            node, npm = self.folder / NODE, self.folder / NPM
            await install_npm_packages(spec.name, install.npm, partial / "node", node=node, npm=npm)
        if install.tree is not None:
            tree = install.tree
            await anyio.to_thread.run_sync(
                lambda: shutil.copytree(tree, partial / "files", ignore=shutil.ignore_patterns("__pycache__"))
            )
        if spec.launches is not None:
            client = partial / _CLIENT
            await anyio.to_thread.run_sync(lambda: client.parent.mkdir(exist_ok=True))
            await anyio.to_thread.run_sync(shutil.copy, self._launch_client, client)

    def _publish(self, name: str, partial: Path) -> None:
        partial.chmod(0o755)  # other users read it, through a read-only mount
        try:
            partial.rename(self.folder / name)
        except OSError as error:
            if not self._exists(name):  # another server may have been faster
                raise AgentNotInstalled(f"{name} cannot be put into {self.folder}: {error}") from error

    def _digest(self, spec: AgentSpec) -> str:
        """A digest of all that is installed: requirements, packages and files."""
        content = hashlib.sha256(json.dumps(spec.install.pip).encode())
        if spec.install.npm:
            content.update(json.dumps([NODE_VERSION, ARCH, *spec.install.npm]).encode())
        if spec.install.tree is not None:
            tree = Path(spec.install.tree)
            for path in sorted(tree.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    content.update(f"{path.relative_to(tree)}\0".encode())
                    content.update(path.read_bytes())
        if spec.launches is not None:
            content.update(b"launch\0" + self._launch_client.read_bytes())
        return content.hexdigest()[:12]
