"""Limits memory, processes and CPU of a whole sandbox by control groups (version 1 or 2), where the server may
make them. File formats: the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.

Owns the groups it makes. A sandbox's first process joins its group before it runs anything, so all its descendants
are in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import anyio

from turnstile_server.sandboxes.protocol import SandboxLimits

ROOT = Path("/sys/fs/cgroup")
_V1 = ("memory", "pids", "cpu")
_V2 = "+memory +pids +cpu"
_PERIOD_US = 100_000
_KILLS_FILES = ("memory.oom_control", "memory.events")
"""Files of version 1 and 2 that have a line ``oom_kill NUMBER``."""
_JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 70; shift; done; shift; exec "$@"'
_ROUNDS = 100
_ROUND_S = 0.02
"""A killed group is empty a moment later. After two seconds of trying, its folder is left for the next sweep."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The group of one sandbox: a folder per controller (version 1), or one folder (version 2)."""

    folders: tuple[Path, ...]

    def joining(self, command: list[str]) -> list[str]:
        """``command``, run by a shell that joins the group first and then becomes the command."""
        files = [str(folder / "cgroup.procs") for folder in self.folders]
        return ["/bin/sh", "-c", _JOIN, "sh", *files, "--", *command]

    def killed_for_memory(self) -> bool:
        """True if the kernel has killed a process of the group because its memory was used up."""
        for folder in self.folders:
            for name in _KILLS_FILES:
                with contextlib.suppress(OSError):
                    words = (folder / name).read_text().split()
                    if "oom_kill" in words and int(words[words.index("oom_kill") + 1]) > 0:
                        return True
        return False

    async def remove(self) -> bool:
        """Kills every process of the group and removes its folders; False when something is left."""
        for _ in range(_ROUNDS):
            if self._try_remove():
                return True
            await anyio.sleep(_ROUND_S)
        return False

    def _try_remove(self) -> bool:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.folders)


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Makes groups. ``parents``: the folders below which they are made. ``prefix``: of this server's names."""

    parents: tuple[Path, ...]
    version: int
    prefix: str

    def make(self, name: str, limits: SandboxLimits) -> ControlGroup:
        """Makes a group with its limits. Raises OSError; then nothing is left."""
        group = self._group(self.prefix + name)
        try:
            for folder in group.folders:
                folder.mkdir()
            for folder, file, value in self._values(group, limits):
                (folder / file).write_text(value)
        except OSError:
            for folder in group.folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        return group

    def left(self) -> list[ControlGroup]:
        """Groups of an earlier server with the same prefix."""
        names = {folder.name for parent in self.parents for folder in parent.glob(f"{self.prefix}*")}
        return [self._group(name) for name in sorted(names)]

    def _group(self, name: str) -> ControlGroup:
        return ControlGroup(tuple(parent / name for parent in self.parents))

    def _values(self, group: ControlGroup, limits: SandboxLimits) -> list[tuple[Path, str, str]]:
        quota = str(max(1000, int(limits.cpus * _PERIOD_US)))
        memory, pids = str(limits.memory_bytes), str(limits.pids)
        if self.version == 2:
            (folder,) = group.folders
            values = [
                (folder, "memory.max", memory),
                (folder, "pids.max", pids),
                (folder, "cpu.max", f"{quota} {_PERIOD_US}"),
            ]
            swap = (folder, "memory.swap.max", "0")
            return [*values, swap] if (folder / "memory.swap.max").exists() else values
        in_memory, in_pids, in_cpu = group.folders
        values = [
            (in_memory, "memory.limit_in_bytes", memory),
            (in_pids, "pids.max", pids),
            (in_cpu, "cpu.cfs_period_us", str(_PERIOD_US)),
            (in_cpu, "cpu.cfs_quota_us", quota),
        ]
        sockets = in_memory / "memory.kmem.tcp.limit_in_bytes"
        if sockets.exists():
            values.append((in_memory, sockets.name, str(limits.socket_bytes)))
        # Memory with swap; its bound may not be below the memory's, so it is set after it.
        swap = (in_memory, "memory.memsw.limit_in_bytes", memory)
        return [*values, swap] if (in_memory / "memory.memsw.limit_in_bytes").exists() else values


def find(prefix: str, root: Path | None = None) -> Cgroups | None:
    """The kind of groups that this server may make, found out by making one; None where it may make none."""
    for cgroups in _candidates(prefix, ROOT if root is None else root):
        try:
            group = cgroups.make("probe", SandboxLimits(memory_bytes=64 << 20, cpus=1, pids=64, disk_bytes=0))
        except OSError:
            continue
        for folder in group.folders:
            folder.rmdir()
        return cgroups
    return None


def _candidates(prefix: str, root: Path) -> list[Cgroups]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = {
        controller: path.lstrip("/")
        for _, controllers, path in (line.split(":", 2) for line in lines)
        for controller in controllers.split(",")
    }
    found = []
    if (root / "cgroup.controllers").exists():
        parent = root / own.get("", "")
        # Refused where the group itself holds processes (unless it is the root): it can have no such children.
        with contextlib.suppress(OSError):
            (parent / "cgroup.subtree_control").write_text(_V2)
        found.append(Cgroups((parent,), 2, prefix))
    if all((root / controller).is_dir() for controller in _V1):
        found.append(Cgroups(tuple(root / name / own.get(name, "") for name in _V1), 1, prefix))
    return found
