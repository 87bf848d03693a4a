"""The folders that a check and the work have in common, kept equal over the wire: what changed on one side since
it was last equal is told to the other.

What must hold on the check's side (``own``), where the other side is the work's: a change names a path below one
of the folders, through no link; what is there and was never told to the other side is neither replaced nor
removed; a file arrives as a regular one with its bytes, and one that the check made arrives nowhere by another
name: a link stays one only where it leads to something that came from the work.

A file that the other side's user could not read is not told. Sockets, pipes and devices are not, either.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from .wire import CHUNK, FILES, Wire

_READABLE, _PASSABLE = stat.S_IROTH, stat.S_IXOTH
_MOST_PATH = 4096
CHANGES = frozenset(("file", "dir", "link", "gone", "changed"))
"""Frames that are this module's."""


class _Entry(NamedTuple):
    """What is known of a path that both sides have."""

    kind: str
    """``file``, ``dir`` or ``link``."""
    mark: tuple[Any, ...]
    """Differs when it has changed."""
    of_check: bool
    """The check made it, or changed it."""


class SharedFolders:
    """``roots``: absolute paths. ``own``: this is the check's side. Both sides begin equal."""

    def __init__(self, roots: Sequence[str], wire: Wire, own: bool) -> None:
        self._roots = [os.path.normpath(root) for root in roots]
        self._wire = wire
        self._own = own
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._known: dict[str, _Entry] = {}
        self._known = {path: entry._replace(of_check=False) for path, entry in self._scan(everything=True).items()}
        self._coming: dict[str, tuple[int, str]] = {}
        """Files that arrive in parts: descriptor and temporary path."""
        self._links: dict[str, str] = {}
        """Links that wait until what they lead to is here: path to target."""

    def send_changes(self) -> None:
        """Tells the other side what changed here, and that this is all. Raises WireBroken."""
        with self._sending:
            with self._lock:
                found = self._scan()
                missing = [path for path in self._known if path not in found]
                changed = [path for path, entry in found.items() if not self._same(path, entry)]
                gone = [path for path in missing if not os.path.lexists(path)]
                for path in missing:  # what is there is this side's own from now on
                    del self._known[path]
                for path in changed:
                    self._known[path] = found[path]
            for path in sorted(gone, reverse=True):
                self._wire.send("gone", path=path)
            for path in changed:  # folders come before what is in them
                self._send(path, found[path])
            self._wire.send("changed")

    def take(self, header: Mapping[str, Any], payload: bytes) -> None:
        """One change of the other side's. What may not be is passed over."""
        do, path = header["do"], header.get("path", "")
        with self._lock, contextlib.suppress(OSError):
            if do == "changed":
                self._make_links()
            elif not self._is_ours(path):
                pass
            elif do == "gone":
                self._remove(path)
            elif do == "dir":
                self._make_folder(path, int(header["mode"]))
            elif do == "link":
                self._links[path] = str(header["target"])
            else:
                self._take_part(path, header, payload)
        if do == "file":
            self._wire.took(FILES, len(payload))

    # What is here.

    def _scan(self, *, everything: bool = False) -> dict[str, _Entry]:
        """Every path below the folders, folders before what is in them; on the check's side without what it keeps
        to itself. ``everything``: with that."""
        found: dict[str, _Entry] = {}
        waiting = list(reversed(self._roots))
        while waiting:
            folder = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for each in sorted(entries, key=lambda one: one.name):
                    with contextlib.suppress(OSError):
                        seen = _seen(each.path, each.stat(follow_symlinks=False), self._own)
                        if seen is None or not _encodable(each.path):
                            continue
                        entry, open_to_others = seen
                        if everything or not self._own or open_to_others or self._same(each.path, entry):
                            found[each.path] = entry
                            if entry.kind == "dir":
                                waiting.append(each.path)
        return found

    def _same(self, path: str, entry: _Entry) -> bool:
        known = self._known.get(path)
        return known is not None and known.mark == entry.mark

    def _send(self, path: str, entry: _Entry) -> None:
        if entry.kind == "dir":
            self._wire.send("dir", path=path, mode=entry.mark[0])
        elif entry.kind == "link":
            self._wire.send("link", path=path, target=entry.mark[0])
        else:
            for data, last, mode, changed_ns in _parts(path):
                self._wire.send_paid(FILES, "file", data, path=path, last=last, mode=mode, mtime_ns=changed_ns)

    # What comes.

    def _is_ours(self, path: object) -> bool:
        """The path lies below a folder, and everything above it there is a folder and no link."""
        if not isinstance(path, str) or len(path) > _MOST_PATH or "\0" in path or os.path.normpath(path) != path:
            return False
        return self._root_of(path) is not None and self._passes_no_link(path)

    def _root_of(self, path: str) -> Optional[str]:  # noqa: UP045
        return next((root for root in self._roots if path.startswith(f"{root}/")), None)

    def _passes_no_link(self, path: str) -> bool:
        """Below its root, everything above it is a folder. Raises OSError."""
        above = self._root_of(path) or ""
        for part in path[len(above) + 1 :].split("/")[:-1]:
            above = f"{above}/{part}"
            if not stat.S_ISDIR(os.lstat(above).st_mode):
                return False
        return True

    def _may_replace(self, path: str) -> bool:
        """Nothing is there, or something that both sides have had."""
        return not self._own or path in self._known or not os.path.lexists(path)

    def _remove(self, path: str) -> None:
        if path in self._known or not self._own:
            _unlink(path)
            self._known.pop(path, None)

    def _make_folder(self, path: str, mode: int) -> None:
        if not self._may_replace(path):
            return
        there = _mode_of(path)
        if there is None or not stat.S_ISDIR(there):
            if there is not None:
                os.unlink(path)
            os.mkdir(path)
        # One that another user made keeps its mode.
        with contextlib.suppress(PermissionError):
            os.chmod(path, mode & 0o777)
        self._note(path)

    def _make_links(self) -> None:
        """Those that may be, one that leads to another after that."""
        waiting, self._links = self._links, {}
        before = -1
        while len(waiting) != before:
            before = len(waiting)
            for path, target in list(waiting.items()):
                if not self._own or self._may_lead(path, target):
                    del waiting[path]
                    with contextlib.suppress(OSError):
                        self._make_link(path, target)

    def _make_link(self, path: str, target: str) -> None:
        if self._is_ours(path) and self._may_replace(path):
            _unlink(path)
            os.symlink(target, path)
            self._note(path)

    def _may_lead(self, path: str, target: str) -> bool:
        """A link leads to what came from the work, or was there before the check began."""
        if "\0" in target or len(target) > _MOST_PATH:
            return False
        leads = os.path.normpath(os.path.join(os.path.dirname(path), target))
        entry = self._known.get(leads)
        if entry is None or entry.of_check or leads == path or not self._passes_no_link(leads):
            return False
        if entry.kind != "dir":
            return True
        below = [name for name in self._known if name.startswith(f"{leads}/")]
        there = sum(len(folders) + len(files) for _, folders, files in os.walk(leads))
        return there == len(below) and not any(self._known[name].of_check for name in below)

    def _take_part(self, path: str, header: Mapping[str, Any], payload: bytes) -> None:
        """Raises OSError; the file is as it was then."""
        if path not in self._coming:
            if not self._may_replace(path):
                return
            place = f"{os.path.dirname(path)}/.turnstile-{secrets.token_hex(8)}"
            self._coming[path] = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), place
        descriptor, place = self._coming[path]
        try:
            left = memoryview(payload)
            while left:
                left = left[os.write(descriptor, left) :]
            if not header["last"]:
                return
            os.fchmod(descriptor, int(header["mode"]) & 0o777)
            moment = int(header["mtime_ns"])
            os.utime(descriptor, ns=(moment, moment))
            there = _mode_of(path)
            if there is not None and stat.S_ISDIR(there):
                os.rmdir(path)
            os.replace(place, path)
            self._note(path)
        except BaseException:
            _unlink(place)
            raise
        finally:
            if header["last"]:
                os.close(descriptor)
                del self._coming[path]

    def _note(self, path: str) -> None:
        """Both sides have it, as it is now."""
        seen = _seen(path, os.lstat(path), False)
        if seen is not None:
            self._known[path] = seen[0]


def _seen(path: str, status: os.stat_result, of_check: bool) -> Optional[tuple[_Entry, bool]]:  # noqa: UP045
    """What a path is, and whether another user could read it; None for what is not told."""
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode):
        mark = (mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        return _Entry("file", mark, of_check), bool(mode & _READABLE)
    if stat.S_ISDIR(status.st_mode):
        return _Entry("dir", (mode,), of_check), bool(mode & _PASSABLE)
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(path)
        return (_Entry("link", (target, status.st_ino), of_check), True) if _encodable(target) else None
    return None


def _encodable(text: str) -> bool:
    """It can cross in JSON. Names that are no UTF-8 cannot, and no check of ours names one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parts(path: str) -> Iterator[tuple[bytes, bool, int, int]]:
    """A regular file: its parts, whether one is the last, its mode, when it was changed (ns). Nothing where it is
    gone meanwhile; empty where this user cannot read it, who then is allowed what others are."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        with contextlib.suppress(OSError):
            closed = os.lstat(path)
            yield b"", True, (closed.st_mode & stat.S_IRWXO) * 0o111, closed.st_mtime_ns
        return
    except OSError:
        return
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return
        following = file.read(CHUNK) or b""
        while True:
            data, following = following, file.read(CHUNK) or b""
            yield data, not following, stat.S_IMODE(status.st_mode), status.st_mtime_ns
            if not following:
                return


def _mode_of(path: str) -> Optional[int]:  # noqa: UP045
    """None: there is nothing."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


def _unlink(path: str) -> None:
    """Whatever it is; a folder only where it is empty."""
    there = _mode_of(path)
    if there is None:
        return
    if stat.S_ISDIR(there):
        os.rmdir(path)
    else:
        os.unlink(path)
