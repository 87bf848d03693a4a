"""The files of an image as the root of a bubblewrap sandbox, and the places in it where others are mounted."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.errors import TaskFailed
from turnstile_server.runtimes.layout import PYTHON
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, SandboxSpec

IN_MEMORY = ("/run", "/turnstile")
"""Folders of every sandbox with an image that hold mount points alone."""
_ALWAYS = ("/proc", "/dev", "/tmp", "/home", *IN_MEMORY)


@dataclass(frozen=True, slots=True)
class ImageRoot:
    """``runtime``: the folder of the carried Python; None: the image has to have one."""

    folder: Path
    image: Image
    runtime: Path | None

    @property
    def python(self) -> str:
        return IMAGE_PYTHON if self.runtime is None else PYTHON

    def folders(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Folders that every user may write, empty at first: of the spec, and volumes that the image declares."""
        return tuple(dict.fromkeys([*spec.folders, *(() if spec.image_files else self.image.volumes)]))

    def kept(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Folders of the image that can be changed, in the order in which they are to be mounted."""
        if not spec.image_files:
            return ()
        passable = [each for each in spec.passable if (self.folder / each.lstrip("/")).is_dir()]
        return tuple(sorted({*passable, spec.workdir}))

    def prepare(self, spec: SandboxSpec) -> None:
        """Makes the empty folders that are mounted upon, because the root is read-only inside. Raises TaskFailed,
        OSError."""
        mounted = (mount.target for mount in spec.mounts)
        self._make((*_ALWAYS, spec.workdir, *self.folders(spec), *mounted))

    def _make(self, folders: Iterable[str]) -> None:
        for target in folders:
            parts = [part for part in target.split("/") if part not in ("", ".")]
            if (
                not target.startswith("/") or not parts or ".." in parts
            ):  # also of a WORKDIR, or a volume, of the image
                raise TaskFailed(
                    f"nothing can be mounted at {target!r}: it is no absolute path below /, without .."
                )
            if f"/{parts[0]}" not in IN_MEMORY or len(parts) == 1:
                self._walk(target, parts)
        parent = self._walk("/etc", ["etc"], keep=True)
        try:
            os.close(os.open("hosts", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=parent))
        except FileExistsError:
            if not stat.S_ISREG(os.stat("hosts", dir_fd=parent, follow_symlinks=False).st_mode):
                raise TaskFailed("in the image, /etc/hosts is a link, or no file") from None
        finally:
            os.close(parent)

    def _walk(self, target: str, parts: list[str], *, keep: bool = False) -> int:
        """Makes a folder below the root without following a link of the image. ``keep``: returns it open."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        current = os.open(self.folder, flags)
        try:
            for part in parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=current)
                    os.chmod(part, 0o755, dir_fd=current)
                try:
                    below = os.open(part, flags, dir_fd=current)
                except OSError as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    raise TaskFailed(f"in the image, {target} is a link, or below one, or no folder") from None
                os.close(current)
                current = below
        except BaseException:
            os.close(current)
            raise
        if not keep:
            os.close(current)
        return current
