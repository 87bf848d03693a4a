"""Keeps the work folder as the task ships it, and puts it back: for the canary of a command that judges.

``start_state.py keep|empty|back FOLDER``, started in the work folder. Exit status 0: done. ``empty`` removes what
its user may remove, whatever the modes; each user of the sandbox has files of its own there. ``back`` needs an
empty folder, and opens what it puts there to all, as it was for the first run.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys


def keep(folder: str) -> None:
    """Copies, or links where there is no room for copies: the diff makes changed files anew. Raises OSError."""
    try:
        shutil.copytree(".", folder, symlinks=True, ignore=special)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(".", folder, symlinks=True, ignore=special, copy_function=os.link)


def special(above: str, names: list[str]) -> list[str]:
    """Pipes, sockets, devices: they cannot be copied."""
    modes = {name: os.lstat(os.path.join(above, name)).st_mode for name in names}
    return [
        name
        for name, mode in modes.items()
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    ]


def empty() -> None:
    for above, folders, _ in os.walk("."):
        for name in folders:
            path = os.path.join(above, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o777)  # what is another user's in it is that user's to remove
    for above, folders, files in os.walk(".", topdown=False):
        for name in [*files, *folders]:
            path = os.path.join(above, name)
            with contextlib.suppress(OSError):
                if os.path.isdir(path) and not os.path.islink(path):
                    os.rmdir(path)
                else:
                    os.unlink(path)


def back(folder: str) -> None:
    """Raises OSError."""
    if os.listdir("."):
        raise OSError("the work folder is not empty")
    shutil.copytree(folder, ".", symlinks=True, dirs_exist_ok=True)
    for above, folders, files in os.walk("."):
        for path in [os.path.join(above, name) for name in [*folders, *files]]:
            if not os.path.islink(path):
                mode = stat.S_IMODE(os.lstat(path).st_mode)
                os.chmod(path, mode | 0o666 | (0o111 if mode & stat.S_IXUSR else 0))
    os.chmod(".", 0o777)


def main() -> int:
    action, folder = sys.argv[1:]
    try:
        if action == "empty":
            empty()
        else:
            (keep if action == "keep" else back)(folder)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
