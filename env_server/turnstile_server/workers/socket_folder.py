"""The sockets between the process in front and its workers, in a folder that nobody else can enter.

The folder lies in the temporary folder, because sockets need short paths. What must hold: no server leaves its
folder there for ever; one that is killed cannot remove it, so where it is is noted in the data directory, and the
next server there, which holds the data directory's lock, removes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path

from turnstile_server.errors import StartupError

_LOG = logging.getLogger(__name__)
PREFIX = "turnstile-w-"
NOTE = "sockets"
"""The file, in the folder of the workers, that says where the sockets of a server are."""
_NOTE_BYTES = 4096


def private_folder(sockets: ExitStack, note: Path | None = None) -> Path:
    """A new folder for the workers' sockets, which ``sockets`` removes. ``note``: the file that says where it is;
    the folder that it names so far is removed: the caller holds the lock, so its server has ended. Raises
    StartupError."""
    try:
        folder = Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(6)}"
        if note is not None:
            _remove_earlier(note)
            _write(note, folder)
            sockets.callback(note.unlink, missing_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise StartupError(f"no temporary folder can be made for the workers' sockets: {error}") from error
    sockets.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _write(note: Path, folder: Path) -> None:
    try:
        note.write_bytes(os.fsencode(folder))
    except OSError as error:  # a full disk keeps no server from starting
        _LOG.warning("%s cannot be written (%s): if this server is killed, %s stays", note, error, folder)


def _remove_earlier(note: Path) -> None:
    with contextlib.suppress(OSError), note.open("rb") as file:
        earlier = Path(os.fsdecode(file.read(_NOTE_BYTES)))
        if not earlier.name.startswith(PREFIX) or earlier.parent != Path(tempfile.gettempdir()):
            return
        found = earlier.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(earlier, ignore_errors=True)


def unix_socket(path: Path, sockets: ExitStack) -> socket.socket:
    """A listening Unix socket. Raises StartupError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sockets.callback(listening.close)
    try:
        listening.bind(str(path))
        listening.listen(1024)
    except OSError as error:
        raise StartupError(f"the workers' socket {path} cannot be made: {error}; set TMPDIR") from error
    listening.setblocking(False)
    return listening
