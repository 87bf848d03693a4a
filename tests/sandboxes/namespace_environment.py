"""An environment with the interface of Harbor's, for what its own docker one cannot show: a provider that fails.

It is a tree of bubblewrap processes with a root of its own, entered by nsenter, with this machine's network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnstile_server.sandboxes.harbor.environments import HarborKind
from turnstile_server.sandboxes.protocol import SandboxLimits
from waiting import wait_until

_LINKS = ("bin", "lib", "lib64", "sbin")
_BUBBLEWRAP = (
    *("bwrap", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--dev", "/dev", "--tmpfs", "/tmp"),
    *(word for name in _LINKS for word in ("--symlink", f"usr/{name}", f"/{name}")),
    *("--unshare-pid", "--unshare-ipc", "--proc", "/proc", "--as-pid-1", "sleep", "infinity"),
)


@dataclass(frozen=True)
class Ended:
    stdout: str | None
    stderr: str | None
    return_code: int


class NamespaceEnvironment:
    def __init__(self, kind: NamespaceKind, session: str) -> None:
        self.session = session
        self.stopped = 0
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, force_build: bool) -> None:
        self._kind.tried("start")
        self._process = subprocess.Popen(_BUBBLEWRAP, start_new_session=True)  # noqa: ASYNC220 - briefly
        path = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.first = int((await wait_until(path.read_text)).split()[0])
        await wait_until(lambda: Path(f"/proc/{self.first}/cmdline").read_text().startswith("sleep"))

    async def stop(self, delete: bool) -> None:
        self.stopped += 1
        self._kind.tried("stop")
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the end of bubblewrap alone ends nothing inside
            self._process.wait()

    async def upload_file(self, source_path: Path, target_path: str) -> None:
        self._kind.tried("upload_file")
        shutil.copyfile(source_path, f"/proc/{self.first}/root{target_path}")

    async def exec(self, command: str, *, timeout_sec: int, user: str) -> Ended:
        self._kind.tried("exec")
        assert user == "root"
        if "exec" in self._kind.hangs:
            await asyncio.sleep(600)
        enter = ("nsenter", "-t", str(self.first), "-m", "-p", "-r", "--")
        words = ("/usr/bin/env", "-i", f"PATH={self._kind.path}", "/bin/sh", "-c", command)
        process = await asyncio.create_subprocess_exec(
            *enter, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, errors = await process.communicate()
        return Ended(out.decode(), errors.decode(), process.returncode or 0)

    def pids(self) -> Sequence[int]:
        """Of what runs in it, out here."""
        inside = os.readlink(f"/proc/{self.first}/ns/pid")
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # Its first process reaps nothing.
                if os.readlink(each / "ns/pid") == inside and "\nState:\tZ" not in (each / "status").read_text():
                    found.append(int(each.name))
        return found


class NamespaceKind(HarborKind):
    """``fails``: methods that raise. ``shuts``: it can shut the network but for one host, or so it says."""

    path = "/usr/bin:/bin"

    def __init__(self, *, shuts: bool = True) -> None:
        super().__init__("namespaces", {})
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.made: list[NamespaceEnvironment] = []
        self.asked: list[tuple[Any, ...]] = []
        self._shuts = shuts

    @property
    def limits(self) -> str:
        return "limits: none"

    def load(self) -> None:
        self.tried("load")

    def tried(self, what: str) -> None:
        if what in self.fails:
            raise ConnectionError(f"the provider does not {what}")

    def make(
        self, session: str, folder: Path, image: str, limits: SandboxLimits | None, reachable: str | None
    ) -> NamespaceEnvironment:
        self.tried("make")
        self.asked.append((session, image, limits, reachable))
        if reachable is not None and not self._shuts:
            raise ValueError("network_mode='allowlist' is not supported by this environment")
        (folder / "trial").mkdir(exist_ok=True)
        made = NamespaceEnvironment(self, session)
        if limits is not None or session != "turnstile-trial":
            self.made.append(made)
        return made
