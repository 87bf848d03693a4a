"""Applies what an agent changed to a clean copy of its task. Runs inside the grading sandbox, before any test.

Reads a JSON object from stdin: ``work`` (tar of the agent's work folder), ``root`` (the clean work folder),
``shared`` (a folder to make, open to all), ``protected`` (globs), ``git`` (whether the state of git's own folders
is work; else they stay as they are, and nothing is said of them), ``not_work`` (names in the root of which the
same holds), ``max_changed``, ``max_shown``. Writes one JSON object to stdout: what was added, changed and deleted,
what was left out and why; or ``refused``, a sentence, and exit status 3.

What must hold: the archive is only read, member by member; nothing of it is unpacked by its own names, followed
as a link, or run. Only regular files, folders and links that stay in the work folder are taken over. Names that
Python or pytest act on by themselves (``acts_at_import``), what git acts on (``acts_in_git``), and paths that the
task protects, stay as they are in the clean copy.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat
import sys
import tarfile
from typing import Any

REFUSED = 3
LEFT_OUT_NAMES = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "__pycache__")
LEFT_OUT_STEMS = ("sitecustomize", "usercustomize")
LEFT_OUT_SUFFIXES = (".pth", ".pyc", ".pyo")
GIT = ".git"
GIT_ACTS = ("hooks", "config", "config.worktree", "commondir")
"""In a folder of git: what runs programs, and what leads to other folders with such files."""
GIT_NESTED = ("modules", "worktrees")
KINDS = ("added", "changed", "deleted")
CHUNK = 1 << 16
SHOWN_PATH = 200
FILE, FOLDER, LINK = "file", "folder", "link"
PROTECTED = "protected by the task"


class Refused(Exception):
    """The work cannot be judged; it scores 0."""


class DiffLimits:
    """Bounds of one diff."""

    def __init__(self, protected: list[str], max_changed: int) -> None:
        self.protected = protected
        self.max_changed = max_changed


class DiffEntry:
    """One path of the clean copy or of the work. ``member`` is None for the clean copy."""

    def __init__(self, kind: str, target: str, executable: bool, member: tarfile.TarInfo | None) -> None:
        self.kind = kind
        self.target = target
        self.executable = executable
        self.member = member


def acts_at_import(path: str) -> bool:
    """True if Python or pytest reads the file by itself."""
    for part in path.split("/"):
        if part in LEFT_OUT_NAMES or part.split(".")[0] in LEFT_OUT_STEMS or part.endswith(LEFT_OUT_SUFFIXES):
            return True
    return False


def acts_in_git(path: str, entry: DiffEntry | None) -> bool:
    """True if git runs what the file says, or is led by it to another folder that says so."""
    parts = path.split("/")
    if GIT not in parts:
        return False
    rest = parts[parts.index(GIT) + 1 :]
    if not rest:
        return entry is not None and entry.kind != FOLDER
    return rest[0] in GIT_ACTS or (rest[0] in GIT_NESTED and any(part in GIT_ACTS for part in rest))


def without_git(entries: dict[str, DiffEntry]) -> dict[str, DiffEntry]:
    return {path: entry for path, entry in entries.items() if GIT not in path.split("/")}


def without(entries: dict[str, DiffEntry], names: list[str]) -> dict[str, DiffEntry]:
    return {path: entry for path, entry in entries.items() if path.split("/")[0] not in names}


def is_protected(path: str, globs: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(one, glob) for glob in globs for one in [path, *parents(path)])


def hides_protected(path: str, base: dict[str, DiffEntry], work: dict[str, DiffEntry], globs: list[str]) -> bool:
    """True if Python would import the path in the place of a module that the task protects: a package comes before
    a ``.py`` of its name, and so does a library (``.so``)."""
    for one in [path, *parents(path)]:
        folder, slash, name = one.rpartition("/")
        library = name.endswith(".so")
        module = f"{folder}{slash}{name.split('.')[0] if library else name}.py"
        if module not in base or not is_protected(module, globs):
            continue
        if library or work[one].kind == LINK or any(each.startswith(f"{one}/__init__.") for each in work):
            return True
    return False


def stays_inside(path: str, target: str, root: str) -> bool:
    """True if a link at ``path`` leads to a place below ``root``.

    ``..`` may only lead: after another part it would depend on what that part is (itself a link, perhaps).
    """
    if target.startswith("/"):
        if target != root and not target.startswith(root + "/"):
            return False
        depth, rest = 0, target[len(root) :].split("/")
    else:
        depth, rest = path.count("/"), target.split("/")
    leading = True
    for part in rest:
        if part in ("", "."):
            continue
        if part != "..":
            leading = False
            continue
        depth -= 1
        if not leading or depth < 0:
            return False
    return True


def scan(root: str) -> dict[str, DiffEntry]:
    """The clean side. What the agent could not have read is not there: it could not have been in its archive."""
    found: dict[str, DiffEntry] = {}
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except PermissionError:
            continue
        for entry in entries:
            path = folder + "/" + entry.name if folder else entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                found[path] = DiffEntry(LINK, os.readlink(entry.path), False, None)
            elif stat.S_ISDIR(mode):
                if os.access(entry.path, os.R_OK | os.X_OK):
                    found[path] = DiffEntry(FOLDER, "", False, None)
                    pending.append(path)
            elif stat.S_ISREG(mode) and os.access(entry.path, os.R_OK):
                found[path] = DiffEntry(FILE, "", bool(mode & stat.S_IXUSR), None)
    return found


def read_work(archive: tarfile.TarFile, report: dict[str, Any]) -> dict[str, DiffEntry]:
    """The agent's side: members of kinds that can be taken over, by plain path. Of twins the last counts."""
    found: dict[str, DiffEntry] = {}
    for member in archive:
        path = member.name
        while path.startswith("./"):
            path = path[2:]
        path = path.rstrip("/")
        if path in ("", "."):
            continue
        if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            leave_out(report, path, "not a plain path")
        elif member.isdir():
            found[path] = DiffEntry(FOLDER, "", False, member)
        elif member.issym():
            found[path] = DiffEntry(LINK, member.linkname, False, member)
        elif (member.isreg() or member.islnk()) and not member.issparse():
            found[path] = DiffEntry(FILE, "", bool(member.mode & stat.S_IXUSR), member)
        else:
            leave_out(report, path, "not a regular file")
    for path in list(found):
        for parent in parents(path):
            found.setdefault(parent, DiffEntry(FOLDER, "", False, None))
    return found


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def same(mine: DiffEntry | None, theirs: DiffEntry | None, archive: tarfile.TarFile, root: str, path: str) -> bool:
    if mine is None or theirs is None or mine.kind != theirs.kind:
        return mine is theirs
    if mine.kind == LINK:
        return mine.target == theirs.target
    if mine.kind == FOLDER:
        return True
    if mine.executable != theirs.executable:
        return False
    work = archive.extractfile(theirs.member) if theirs.member is not None else None
    if work is None:
        raise KeyError(path)
    with open(os.path.join(root, path), "rb") as clean:
        while True:
            one, other = clean.read(CHUNK), work.read(CHUNK)
            if one != other:
                return False
            if not one:
                return True


def leave_out(report: dict[str, Any], path: str, reason: str) -> None:
    report["left_out"].append([path, reason])


def refusal(
    path: str, base: dict[str, DiffEntry], work: dict[str, DiffEntry], root: str, protected: list[str]
) -> str | None:
    """Reason why a change is not taken over; None: it is."""
    theirs = work.get(path)
    if acts_at_import(path):
        return "acts at import"
    if acts_in_git(path, theirs):
        return "git acts on it"
    if is_protected(path, protected):
        return PROTECTED
    if theirs is None:
        return None
    if hides_protected(path, base, work, protected):
        return "takes the place of a module that the task protects"
    if theirs.kind == LINK and not stays_inside(path, theirs.target, root):
        return "a link that leaves the work folder"
    return "below a file or a link" if above(path, work) else None


def compare(
    base: dict[str, DiffEntry],
    work: dict[str, DiffEntry],
    archive: tarfile.TarFile,
    root: str,
    limits: DiffLimits,
    report: dict[str, Any],
) -> None:
    """Fills ``report`` with the paths that are to change."""
    for path in sorted(base.keys() | work.keys()):
        mine, theirs = base.get(path), work.get(path)
        try:
            if same(mine, theirs, archive, root, path):
                continue
        except KeyError:
            leave_out(report, path, "a hard link to nothing")
            continue
        reason = refusal(path, base, work, root, limits.protected)
        if reason is not None:
            # A repository's own files change with every command of git; who protects them needs no list of them.
            if reason != PROTECTED or ".git" not in path.split("/"):
                leave_out(report, path, reason)
        elif theirs is None:
            report["deleted"].append(path)
        else:
            report["added" if mine is None else "changed"].append(path)
    total = sum(len(report[kind]) for kind in KINDS)
    if total > limits.max_changed:
        raise Refused(f"the work changes {total} files; at most {limits.max_changed} may be")


def above(path: str, work: dict[str, DiffEntry]) -> list[str]:
    """The path's parents that the work says are no folders."""
    return [parent for parent in parents(path) if parent in work and work[parent].kind != FOLDER]


def apply(
    base: dict[str, DiffEntry],
    work: dict[str, DiffEntry],
    archive: tarfile.TarFile,
    root: str,
    report: dict[str, Any],
) -> None:
    """Deletes first and makes links last, so that nothing is ever written through a link of the work."""
    gone = [
        *report["deleted"],
        *(p for p in report["changed"] if base[p].kind != FOLDER or work[p].kind != FOLDER),
    ]
    for path in sorted(gone, reverse=True):
        full = os.path.join(root, path)
        if base[path].kind != FOLDER:
            os.unlink(full)
        elif not os.listdir(full):
            # One that still holds something was left with what is left out of the diff.
            os.rmdir(full)
    coming = sorted(report["added"] + report["changed"], key=lambda path: (work[path].kind == LINK, path))
    for path in coming:
        make(path, work[path], archive, root, report)


def make(path: str, entry: DiffEntry, archive: tarfile.TarFile, root: str, report: dict[str, Any]) -> None:
    folder = root
    for part in path.split("/")[:-1]:
        folder = os.path.join(folder, part)
        if not os.path.lexists(folder):
            os.mkdir(folder)
        elif os.path.islink(folder) or not os.path.isdir(folder):
            leave_out(report, path, "below a file or a link")
            return
    full = os.path.join(root, path)
    if os.path.lexists(full):
        if entry.kind != FOLDER or os.path.islink(full) or not os.path.isdir(full):
            leave_out(report, path, "what is there cannot be replaced")
        return
    if entry.kind == FOLDER:
        os.mkdir(full)
    elif entry.kind == LINK:
        os.symlink(entry.target, full)
    else:
        try:
            source = archive.extractfile(entry.member) if entry.member is not None else None
        except KeyError:
            source = None
        if source is None:
            leave_out(report, path, "a hard link to nothing")
            return
        with open(full, "xb") as out:
            while True:
                data = source.read(CHUNK)
                if not data:
                    break
                out.write(data)
        os.chmod(full, 0o755 if entry.executable else 0o644)


def open_to_tests(root: str) -> None:
    """Whoever runs the tests may read and write all of it: it is a copy, and programs write where they stand."""
    for folder, _, names in os.walk(root):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
                continue
            runs = 0o111 if status.st_mode & stat.S_IXUSR else 0
            os.chmod(path, stat.S_IMODE(status.st_mode) & 0o777 | 0o666 | runs)


def make_shared(folder: str) -> None:
    """A folder for temporary files of what judges and of the work: nobody renames what is another's there."""
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o1777)


def shown(report: dict[str, Any], count: int) -> dict[str, Any]:
    counts = {kind: len(paths) for kind, paths in report.items()}
    first: dict[str, Any] = {kind: [path[:SHOWN_PATH] for path in report[kind][:count]] for kind in KINDS}
    first["left_out"] = [[path[:SHOWN_PATH], reason] for path, reason in report["left_out"][:count]]
    return {**first, "counts": counts}


def main() -> int:
    config = json.load(sys.stdin)
    root = config["root"].rstrip("/") or "/"
    report: dict[str, Any] = {"added": [], "changed": [], "deleted": [], "left_out": []}
    limits = DiffLimits(config["protected"], config["max_changed"])
    os.umask(0o022)
    if config["work"] is None:  # a copy that is judged as it is
        open_to_tests(root)
        json.dump(shown(report, config["max_shown"]), sys.stdout)
        return 0
    try:
        make_shared(config["shared"])  # for which the work may have left no room
        # "r:" is an archive as it is: nothing is decompressed.
        with tarfile.open(config["work"], "r:", errors="surrogateescape") as archive:
            base, work = scan(root), read_work(archive, report)
            if not config["git"]:
                base, work = without_git(base), without_git(work)
            base, work = without(base, config["not_work"]), without(work, config["not_work"])
            compare(base, work, archive, root, limits, report)
            apply(base, work, archive, root, report)
        open_to_tests(root)
    except Exception as error:  # noqa: BLE001 - whatever reading the work raises, the work has brought about
        reason = str(error) if isinstance(error, Refused) else f"the work cannot be taken over: {error}"
        json.dump({"refused": reason[:500], **shown(report, config["max_shown"])}, sys.stdout)
        return REFUSED
    finally:
        os.unlink(config["work"])
    json.dump(shown(report, config["max_shown"]), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
