"""The data directory: its secrets, and the name under which sandboxes know it.

A secret is made once per data directory, readable by its owner only (mode 600), and never written anywhere else.
The journal keeps the lock that gives a directory one server (``journal/``).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from turnstile_server.errors import StartupError

SECRET_FILE = "server.secret"
SECRET_BYTES = 32


def journal_folder(data_dir: Path) -> Path:
    return data_dir / "journal"


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


def private_file(path: Path, make: Callable[[], bytes]) -> bytes:
    """The bytes of ``path``; ``make`` gives those of a file that is not there yet. Raises StartupError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_private(path, make())
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot keep a secret in {path}: {error.strerror or error}.") from error


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
