"""Build of a task's image: a folder that Docker builds, and the name that its content gives the image."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from docker.utils.build import exclude_paths
from pydantic import BeforeValidator, InstanceOf, PlainSerializer

REPOSITORY = "turnstile-task"
_PART = 1 << 20
_DIGITS = 32


class ContextProblem(ValueError):
    """A folder that no image can be built of: its message names the file."""


@dataclass(frozen=True, slots=True)
class ImageBuild:
    """A build. The same content has the same image, whatever folder it lies in."""

    context: Path
    """The folder that the Dockerfile copies from."""
    dockerfile: Path
    args: tuple[tuple[str, str], ...] = ()
    target: str | None = None
    """The stage that is built; None: the last."""
    timeout_s: float = 600.0
    max_bytes: int = 512 << 20
    """Greatest size of the context's files together."""
    origin: str = ""
    """What it was made of, for people; empty: its Dockerfile."""
    timeout_field: str = "build_timeout_sec"
    """The field of the task that bounds its time."""

    def __str__(self) -> str:
        return self.origin or str(self.dockerfile)

    def tag(self) -> str:
        """The image's name, of the content that the folder has now. Raises ContextProblem, OSError."""
        digest = hashlib.sha256()
        for name, value in (*self.args, ("target", self.target or "")):
            digest.update(f"{name}={value}\0".encode())
        total = 0
        for name in self.files():
            path = self.context / name
            status = path.lstat()
            digest.update(f"{name}\0{_kind(status)}\0".encode("utf-8", "surrogateescape"))
            if stat.S_ISLNK(status.st_mode):
                digest.update(os.fsencode(path.readlink()) + b"\0")
            elif stat.S_ISREG(status.st_mode):
                total += status.st_size
                self.check_size(total)
                digest.update(f"{status.st_size}\0".encode())
                for part in _parts(path):
                    digest.update(part)
        digest.update(
            f"dockerfile\0{self.dockerfile.read_text(errors='surrogateescape')}".encode("utf-8", "replace")
        )
        return f"{REPOSITORY}:{digest.hexdigest()[:_DIGITS]}"

    def check_size(self, total: int) -> None:
        """``total``: bytes of its files so far. Raises ContextProblem."""
        if total > self.max_bytes:
            raise ContextProblem(f"{self.context} is larger than {self.max_bytes} bytes (tasks.max_context_bytes)")

    def files(self) -> list[str]:
        """The files that go to the engine: paths below the context, sorted, without those that its
        ``.dockerignore`` names. Raises ContextProblem."""
        try:
            ignore = self.context / ".dockerignore"
            lines = ignore.read_text().splitlines() if ignore.is_file() else []
            patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            inside = self.dockerfile.is_relative_to(self.context)
            dockerfile = self.dockerfile.relative_to(self.context).as_posix() if inside else None
            found = sorted(exclude_paths(str(self.context), patterns, dockerfile=dockerfile))
        except (OSError, UnicodeDecodeError) as error:
            raise ContextProblem(f"{self.context}: {error}") from None
        for name in found:
            if stat.S_IFMT((self.context / name).lstat().st_mode) not in _KINDS:
                raise ContextProblem(f"{self.context / name} is no file, folder or link")
        return found


def _only_from_a_folder(value: object) -> object:
    """Text from outside names no folder of this machine."""
    if value is not None and not isinstance(value, ImageBuild):
        raise ValueError("images are built of Harbor's task folders only; name an `image`")
    return value


def _shown(build: ImageBuild | None) -> str | None:
    return None if build is None else str(build)


FolderBuild = Annotated[
    InstanceOf[ImageBuild] | None, BeforeValidator(_only_from_a_folder), PlainSerializer(_shown)
]
"""As a field of a task."""

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def _kind(status: os.stat_result) -> str:
    """With what of the mode reaches an image of ours: whether a file is a program."""
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    return f"{kind} x" if kind == "file" and status.st_mode & stat.S_IXUSR else kind


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_PART):
            yield part
