"""Replaces every git repository of a work folder by one commit of its files as they stand.

Runs inside an agent's sandbox before the agent does. Argument: a JSON object with ``root``, the work folder, and
``program``, the folder of this program, which it removes.
Writes one JSON object: ``repositories`` (for each its ``path``, ``commit`` and number of ``files``), ``removed``
(what else was removed: stores elsewhere, leftovers of merges), ``kept`` (bare repositories that are files of
another one), ``verified_by`` (``git``, or ``its files`` where the image has no git); or ``problem``, a sentence,
and exit status 1.

What must hold: everything is read before anything is removed; everything is removed before anything is written.
So no object of before can be left in a repository. What is tracked stays tracked, whatever else is there stays
untracked. Nothing of a repository is run.

Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from .git_files import BLOB, COMMIT, GITLINK, LINK, PackWriter, TrackedPath, Unreadable, index_file, write_trees
from .repositories import GIT, Problem, Repository, find, inside, joined, shown, walk

WHO = b"Base <base@localhost> 946684800 +0000"
BRANCH = b"main"
LEFTOVERS = (b".orig", b".rej")
"""Ends of the names of files that a merge or a patch leaves behind."""
GIT_S = 300


def remove(path: bytes) -> None:
    """Raises Problem where something stays. A mount stays as an empty folder."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    for above, folders, _ in os.walk(path):
        for name in [b"", *folders]:
            inner = os.path.join(above, name)
            if not os.path.islink(inner) and os.stat(inner).st_mode & 0o700 != 0o700:
                os.chmod(inner, 0o700)
    shutil.rmtree(path, ignore_errors=True)
    if os.path.isdir(path) and os.listdir(path):
        raise Problem(f"{shown(path)} holds history, can be read, and cannot be removed")


def remove_all(root: bytes, found: list[Repository], bare: list[bytes], report: dict[str, Any]) -> None:
    """Raises Problem, OSError."""
    tracked = {joined(each.place, entry.path) for each in found for entry in each.tracked or ()}
    above = {path[:end] for path in tracked for end in range(len(path)) if path[end : end + 1] == b"/"}
    for place in bare:
        if place in above:
            report["kept"].append(shown(place))
        else:
            remove(os.path.join(root, place))
            report["removed"].append(shown(place))
    for each in found:
        if os.path.lexists(os.path.join(root, each.place, GIT)):
            remove(os.path.join(root, each.place, GIT))
        for store in each.stores:
            if inside(root, store):
                raise Problem(f"the work folder lies in {shown(store)}, which holds history")
            if os.path.isdir(store) and os.access(store, os.R_OK | os.X_OK):
                remove(store)
                report["removed"].append(shown(store))
    for folder, _, files in walk(root):
        for name in files:
            path = joined(folder, name)
            if name.endswith(LEFTOVERS) and path not in tracked:
                os.unlink(os.path.join(root, path))
                report["removed"].append(shown(path))


def files_of(top: bytes, nested: set[bytes]) -> Iterator[TrackedPath]:
    """Every file, for a repository without an index."""
    for folder, folders, files in walk(top):
        if any(folder == one or folder.startswith(one + b"/") for one in nested):
            continue
        yield from (TrackedPath(joined(folder, name), 0, b"") for name in files)
        for name in [name for name in folders if joined(folder, name) in nested]:
            yield TrackedPath(joined(folder, name), GITLINK, b"")


def write(root: bytes, each: Repository, nested: dict[bytes, bytes]) -> None:
    """``nested``: commits by the place of the repositories below, relative to this one. Raises Unreadable,
    OSError."""
    top = os.path.join(root, each.place)
    store = os.path.join(top, GIT)
    for folder in (b"objects/pack", b"objects/info", b"refs/heads", b"refs/tags", b"info"):
        os.makedirs(os.path.join(store, folder), exist_ok=True)
    pack = PackWriter(os.fsdecode(os.path.join(store, b"objects/pack")))
    by_modes = each.settings.get("filemode", "true").lower() != "false"
    known: dict[bytes, bool] = {}
    entries: list[tuple[TrackedPath, os.stat_result | None]] = []
    listed = files_of(top, set(nested)) if each.tracked is None else each.tracked
    for old in sorted(listed, key=lambda entry: entry.path):
        if not is_folder(top, os.path.dirname(old.path), known):
            continue
        made = entry_of(top, old, nested, pack, by_modes)
        if made is not None:
            entries.append(made)
    tree = write_trees(pack, [entry for entry, _ in entries])
    each.commit = pack.add(COMMIT, b"tree %s\nauthor %s\ncommitter %s\n\nBase\n" % (_hex(tree), WHO, WHO))
    each.files = len(entries)
    pack.close()
    settings = {"repositoryformatversion": "0", "filemode": "true", "bare": "false", "logallrefupdates": "true"}
    lines = [f"\t{name} = {value}\n" for name, value in {**settings, **each.settings}.items()]
    put(store, b"config", ("[core]\n" + "".join(lines)).encode())
    put(store, b"refs/heads/" + BRANCH, _hex(each.commit) + b"\n")
    put(store, b"HEAD", b"ref: refs/heads/" + BRANCH + b"\n")
    for name, text in each.info.items():
        if text:
            put(store, b"info/" + name, text + b"\n")
    put(store, b"index", index_file(entries))


def _hex(object_id: bytes) -> bytes:
    return object_id.hex().encode()


def put(store: bytes, name: bytes, data: bytes) -> None:
    with open(os.path.join(store, name), "wb") as file:
        file.write(data)


def is_folder(top: bytes, folder: bytes, known: dict[bytes, bool]) -> bool:
    """True if every part of the path is a folder, and no link. ``known``: what was found before."""
    if folder not in known:
        there = is_folder(top, os.path.dirname(folder), known) if folder else True
        path = os.path.join(top, folder)
        known[folder] = there and os.path.isdir(path) and (not folder or not os.path.islink(path))
    return known[folder]


def entry_of(
    top: bytes, old: TrackedPath, nested: dict[bytes, bytes], pack: PackWriter, by_modes: bool
) -> tuple[TrackedPath, os.stat_result | None] | None:
    """The new entry of a path, whose content is put into the pack; None: there is no such file any more."""
    path = os.path.join(top, old.path)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        commit = nested.get(old.path, old.object_id)
        return (TrackedPath(old.path, GITLINK, commit), None) if old.mode == GITLINK and any(commit) else None
    if stat.S_ISLNK(status.st_mode):
        return TrackedPath(old.path, LINK, pack.add(BLOB, os.readlink(path))), status
    if not stat.S_ISREG(status.st_mode) or not os.access(path, os.R_OK):
        return None
    runs = status.st_mode & stat.S_IXUSR if by_modes or not old.mode else old.mode & stat.S_IXUSR
    with open(path, "rb") as file:
        return TrackedPath(old.path, 0o100755 if runs else 0o100644, pack.add_file(file)), status


def verify(root: bytes, found: list[Repository]) -> str:
    """Looks for what should not be there; by git itself, if the image has it. Raises Problem."""
    places = {each.place for each in found}
    for folder, folders, files in walk(root):
        if (GIT in folders or GIT in files) and folder not in places:
            raise Problem(f"{shown(folder)} has become a repository meanwhile")
    for each in found:
        packs = os.path.join(root, each.place, GIT, b"objects", b"pack")
        if sorted(name.rpartition(b".")[2] for name in os.listdir(packs)) != [b"idx", b"pack"]:
            raise Problem(f"the repository {shown(each.place)} has other objects than those of its commit")
    git = shutil.which("git")
    if git is None:
        return "its files"
    for each in found:
        said = asked(git, os.path.join(root, each.place), "cat-file", "--batch-all-objects", "--batch-check")
        if said is None:
            return "its files"
        commits = [line.split()[0] for line in said.splitlines() if line.split()[1:2] == [b"commit"]]
        if commits != [_hex(each.commit)]:
            raise Problem(f"git sees {len(commits)} commits in the repository {shown(each.place)}")
    return "git"


def asked(git: str, top: bytes, *words: str) -> bytes | None:
    """Output of a git command; None where it fails."""
    env = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    argv = [git, "--git-dir", os.fsdecode(os.path.join(top, GIT)), *words]
    done = subprocess.run(argv, cwd="/", env=env, capture_output=True, timeout=GIT_S, check=False)
    return done.stdout if done.returncode == 0 else None


def replace(root: bytes) -> dict[str, Any]:
    """Raises Problem, Unreadable, OSError."""
    report: dict[str, Any] = {"repositories": [], "removed": [], "kept": []}
    found, bare = find(root)
    remove_all(root, found, bare, report)
    # A linked worktree below the root went with its repository.
    found = [each for each in found if each.alive and os.path.isdir(os.path.join(root, each.place))]
    for each in sorted(found, key=lambda one: one.place.count(b"/") if one.place else -1, reverse=True):
        inner = each.place + b"/" if each.place else b""
        nested = {
            one.place[len(inner) :]: one.commit for one in found if one.commit and one.place.startswith(inner)
        }
        write(root, each, nested)
        one = {"path": shown(each.place), "commit": each.commit.hex(), "files": each.files}
        report["repositories"].append(one)
    report["verified_by"] = verify(root, found)
    return report


def main() -> int:
    config = json.loads(sys.argv[1])
    try:
        report = replace(os.fsencode(config["root"]))
    except (Problem, Unreadable, OSError, subprocess.SubprocessError) as error:
        json.dump({"problem": str(error)}, sys.stdout)
        return 1
    finally:
        shutil.rmtree(config["program"], ignore_errors=True)
    json.dump(report, sys.stdout)
    return 0
