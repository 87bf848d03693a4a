"""Sets the sandbox up, once, before any command: users, their folders, the port of the agent endpoint.

The server's "setup" request: ``workdir``; ``uids`` (user name to uid, used where the helper may change its uid);
``homes`` (user name to folder); ``env`` (of every command); ``task_env`` (of every command but the harness's);
``own_processes`` (the sandbox has a process name space of its own); ``compartments`` (keep users of one uid
apart); ``own_tree`` (the work folder's contents become the agent's); ``passable`` (folders of root's that every
user may pass through, where they are there); ``disk`` (null where the backend has mounted what can be written,
else what ``mount_disk`` takes); ``terminals`` (of a sandbox, or of each
compartment, where the helper mounts them); ``inotify`` (instances and watches, where the sandbox has a user name
space); ``rlimits`` (name to bound); ``grace_s``; ``filter`` (the system call filter in base64; null where nothing
is isolated); ``forward`` (null, or ``port``, ``socket``, ``connections``: the bound at once, and ``carried``: True
makes the socket and carries its connections over the helper's own, False forwards to the server's socket, which is
mounted there). The answer: ``own_uids``, ``compartments``, ``filtered``, ``port``.
"""

from __future__ import annotations

import base64
import os
import stat
from typing import Any, Mapping, Optional  # noqa: UP035 - Python 3.8

from .compartments import Compartments, become_first_process, bound_watches
from .disk import mount_disk, mount_terminals
from .kernel import (
    BIND,
    CAP_SYS_ADMIN,
    NO_DEV,
    NO_EXEC,
    NO_SUID,
    READ_ONLY,
    RECURSIVE,
    REMOUNT,
    Kernel,
)
from .rights import NO_RIGHTS_TAKEN, Rights
from .spawn import Spawner

_PROBE = "agent"
_PROBE_DISK = {"size": 1 << 20, "files": 256}
_PROBE_TERMINALS = 1
_PROBE_INOTIFY = (1, 1)
_FULL_BY_NOBODY = ("tests",)
"""Whose home no other user can fill: what judges writes there."""


def usable_uids(uids: Mapping[str, int]) -> Mapping[str, int]:
    """``uids`` where children can take them, else none: found out by one that tries."""
    if os.geteuid() != 0 or not uids:
        return {}
    return uids if _works(Spawner(uids, {}, NO_RIGHTS_TAKEN), _PROBE) else {}


def check(spawner: Spawner) -> None:
    """Raises OSError where children cannot give up what no command may have."""
    if not _works(spawner, None):
        raise OSError("a child could not give up its capabilities and system calls")


def _works(spawner: Spawner, user: str | None) -> bool:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        pid = spawner.fork(lambda: 0, user, (null, null, 2))
    finally:
        os.close(null)
    return os.waitpid(pid, 0)[1] == 0


def rights_of(config: Mapping[str, Any]) -> Rights:
    """Nothing is taken where nothing is isolated, and where this Python has no ``ctypes``: the server knows
    whether the container's own filter is enough."""
    if config["filter"] is None:
        return NO_RIGHTS_TAKEN
    try:
        return Rights(Kernel(), base64.b64decode(config["filter"]))
    except ImportError:
        return NO_RIGHTS_TAKEN


def make_mounts(config: Mapping[str, Any]) -> Optional[int]:  # noqa: UP045 - Python 3.8
    """Makes what can be written one file system, where the backend leaves it to the helper. Raises OSError,
    ImportError.

    Where no compartment has a /proc of its own, the visible one becomes read-only: by ``oom_score_adj`` a command
    could have the helper killed before itself when memory runs out. Returns a descriptor of the other, for
    ``Spawner``.
    """
    if config["disk"] is None:
        return None
    kernel = Kernel()
    mount_disk(kernel, config["disk"], config["workdir"], [config["homes"][user] for user in _FULL_BY_NOBODY])
    if config["compartments"]:
        return None
    mount_terminals(kernel, config["terminals"])
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    kernel.mount("/proc", "/proc", None, BIND | RECURSIVE)
    kernel.mount(None, "/proc", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV | NO_EXEC)
    kernel.drop_capability(CAP_SYS_ADMIN)
    return proc


def make_compartments(config: Mapping[str, Any]) -> Optional[Compartments]:  # noqa: UP045 - Python 3.8
    """None where they are not asked for. Call it after ``make_folders``. Raises OSError, ImportError."""
    if not config["compartments"]:
        return None
    bound_watches(*config["inotify"])
    return Compartments(Kernel(), config["homes"], config["workdir"], config["terminals"])


def try_compartments(homes: Mapping[str, str], workdir: str) -> None:
    """Runs a child in a compartment. Raises OSError, ImportError where none can be made."""
    become_first_process()
    mount_disk(Kernel(), _PROBE_DISK, workdir, ())
    for home in homes.values():
        os.makedirs(home, exist_ok=True)
    bound_watches(*_PROBE_INOTIFY)
    compartments = Compartments(Kernel(), homes, workdir, _PROBE_TERMINALS)
    spawner = Spawner({}, {}, NO_RIGHTS_TAKEN, compartments)
    if not _works(spawner, _PROBE):
        raise OSError("a command cannot enter its compartment")


def make_folders(config: Mapping[str, Any], uids: Mapping[str, int]) -> None:
    """Makes the work folder, which is the agent's, and a private home for each user. Raises OSError."""
    workdir = config["workdir"]
    os.makedirs(workdir, mode=0o755, exist_ok=True)
    agent = uids.get("agent")
    if agent is not None:
        if config["own_tree"]:
            _give_tree(workdir, agent)
        _give(workdir, agent)
    for folder in config["passable"]:
        if os.path.isdir(folder) and not os.path.islink(folder):
            os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | 0o011)
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
