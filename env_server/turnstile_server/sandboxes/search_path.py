"""The search path for a user's programs: the image's PATH, for the user that judges without folders of the work.

An image may have the work folder on its PATH (``/testbed/.venv/bin``). There the work could put a ``python3``, a
``sh`` or a ``test``, and so be its own judge.
"""

from __future__ import annotations

from posixpath import normpath

from turnstile_server.sandboxes.protocol import User


def search_path(path: str, workdir: str, user: User) -> str:
    """``path`` as ``user`` has it. Relative folders are the current one's, so they go with those of the work."""
    if user is not User.TESTS:
        return path
    work = normpath(workdir)
    folders = [folder for folder in path.split(":") if folder.startswith("/")]
    return ":".join(folder for folder in folders if not _is_below(normpath(folder), work))


def _is_below(folder: str, above: str) -> bool:
    # POSIX keeps two slashes at the start apart; Linux does not.
    return f"/{folder.lstrip('/')}/".startswith(f"{above.rstrip('/')}/")
