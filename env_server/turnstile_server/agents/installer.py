"""Installs each agent once, into a folder that sandboxes mount read-only.

Invariants: a folder appears whole or not at all. Its name is a digest of everything that decides its content, so a
changed spec is installed anew beside the old one.

Python packages are those of this interpreter's minor version, npm packages those of this machine's architecture:
sandboxes must have the same. All agents share one folder with Node.js. Where sandboxes have the carried runtime,
each folder has a second one beside it, whose programs start by that runtime's loader (``runtimes/adapt.py``).

Packages have programs and libraries, so the folder must not be mounted noexec; that is checked, because the agent
that fails by it ("failed to map segment from shared object") would bear the blame.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from compileall import compile_dir
from functools import partial
from pathlib import Path
from py_compile import PycInvalidationMode

import anyio
import anyio.to_thread

from turnstile_server.agents.launch import uses_placeholder
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
from turnstile_server.runtimes.adapt import adapt
from turnstile_server.runtimes.install_folder import InstallFolder, default_install_dir
from turnstile_server.settings import AgentSettings

_CLIENT = "files/turnstile_launch.py"
"""In the install folder of an agent that starts its model's commands by the launcher."""
_CARRIED = "-carried"
"""End of the name of a folder whose programs start by the carried runtime's loader."""
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class Installer:
    """Installs agents below ``folder``. Callers that ask for the same agent at once share one installation."""

    def __init__(self, settings: AgentSettings, launch_client: Path) -> None:
        """``launch_client``: the module that asks the sandbox's launcher, for specs with ``launches``."""
        self._launch_client = launch_client
        self.place = InstallFolder((settings.install_dir or default_install_dir()).absolute())
        self.folder = self.place.path
        self._timeout_s = settings.install_timeout_s

    def name_of(self, spec: AgentSpec) -> str:
        """The name of the agent's folder below ``folder``; an agent shares that of the one it extends, where both
        install the same."""
        return f"{spec.extends or spec.name}-{self._digest(spec)}-py{PYTHON_VERSION}"

    def folders_of(self, spec: AgentSpec, *, carried: bool) -> dict[str, Path]:
        """The folders that a sandbox of the agent mounts, by name inside. ``carried``: the sandbox has the carried
        runtime. Many npm packages are binaries, which need no Node.js."""
        end = _CARRIED if carried else ""
        names = {self.name_of(spec): end if spec.install.pip or spec.install.npm else ""}
        if spec.install.npm and uses_placeholder(spec, "node"):
            names[NODE] = end
        return {name: self.folder / f"{name}{suffix}" for name, suffix in names.items()}

    def installed(self, spec: AgentSpec, *, carried: bool = False) -> bool:
        """True if the agent can be launched without an installation."""
        return all(folder.is_dir() for folder in self.folders_of(spec, carried=carried).values())

    async def install(self, spec: AgentSpec, *, carried: bool = False) -> None:
        """Install the agent unless it is installed, for sandboxes with the carried runtime or without. Concurrent
        callers wait for the same installation.

        Raises AgentNotInstalled, also after ``agents.install_timeout_s``.
        """
        if (spec.install.pip or spec.install.npm) and (problem := self.place_problem()) is not None:
            raise AgentNotInstalled(f"agent {spec.name} cannot run: {problem}")
        if self.installed(spec, carried=carried):
            return
        try:
            with anyio.fail_after(self._timeout_s):
                if spec.install.npm:
                    npm = self.folder / NPM
                    if not has_npm():
                        await self.place.fill_once(NPM, install_npm)
                    await self.place.fill_once(NODE, lambda target: install_node(target, npm))
                await self.place.fill_once(self.name_of(spec), lambda target: self._install_into(target, spec))
                for name, folder in self.folders_of(spec, carried=carried).items():
                    if folder.name != name:
                        await self.place.fill_once(folder.name, partial(self._adapt, self.folder / name))
        except TimeoutError as error:
            raise AgentNotInstalled(
                f"agent {spec.name} was not installed within agents.install_timeout_s ({self._timeout_s:g} s)"
            ) from error

    def place_problem(self) -> str | None:
        """Reason why agents with packages cannot run from the folder: it is mounted noexec; None: they can."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not os.statvfs(there).f_flag & os.ST_NOEXEC:
            return None
        return (
            f"agents are installed in {self.folder}, which is mounted noexec: no program or library there runs. "
            "Set agents.install_dir (TURNSTILE_AGENTS__INSTALL_DIR) to a folder that is not, such as one on a "
            "volume, or mount it with exec (`--tmpfs /data:exec`)"
        )

    async def _adapt(self, installed: Path, target: Path) -> None:
        try:
            await anyio.to_thread.run_sync(adapt, installed, target)
        except OSError as error:
            raise AgentNotInstalled(
                f"the programs of {installed} cannot be copied for containers into {self.folder}: {error.strerror}"
            ) from error

    async def _install_into(self, target: Path, spec: AgentSpec) -> None:
        install = spec.install
        if install.pip:
            await install_python_packages(spec.name, install.pip, target / "python")
        if install.npm:
            node, npm = self.folder / NODE, self.folder / NPM
            await install_npm_packages(spec.name, install.npm, target / "node", node=node, npm=npm)
        if install.tree is not None:
            tree = install.tree
            await anyio.to_thread.run_sync(_copy_tree, tree, target / "files")
        if spec.launches is not None:
            client = target / _CLIENT
            await anyio.to_thread.run_sync(lambda: client.parent.mkdir(exist_ok=True))
            await anyio.to_thread.run_sync(shutil.copy, self._launch_client, client)

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


def _copy_tree(tree: str, target: Path) -> None:
    """Copies the files of a spec, and compiles their Python for the interpreter of the sandboxes: they cannot keep
    what they compile, so each episode would do it anew. What does not compile here is left as it is."""
    shutil.copytree(tree, target, ignore=shutil.ignore_patterns("__pycache__"))
    compile_dir(target, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    for folder in target.rglob("__pycache__"):  # whatever the server's umask is
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)
