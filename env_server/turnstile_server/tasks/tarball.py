"""The files of a task as one tar, the same bytes every time: sorted, no times, no owners, modes 644 and 755.

The folder is the task author's and is still checked whenever it is packed: a link, a special file or more than the
limits is refused, because what is packed goes where hidden tests run.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.errors import TaskFailed
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.files import Files


class FilesProblem(ValueError):
    """A folder that cannot be a task's: its message names the file."""


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    executable: bool = False


def read_files(files: Files, settings: TaskSettings) -> dict[str, bytes]:
    """Contents by path. Raises FilesProblem."""
    return {path: file.data for path, file in _collect(files, settings).items()}


def pack(files: Files | None, settings: TaskSettings, *, extra: Mapping[str, bytes] | None = None) -> bytes:
    """An uncompressed tar of the files, folders included. ``extra`` are further files. Raises FilesProblem."""
    found = {} if files is None else _collect(files, settings)
    found.update({path: _File(data) for path, data in (extra or {}).items()})
    return _tar(found)


def archive_of(files: Files, settings: TaskSettings) -> bytes:
    """``pack``, where files that cannot be packed make the task a failed one. Raises TaskFailed."""
    try:
        return pack(files, settings)
    except ValueError as error:
        raise TaskFailed(f"the task's files cannot be used: {error}") from error


def check_folder(folder: Path, settings: TaskSettings) -> None:
    """Raises FilesProblem where ``pack`` would, without reading the files."""
    for _ in _walk(folder, settings):
        pass


def _collect(files: Files, settings: TaskSettings) -> dict[str, _File]:
    found: dict[str, _File] = {}
    for folder in files.folders:
        for path, status in _walk(folder, settings):
            try:
                data = path.read_bytes()
            except OSError as error:
                raise FilesProblem(f"{path}: {error.strerror}") from None
            found[path.relative_to(folder).as_posix()] = _File(data, bool(status.st_mode & stat.S_IXUSR))
    for name, text in files.inline.items():
        found[name] = _File(text.encode())
    return found


def _walk(folder: Path, settings: TaskSettings) -> Iterator[tuple[Path, os.stat_result]]:
    """Regular files below ``folder``, sorted. What Python leaves behind when it runs them is no part of them."""
    count = size = 0
    pending = [folder]
    while pending:
        try:
            entries = sorted(pending.pop().iterdir(), reverse=True)
        except OSError as error:
            raise FilesProblem(f"{folder}: {error.strerror}") from None
        for path in entries:
            if path.name == "__pycache__":
                continue
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
                continue
            if not stat.S_ISREG(status.st_mode):
                kind = "a link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
                raise FilesProblem(f"{path} is {kind}")
            count += 1
            size += status.st_size
            if count > settings.max_folder_files:
                raise FilesProblem(f"{folder} has more than {settings.max_folder_files} files")
            if size > settings.max_folder_bytes:
                raise FilesProblem(f"{folder} is larger than {settings.max_folder_bytes} bytes")
            yield path, status


def _tar(found: Mapping[str, _File]) -> bytes:
    folders = {"/".join(parts[:n]) for parts in (path.split("/") for path in found) for n in range(1, len(parts))}
    for path in sorted(folders & found.keys()):
        raise FilesProblem(f"{path!r} is a file and a folder")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folders | found.keys()):
            info = tarfile.TarInfo(path)
            if path in folders:
                info.type = tarfile.DIRTYPE
                info.mode = 0o755
                archive.addfile(info)
                continue
            file = found[path]
            info.size = len(file.data)
            info.mode = 0o755 if file.executable else 0o644
            archive.addfile(info, io.BytesIO(file.data))
    return out.getvalue()
