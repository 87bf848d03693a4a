"""Finds the git repositories of a folder, with all places that hold their history. Changes nothing.

Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .git_files import TrackedPath, Unreadable, read_index

GIT = b".git"
KEPT_SETTINGS = ("filemode", "autocrlf", "eol", "symlinks", "ignorecase")
"""Settings of the section ``core`` that decide whether a file counts as changed."""
KEPT_INFO = (b"exclude", b"attributes")


class Problem(Exception):
    """The history cannot be removed. A sentence."""


class Repository:
    """A repository of before: where it is, and what it tracked. ``place``: its folder, relative to the root."""

    alive = False
    """False: git takes its ``.git`` for no repository, so there is nothing to replace it by."""

    def __init__(self, place: bytes) -> None:
        self.place = place
        self.tracked: list[TrackedPath] | None = None
        """None: it had no index, so every file counts."""
        self.settings: dict[str, str] = {}
        self.info: dict[bytes, bytes] = {}
        self.stores: list[bytes] = []
        """Folders to remove: its data, wherever they are."""
        self.commit = b""
        self.files = 0


def is_store(path: bytes, common: bytes) -> bool:
    """True if git takes the folder for a repository's data, with what it shares in ``common``."""
    return os.path.lexists(os.path.join(path, b"HEAD")) and all(
        os.path.isdir(os.path.join(common, name)) for name in (b"objects", b"refs")
    )


def common_of(store: bytes) -> bytes:
    """The folder of a linked worktree's repository; for any other store its own folder."""
    return os.path.realpath(os.path.join(store, read_text(os.path.join(store, b"commondir")) or b"."))


def walk(root: bytes) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """Folders below ``root``, never those of git: path relative to it, folders, files and links."""
    pending = [b""]
    while pending:
        folder = pending.pop()
        folders: list[bytes] = []
        files: list[bytes] = []
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except PermissionError:
            continue
        for entry in entries:
            (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
        yield folder, folders, files
        pending += [joined(folder, name) for name in folders if name != GIT]


def joined(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def read_text(path: bytes) -> bytes:
    """The one line of a file; empty where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).strip()
    except (FileNotFoundError, NotADirectoryError):
        return b""


def settings_of(config: bytes) -> tuple[dict[str, str], int]:
    """The settings that are kept of a configuration, and the number of bytes of an object's id."""
    section, kept, id_bytes = "", {}, 20
    for line in map(str.strip, config.decode("utf-8", "replace").splitlines()):
        if line.startswith("["):
            section = line.strip("[]").lower()
            continue
        name, _, value = (part.strip() for part in line.partition("="))
        if section == "core" and name.lower() in KEPT_SETTINGS and value.isalnum():
            kept[name.lower()] = value
        if section == "extensions" and name.lower() == "objectformat" and value == "sha256":
            id_bytes = 32
    return kept, id_bytes


def store_of(top: bytes) -> bytes | None:
    """The folder with the data of the repository in ``top``; None where its ``.git`` leads nowhere."""
    path = os.path.join(top, GIT)
    if os.path.isfile(path):
        said = read_text(path)
        path = os.path.join(top, said[len(b"gitdir:") :].strip()) if said.startswith(b"gitdir:") else b""
    return os.path.realpath(path) if path and os.path.isdir(path) else None


def look(root: bytes, place: bytes) -> Repository:
    """Reads what is needed of a repository. Raises Problem."""
    found = Repository(place)
    store = store_of(os.path.join(root, place))
    if store is None:
        return found
    common = common_of(store)
    found.stores = [store, common]
    if not is_store(store, common):
        return found
    found.alive = True
    if common != store and os.path.basename(common) == GIT and os.listdir(os.path.dirname(common)) != [GIT]:
        main = os.path.dirname(common)
        if not inside(main, root):
            raise Problem(
                f"{shown(place)} is a linked worktree of {shown(main)}, whose files may be of any commit"
            )
    pending, seen = [os.path.join(common, b"objects")], set()
    while pending:
        objects = os.path.realpath(pending.pop())
        if objects in seen:
            continue
        seen.add(objects)
        for line in read_text(os.path.join(objects, b"info", b"alternates")).splitlines():
            other = os.path.join(objects, line.strip())
            if line.strip() and not line.startswith(b"#") and os.path.isdir(other):
                pending.append(other)
                found.stores.append(os.path.realpath(other))
    worktrees = os.path.join(common, b"worktrees")
    for name in os.listdir(worktrees) if os.path.isdir(worktrees) else ():
        other = os.path.dirname(read_text(os.path.join(worktrees, name, b"gitdir")))
        if (
            other
            and os.path.isdir(other)
            and os.path.realpath(other) != os.path.realpath(os.path.join(root, place))
        ):
            found.stores.append(os.path.realpath(other))
    found.settings, id_bytes = settings_of(read_text(os.path.join(common, b"config")))
    for name in KEPT_INFO:
        found.info[name] = read_text(os.path.join(common, b"info", name))
    found.tracked = tracked_of(store, id_bytes, place)
    return found


def tracked_of(store: bytes, id_bytes: int, place: bytes) -> list[TrackedPath] | None:
    by_path: dict[bytes, TrackedPath] = {}
    name: str | None = "index"
    there = False
    while name is not None:
        try:
            with open(os.path.join(store, os.fsencode(name)), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            break
        there = True
        try:
            entries, name = read_index(data, id_bytes)
        except Unreadable as error:
            raise Problem(f"the repository {shown(place)}: {error}") from None
        for entry in entries:
            by_path.setdefault(entry.path, entry)
            if id_bytes != 20:
                entry.object_id = b"\0" * 20
    return list(by_path.values()) if there else None


def inside(path: bytes, folder: bytes) -> bool:
    path, folder = os.path.realpath(path), os.path.realpath(folder)
    return path == folder or path.startswith(folder.rstrip(b"/") + b"/")


def find(root: bytes) -> tuple[list[Repository], list[bytes]]:
    """The repositories with files, and the places of bare ones."""
    found, bare = [], []
    above = os.path.realpath(root)
    while above != os.path.dirname(above):
        above = os.path.dirname(above)
        if store_of(above) is not None:
            raise Problem(f"the work folder lies in the repository {shown(above)}, whose history can be read")
    for folder, folders, files in walk(root):
        if GIT in folders or GIT in files:
            found.append(look(root, folder))
        elif b"HEAD" in files and is_store(os.path.join(root, folder), os.path.join(root, folder)):
            if not folder:
                raise Problem("the work folder itself is a bare repository: it has no files to make a commit of")
            bare.append(folder)
    return found, bare


def shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace") or "."
