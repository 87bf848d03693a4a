"""Sets the sandbox up, once, before any command: users, their folders, the port of the agent endpoint.

The server's "setup" request: ``workdir``; ``uids`` (user name to uid, used where the helper may change its uid);
``homes`` (user name to folder); ``env`` (of every command); ``own_processes`` (the sandbox has a process name
space of its own); ``own_tree`` (the work folder's contents become the agent's); ``rlimits`` (name to bound);
``grace_s``; ``forward`` (null, or ``port``, ``socket``, ``connections``: the bound at once, and ``carried``: True
makes the socket and carries its connections over the helper's own, False forwards to the server's socket, which is
mounted there). The answer: ``two_users``, ``port``.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Mapping  # noqa: UP035 - Python 3.8

from .spawn import Spawner

_PROBE = "agent"


def usable_uids(uids: Mapping[str, int]) -> Mapping[str, int]:
    """``uids`` where children can take them, else none: found out by one that tries."""
    if os.geteuid() != 0 or not uids:
        return {}
    null = os.open(os.devnull, os.O_RDWR)
    try:
        pid = Spawner(uids, {}).fork(lambda: 0, _PROBE, (null, null, null))
    finally:
        os.close(null)
    return uids if os.waitpid(pid, 0)[1] == 0 else {}


def make_folders(config: Mapping[str, Any], uids: Mapping[str, int]) -> None:
    """Makes the work folder, which is the agent's, and a private home for each user. Raises OSError."""
    workdir = config["workdir"]
    os.makedirs(workdir, mode=0o755, exist_ok=True)
    agent = uids.get("agent")
    if agent is not None:
        if config["own_tree"]:
            _give_tree(workdir, agent)
        _give(workdir, agent)
    os.makedirs(config["env"]["TMPDIR"], exist_ok=True)
    for user, home in config["homes"].items():
        os.makedirs(home, mode=0o755, exist_ok=True)
        # Where a backend has mounted it as its user's already, root without CAP_FOWNER may not repeat the mode.
        if stat.S_IMODE(os.stat(home).st_mode) != 0o700:
            os.chmod(home, 0o700)
        if user in uids:
            _give(home, uids[user])


def _give(path: str, uid: int) -> None:
    if os.stat(path).st_uid != uid:
        os.chown(path, uid, uid)


def _give_tree(root: str, uid: int) -> None:
    def fail(error: OSError) -> None:
        raise error

    for _, folders, files, fd in os.fwalk(root, onerror=fail, follow_symlinks=False):
        for name in [*folders, *files]:
            os.chown(name, uid, uid, dir_fd=fd, follow_symlinks=False)
