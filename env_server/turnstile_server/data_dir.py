"""The data directory: whether it can be used, its secrets, and the name under which sandboxes know it.

``prepare_data_dir`` runs before anything else is opened, so that a folder that cannot be used is told in one
sentence: what is wrong with it, for which user, and what to run. A secret is made once per data directory,
readable by its owner only (mode 600), and never written anywhere else. The journal keeps the lock that gives a
directory one server (``journal/``).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from turnstile_server.errors import StartupError

_LOG = logging.getLogger(__name__)

SECRET_FILE = "server.secret"
SECRET_BYTES = 32
JOURNAL_LOCK = "lock"
"""The lock file in the journal's folder, which the journal makes and holds."""
WORKERS = "workers"
"""The folder of the worker processes' own data directories, and of the lock of the process in front of them."""
PROBE_BYTES = 64 << 10
"""Bytes written to test whether a folder takes files. A full disk often still takes an empty file."""
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
_ELSEWHERE = "or name another folder (--data-dir, TURNSTILE_DATA_DIR)"


def journal_folder(data_dir: Path) -> Path:
    return data_dir / "journal"


def work_folder(data_dir: Path) -> Path:
    """The folder of kept work, which can be judged again."""
    return data_dir / "work"


def snapshot_folder(data_dir: Path) -> Path:
    """The folder of sandbox snapshots."""
    return data_dir / "snapshots"


def replay_folder(data_dir: Path) -> Path:
    """The folder of recorded states of work folders."""
    return data_dir / "replay"


def replay_contents(replay: Path) -> Path:
    """In that folder: the contents of files, each once."""
    return replay / "contents"


def worker_folder(data_dir: Path, number: int) -> Path:
    """The data directory of one of several worker processes. The first one has that of the whole server, so that
    one process alone finds there what it needs."""
    return data_dir if number == 0 else data_dir / WORKERS / str(number)


def worker_folders(data_dir: Path) -> dict[int, Path]:
    """The data directories of the workers but the first that there were on ``data_dir``, by number: those whose
    journal has anything. Raises OSError."""
    folder, found = data_dir / WORKERS, {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.isascii() and path.name.isdigit() and has_records(path):
            found[int(path.name)] = path
    return dict(sorted(found.items()))


def whole_data_dir(data_dir: Path) -> Path:
    """The data directory of the whole server: of a worker's folder, the one that has the folders of all."""
    above, number = data_dir.parent, data_dir.name
    # The process in front has its lock there; a server of its own may have a folder of this name.
    is_worker_s = (
        above.name == WORKERS and number.isascii() and number.isdigit() and (above / JOURNAL_LOCK).exists()
    )
    return above.parent if is_worker_s else data_dir


def has_records(data_dir: Path) -> bool:
    """True if the journal has a segment. A worker that had no episode has a journal without one."""
    return any(journal_folder(data_dir).glob("*.tsj"))


def kept_folders(data_dir: Path) -> tuple[Path, ...]:
    """Folders beside the journal whose files count in its bounds of the disk."""
    return work_folder(data_dir), snapshot_folder(data_dir), replay_contents(replay_folder(data_dir))


def prepare_data_dir(data_dir: Path, min_free_bytes: int) -> None:
    """Makes the data directory unless it is there, and tries it: one file is written, synced and removed.

    Raises StartupError where the server's user cannot write to it, or to what an earlier server left in it. A disk
    that takes no bytes (full, read-only, I/O errors) is an error for a new directory only. Where there is a
    journal the server starts: what it holds can be read, exported and, unless the disk is read-only, deleted; new
    episodes and turns are refused until the disk takes them. That, and less than ``min_free_bytes``, is a warning.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno not in _DISK_ERRORS or not _has_served(data_dir):
            raise unusable(data_dir, error) from error
        _LOG.error(
            "%s The server starts, because what is there can be read and deleted; it takes no new episodes and "
            "turns until the disk takes records.",
            unusable(data_dir, error).message,
        )
    writable = not os.statvfs(data_dir).f_flag & os.ST_RDONLY
    try:
        for path, needed in _left_by_an_earlier_server(data_dir):
            problem = _strange(path, data_dir)
            if problem is None and not os.access(path, needed if writable else needed & ~os.W_OK):
                problem = _closed(path)
            if problem is not None:
                raise StartupError(f"the data directory {data_dir} cannot be used: {problem}, {_ELSEWHERE}.")
    except OSError as error:
        raise StartupError(f"the data directory {data_dir} cannot be used: {error}.") from error
    status = os.statvfs(data_dir)
    free = status.f_bavail * status.f_frsize
    if free < min_free_bytes:
        _LOG.warning(
            "the data directory %s has %d MiB free, less than journal.min_free_bytes (%d MiB): turns are refused "
            "until space is freed (delete episodes, or set journal.retention_bytes)",
            data_dir,
            free >> 20,
            min_free_bytes >> 20,
        )


def _has_served(data_dir: Path) -> bool:
    """True if an earlier server left its secret and a journal. The next one makes no file to read them."""
    return (data_dir / SECRET_FILE).is_file() and (journal_folder(data_dir) / JOURNAL_LOCK).is_file()


def unusable(data_dir: Path, error: OSError, at: Path | None = None) -> StartupError:
    """The sentence for a data directory that refused a file: what is wrong, for which user, what to run.

    ``at``: the file or folder that refused; None: the directory itself, or what there is of its path.
    """
    at = _nearest(data_dir if at is None else at)
    what = f"the data directory {data_dir} cannot be written"
    if error.errno == errno.EROFS:
        return StartupError(
            f"{what}: it is on a read-only file system. Mount a volume or a folder there, without `:ro` (for a "
            f"container: `-v turnstile-data:/data`), {_ELSEWHERE}."
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StartupError(f"{what}: its disk, or the quota on it, is full. Free space there, {_ELSEWHERE}.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return StartupError(f"{what}: {_closed(at)}, {_ELSEWHERE}.")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return StartupError(f"{what}: {at} is a file, not a folder. Remove it, {_ELSEWHERE}.")
    return StartupError(f"{what}: {error.strerror or error}.")


def _left_by_an_earlier_server(data_dir: Path) -> Iterator[tuple[Path, int]]:
    """The files and folders of a server in the data directory, each with the access that it needs."""
    for path in sorted(data_dir.iterdir()):
        if path == journal_folder(data_dir):
            yield path, os.R_OK | os.W_OK | os.X_OK  # first, because it may be no folder
            needed = [file for file in path.iterdir() if file.name == JOURNAL_LOCK or file.suffix == ".tsj"]
            yield from ((file, os.R_OK | os.W_OK) for file in sorted(needed))
        elif path.suffix in (".secret", ".key"):
            yield path, os.R_OK


def _strange(path: Path, data_dir: Path) -> str | None:
    """Error text for a path of another kind than a server makes, with the remedy; else None. The caller continues
    it after a comma. A pipe in a file's place would block the start for ever."""
    if not path.exists():
        return f"{path} is a link that leads nowhere. Put back what it leads to, or remove it"
    if path == journal_folder(data_dir):
        return None if path.is_dir() else f"{path} is not a folder. Move it away"
    if path.name == JOURNAL_LOCK or path.is_file():
        return None
    return f"{path} is not a file. Move it away"


def _closed(path: Path) -> str:
    """Error text for a path that the server's user may not write: the reason, and the command to run. The caller
    continues it after a comma."""
    status = path.stat()
    user, group = os.geteuid(), os.getegid()
    why = (
        f"{path} belongs to uid {status.st_uid} (mode {stat.S_IMODE(status.st_mode):o}), and the server runs as "
        f"uid {user}"
    )
    if status.st_uid == user:
        return f"{why}. Run `chmod -R u+rwX {path}`"
    mend = f"Run `chown -R {user}:{group} {path}` (for a container: on the folder or volume that is mounted there)"
    if status.st_uid == 0:
        return f"{why}. {mend}"
    return f"{why}. {mend}, run the server as that user (`docker run --user {status.st_uid}:{status.st_gid}`)"


def _nearest(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    for candidate in (path, *path.parents):
        if os.path.lexists(candidate):
            return candidate
    return Path(os.sep)


def load_secret(data_dir: Path) -> bytes:
    """The 32 random bytes that episode keys are derived from, made at the first start.

    Raises StartupError when the file cannot be read or written, or is damaged.
    """
    path = data_dir / SECRET_FILE
    secret = private_file(path, lambda: secrets.token_bytes(SECRET_BYTES))
    if len(secret) != SECRET_BYTES:
        raise StartupError(
            f"{path} holds {len(secret)} bytes instead of {SECRET_BYTES}. Restore it, or delete it to get a new "
            "one (keys of running episodes die)."
        )
    return secret


def owner_of(data_dir: Path) -> str:
    """The label of the sandboxes of this data directory: 12 hex digits. The next server on the directory removes
    sandboxes with this label that an earlier one left.

    Derived from the secret, because one Docker engine may serve several machines with folders of the same name.
    Raises StartupError.
    """
    return hashlib.sha256(b"owner" + load_secret(data_dir)).hexdigest()[:12]


def server_id_of(data_dir: Path) -> str:
    """The identity of the server that has this data directory, wherever it listens. Derived from the secret, as
    ``owner_of``. Raises StartupError."""
    return "srv_" + hashlib.sha256(b"server" + load_secret(data_dir)).hexdigest()[:16]


def private_file(path: Path, make: Callable[[], bytes]) -> bytes:
    """The bytes of ``path``; ``make`` gives those of a file that is not there yet. Raises StartupError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_private(path, make())
        return path.read_bytes()
    except OSError as error:
        raise unusable(path.parent, error, path) from error


def _write_private(path: Path, data: bytes) -> None:
    """Writes the whole file or none, and never replaces one that another process made first."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            return
    finally:
        partial.unlink(missing_ok=True)
