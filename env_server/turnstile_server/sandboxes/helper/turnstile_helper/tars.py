"""Tars in and out, member by member with descriptors: ``tarfile``'s own extraction trusts paths.

Unpacking holds: nothing is made outside the target; no link is ever followed below it. Packing holds: links stay
links; sockets, pipes and devices are left out; never more than the bound is sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tarfile
from typing import IO, Iterator  # noqa: UP035 - Python 3.8

_PART = 256 << 10
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class FileRefused(Exception):
    """The reason of a refusal, as the end of a sentence that begins with the path."""


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def unpack(target: str) -> None:
    """Unpacks the tar on stdin below the folder ``target``, which is made if it is not there."""
    os.makedirs(target, exist_ok=True)
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    modes: list[tuple[list[str], int]] = []
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            for member in archive:
                parts = _parts(member.name, member.name)
                try:
                    _unpack_member(archive, member, root, parts)
                except OSError as error:
                    raise FileRefused(f"{member.name}: {_reason(error)}") from error
                if member.isdir():
                    modes.append((parts, member.mode & 0o777))
    except tarfile.TarError as error:
        raise FileRefused(f"not a whole tar: {error}") from error
    # Folders get their modes last, the deepest first: one without the right to write holds its contents by then.
    for parts, mode in reversed(modes):
        if parts:
            with _Folder(root, parts) as folder:
                os.fchmod(folder, mode)
    while os.read(0, _PART):
        pass  # what follows the end of the archive, so that the server is not left writing


def _parts(name: str, entry: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/"):
        raise FileRefused(f"{entry}: an absolute path")
    if ".." in parts:
        raise FileRefused(f"{entry}: a path that leads out with '..'")
    return parts


def _reason(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "a path through a link or a file"
    return (error.strerror or str(error)).lower()


class _Folder:
    """The folder below ``root``, made if need be, reached through no link."""

    def __init__(self, root: int, parts: list[str]) -> None:
        self._fd = os.dup(root)
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=self._fd)
            try:
                below = os.open(part, _FOLDER, dir_fd=self._fd)
            finally:
                os.close(self._fd)
            self._fd = below

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)


def _unpack_member(archive: tarfile.TarFile, member: tarfile.TarInfo, root: int, parts: list[str]) -> None:
    if member.isdir():
        with _Folder(root, parts):
            return
    if not parts:
        raise FileRefused(f"{member.name!r}: an entry without a name")
    if member.isreg() and not member.issparse():
        with _Folder(root, parts[:-1]) as folder:
            _unpack_file(archive, member, folder, parts[-1])
    elif member.issym():
        with _Folder(root, parts[:-1]) as folder:
            _make_room(folder, parts[-1])
            os.symlink(member.linkname, parts[-1], dir_fd=folder)
    elif member.islnk():
        source = _parts(member.linkname, member.name)
        if not source:
            raise FileRefused(f"{member.name}: a link to nothing")
        with _Folder(root, source[:-1]) as from_folder, _Folder(root, parts[:-1]) as folder:
            if source != parts:
                _make_room(folder, parts[-1])
                os.link(source[-1], parts[-1], src_dir_fd=from_folder, dst_dir_fd=folder, follow_symlinks=False)
    else:
        kind = "a device or a pipe" if member.isdev() else "of a kind that is not unpacked"
        raise FileRefused(f"{member.name}: {kind}")


def _unpack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
    _make_room(folder, name)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        source = archive.extractfile(member)
        if source is None:
            raise FileRefused(f"{member.name}: no contents")
        while True:
            data = source.read(_PART)
            if not data:
                break
            write_all(fd, data)
        os.fchmod(fd, member.mode & 0o777)
        os.utime(fd, (member.mtime, member.mtime))
    finally:
        os.close(fd)


def _make_room(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


class _Bounded:
    """stdout with a bound, as tarfile wants to write to it."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._max = max_bytes

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise FileRefused(f"its archive is larger than the {self._max} bytes that may be fetched")
        write_all(1, data)
        return len(data)


def pack(path: str, max_bytes: int) -> None:
    """Writes a tar of the folder to stdout; names are relative to it."""
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    # No padding to whole records: the bound is of what is in it.
    with tarfile.open(fileobj=_Bounded(max_bytes), mode="w|", format=tarfile.PAX_FORMAT, bufsize=512) as archive:  # type: ignore[call-overload, unused-ignore]
        for member, source in _members(root, ""):
            if source is None:
                archive.addfile(member)
            else:
                with source:
                    archive.addfile(member, source)


class _Exactly:
    """As many bytes as were announced, whatever happens to the file meanwhile."""

    def __init__(self, fd: int, size: int) -> None:
        self._file = os.fdopen(fd, "rb", buffering=0)
        self._left = size

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = bytearray()
        while len(data) < wanted:
            part = self._file.read(wanted - len(data))
            if not part:
                data += bytes(wanted - len(data))
            else:
                data += part
        self._left -= wanted
        return bytes(data)

    def __enter__(self) -> _Exactly:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _members(fd: int, above: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Everything below the open folder. What disappears, or becomes a link, while we look is left out."""
    for name in sorted(os.listdir(fd)):
        path = f"{above}{name}"
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            member = tarfile.TarInfo(path)
            member.mode = stat.S_IMODE(status.st_mode) & 0o777
            member.mtime = int(status.st_mtime)
            if stat.S_ISLNK(status.st_mode):
                member.type = tarfile.SYMTYPE
                member.linkname = os.readlink(name, dir_fd=fd)
                yield member, None
            elif stat.S_ISDIR(status.st_mode):
                below = os.open(name, _FOLDER, dir_fd=fd)
                try:
                    member.type = tarfile.DIRTYPE
                    yield member, None
                    yield from _members(below, f"{path}/")
                finally:
                    os.close(below)
            elif stat.S_ISREG(status.st_mode):
                opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
                member.size = os.fstat(opened).st_size
                yield member, _Exactly(opened, member.size)  # type: ignore[misc]
        except OSError as error:
            if error.errno not in _GONE:
                raise FileRefused(f"{path}: {(error.strerror or str(error)).lower()}") from error
