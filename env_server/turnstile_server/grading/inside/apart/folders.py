"""The folders that a check and the work have in common, kept equal over the wire: what changed on one side since
it was last equal is told to the other.

What must hold on the check's side (``own``), where the other side is the work's: a change names a path below one
of the folders, through no link; what is there and was never told to the other side is neither replaced nor
removed; what arrives is a folder, or a regular file with its bytes. So a link that the work makes is told as what
it leads to, if that lies in these folders: the check may later write what is to be compared where a link leads.

A file that the other side's user could not read is not told. Sockets, pipes and devices are not, either.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from .wire import CHUNK, FILES, Wire, WireBroken

_READABLE, _PASSABLE = stat.S_IROTH, stat.S_IXOTH
_MOST_PATH = 4096
_SHORTEST_PAUSE_S, _SHARE = 0.5, 0.1
"""Between two looks while a program runs, and most of the time that they take."""
_MOST_BEHIND_LINKS = 10_000
"""Paths that are told of what lies behind links to folders."""
CHANGES = frozenset(("file", "dir", "link", "gone", "changed"))
"""Frames that are this module's."""


class _Entry(NamedTuple):
    """What is known of a path that both sides have."""

    kind: str
    """``file``, ``dir`` or ``link``."""
    mark: tuple[Any, ...]
    """Differs when it has changed."""


class _Seen(NamedTuple):
    """What was found at a path."""

    entry: _Entry
    open_to_others: bool
    """Another user could read it, or enter it."""
    number: int
    """Of the file; all folders are of one file system, or of few."""
    by_link: bool = False


class SharedFolders:
    """``roots``: absolute paths. ``own``: this is the check's side. Both sides begin equal."""

    def __init__(self, roots: Sequence[str], wire: Wire, own: bool) -> None:
        self._roots = [os.path.normpath(root) for root in roots]
        self._wire = wire
        self._own = own
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._coming: dict[str, tuple[int, str]] = {}
        """Files that arrive in parts: descriptor and temporary path."""
        self._known: dict[str, _Entry] = {}
        self._known = self._scan(everything=True)

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

    @contextlib.contextmanager
    def kept_equal(self) -> Iterator[None]:
        """Tells changes now and then until the block ends: a server's log, a file that is waited for."""
        over = threading.Event()
        thread = threading.Thread(target=self._keep_equal, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _keep_equal(self, over: threading.Event) -> None:
        pause = _SHORTEST_PAUSE_S
        while not over.wait(pause):
            began = time.monotonic()
            try:
                self.send_changes()
            except WireBroken:
                return
            pause = max(_SHORTEST_PAUSE_S, (time.monotonic() - began) / _SHARE)

    def take(self, header: Mapping[str, Any], payload: bytes) -> None:
        """One change of the other side's. What may not be is passed over."""
        do, path = header["do"], header.get("path", "")
        with self._lock, contextlib.suppress(OSError):
            if do == "changed" or not self._is_ours(path):
                pass
            elif do == "gone":
                self._remove(path)
            elif do == "dir":
                self._make_folder(path, int(header["mode"]))
            elif do == "link":
                self._make_link(path, str(header["target"]))
            else:
                self._take_part(path, header, payload)
        if do == "file":
            self._wire.took(FILES, len(payload))

    # What is here.

    def _scan(self, *, everything: bool = False) -> dict[str, _Entry]:
        """Every path below the folders, folders before what is in them; on the check's side without what it keeps
        to itself. ``everything``: with that, and links as links."""
        found: dict[str, _Entry] = {}
        behind_links = 0
        # With the numbers of the folders above, from the first behind a link on: none is told below itself.
        waiting: list[tuple[str, frozenset[int]]] = [(root, frozenset()) for root in self._roots]
        while waiting:
            folder, above = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for each in sorted(entries, key=lambda one: one.name):
                    seen = self._look(each, everything)
                    if seen is None:
                        continue
                    behind = above
                    if above or seen.by_link:
                        if seen.number in above or behind_links >= _MOST_BEHIND_LINKS:
                            continue
                        behind_links += 1
                        behind = above | {seen.number}
                    found[each.path] = seen.entry
                    if seen.entry.kind == "dir":
                        waiting.append((each.path, behind))
        return found

    def _look(self, each: os.DirEntry[str], everything: bool) -> Optional[_Seen]:  # noqa: UP045
        """None for what is not told."""
        path = each.path
        if any(path == place for _, place in self._coming.values()):
            return None
        try:
            seen = _seen(path, each.stat(follow_symlinks=False))
            is_link = seen is not None and seen.entry.kind == "link" and not (self._own or everything)
            # One that both sides have had from the beginning, or that the check has made, stays one.
            if seen is not None and is_link and not self._same(path, seen.entry):
                seen = _seen(path, os.stat(path)) if self._lies_within(path) else None
                seen = None if seen is None else seen._replace(by_link=True)
        except OSError:
            return None
        if seen is None or not _encodable(path):
            return None
        told = everything or not self._own or seen.open_to_others or self._same(path, seen.entry)
        return seen if told else None

    def _lies_within(self, path: str) -> bool:
        """What a link leads to is in the folders."""
        return self._root_of(os.path.realpath(path)) is not None

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

    def _make_link(self, path: str, target: str) -> None:
        """Of the check's; the work's side sends none."""
        if not self._own:
            _unlink(path)
            os.symlink(target, path)
            self._note(path)

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
        seen = _seen(path, os.lstat(path))
        if seen is not None:
            self._known[path] = seen.entry


def _seen(path: str, status: os.stat_result) -> Optional[_Seen]:  # noqa: UP045
    """What a path is; None for what is never told."""
    mode, number = stat.S_IMODE(status.st_mode), status.st_ino
    if stat.S_ISREG(status.st_mode):
        mark = (mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, number)
        return _Seen(_Entry("file", mark), bool(mode & _READABLE), number)
    if stat.S_ISDIR(status.st_mode):
        return _Seen(_Entry("dir", (mode,)), bool(mode & _PASSABLE), number)
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(path)
        return _Seen(_Entry("link", (target, number)), True, number) if _encodable(target) else None
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
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:
        with contextlib.suppress(OSError):
            closed = os.stat(path)
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
