"""The server's folders in an environment, as one compressed tar, and the command that unpacks it and starts the
helper.

The tar of a set of folders is made once; that of an environment is it and a second member of gzip, with the order
to dial (``helper/turnstile_helper/dial.py``): so the token comes with the permissions that it needs.
"""

from __future__ import annotations

import gzip
import io
import json
import shlex
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.runtimes.layout import PYTHON
from turnstile_server.sandboxes.docker.containers import OF_LOADERS
from turnstile_server.sandboxes.folder_tar import TAR_END, entries_of
from turnstile_server.sandboxes.helper import SOCKET_TARGET
from turnstile_server.sandboxes.stream_provider import helper_command

UPLOADED: Final = "/turnstile-files.tgz"
ORDER: Final = "/turnstile/link"
"""The order to dial, until the helper has read it; later a mark that its link has ended."""
_LEVEL: Final = 1
_SETTLE: Final = 20
"""Tenths of a second in which a helper whose link has ended kills what it ran and ends."""


@dataclass(frozen=True, slots=True)
class DialOrder:
    """What a helper needs to dial."""

    host: str
    port: int
    sha256: str
    token: str
    retry_s: float


class HostFiles:
    """Keeps its files in ``folder``, which is there and its owner's to remove."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[tuple[Path, str], ...], Path] = {}
        self._making = anyio.Lock()

    async def archive(self, folders: Mapping[Path, str], order: DialOrder, target: Path) -> None:
        """Writes ``target``. ``folders``: where an environment has them, by path here; their content does not
        change meanwhile. Raises SandboxUnavailable."""
        try:
            async with self._making:
                key = tuple(folders.items())
                if key not in self._made:
                    path = self._folder / f"{len(self._made)}.tgz"
                    await anyio.to_thread.run_sync(_pack, folders, path)
                    self._made[key] = path
            await anyio.to_thread.run_sync(_pack_order, self._made[key], order, target)
        except OSError as error:
            raise SandboxUnavailable(f"the server's files cannot be packed: {error}") from error


def start_command(python: str, folders: Sequence[str]) -> str:
    """Run as root. ``folders``: those that every user may write to. Its exit code is the helper's, and so is its
    last line: ``pid NUMBER``, or why it could not dial."""
    lines = [
        "set -e",
        "umask 022",
        f"tar -xzf {UPLOADED} -C /",
        f"rm -f {UPLOADED}",
        f"mkdir -p {SOCKET_TARGET}",
        *(f"mkdir -p {each} && chmod 1777 {each}" for each in map(shlex.quote, folders)),
        *(f"unset {name}" for name in OF_LOADERS if python == PYTHON),
        "exec " + shlex.join((*helper_command(python), "LINK", ORDER)),
    ]
    return "\n".join(lines)


def look_command(pid: int) -> str:
    """Prints ``cut`` where the helper saw its link end, ``gone`` where it was killed, else ``runs``."""
    alive = f'grep -qs "^State:[[:space:]]*[^ZX[:space:]]" /proc/{pid}/status'
    return (
        f"i=0; while {alive} && [ $i -lt {_SETTLE} ]; do sleep 0.1; i=$((i+1)); done; "
        f"if [ -e {ORDER} ]; then echo cut; elif {alive}; then echo runs; else echo gone; fi"
    )


def _pack(folders: Mapping[Path, str], path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=_LEVEL) as file:
        for folder, target in folders.items():
            for part in entries_of(folder, target.strip("/") + "/"):
                file.write(part)


def _pack_order(base: Path, order: DialOrder, target: Path) -> None:
    text = json.dumps(asdict(order)).encode()
    entry = tarfile.TarInfo(ORDER.strip("/"))
    entry.mode, entry.size = 0o600, len(text)
    made = io.BytesIO()
    made.write(entry.tobuf() + text + bytes(-len(text) % tarfile.BLOCKSIZE) + TAR_END)
    shutil.copyfile(base, target)
    target.chmod(0o600)
    with open(target, "ab") as file:
        file.write(gzip.compress(made.getvalue()))
