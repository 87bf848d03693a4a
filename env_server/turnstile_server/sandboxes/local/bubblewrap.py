"""The command line of bubblewrap: pure, from a spec and the folders of the host.

What a sandbox sees: the host's /usr (and what belongs to it) and the server's own Python, read-only; generated
/etc files; an empty work folder, /home, /tmp and /dev/shm in memory, each of the spec's disk size; a small /dev; a
/proc of its own processes; no network but its own loopback. Everything that the frame hides is empty inside. No
secret may be in the command line: every user can read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.sandboxes.helper import HELPER_FOLDER, HELPER_TARGET, SOCKET_TARGET
from turnstile_server.sandboxes.protocol import SandboxSpec

HELPER_FLAGS = ("-I", "-S", "-B")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN")
"""What the helper keeps where bubblewrap runs as root: to make the agent's folders, and to run and end commands
under two other uids. No command has any: a change of uid drops them, and no_new_privs keeps them away."""
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = (
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/pki",
    "/etc/ssl/certs",
    "/etc/terminfo",
)
_MAIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class HostPython:
    """The Python that the server runs on, without its virtual environment: the helper's and the commands'."""

    executable: str
    prefix: str

    @property
    def in_system(self) -> bool:
        return Path(self.prefix).is_relative_to("/usr")

    @property
    def search_path(self) -> str:
        """PATH of commands."""
        return _MAIN_PATH if self.in_system else f"{self.prefix}/bin:{_MAIN_PATH}"


@dataclass(frozen=True, slots=True)
class SandboxFrame:
    """The part that is the same for every sandbox of a server."""

    bwrap: str
    python: HostPython
    etc: Path
    """Folder of the generated /etc files."""
    privileged: bool
    """bubblewrap runs as root: two uids inside, no user name space. Else a user name space with one uid."""
    agent_uid: int
    one_user_name_space: bool = False
    """Code inside can make no user name space of its own, in which it would have every capability: closes much of
    the kernel to it. bubblewrap 0.8 and newer, and only where it makes a user name space itself."""
    hidden: tuple[Path, ...] = ()
    """Files and folders, as ``shown_of`` gives them, that are empty inside."""


def shown_of(paths: Sequence[Path], python: HostPython) -> tuple[Path, ...]:
    """Those of ``paths`` that sandboxes would show, by where they are inside: they exist below a folder that is
    mounted from the host. A server that is installed for its whole Python, or below it, has its tasks there."""
    mounted = ["/usr", *(folder for folder in _SYSTEM_FOLDERS if not os.path.islink(folder)), python.prefix]
    real = {path.resolve() for path in paths if path.exists()}
    found = {
        Path(folder) / path.relative_to(above)
        for folder, above in ((folder, os.path.realpath(folder)) for folder in mounted)
        for path in real
        if path.is_relative_to(above)
    }
    return tuple(sorted(found))


def passwd(agent_uid: int, tests_uid: int) -> dict[str, str]:
    """The generated /etc files, by name."""
    users = (("root", 0, "/"), ("agent", agent_uid, "/home/agent"), ("tests", tests_uid, "/home/tests"))
    return {
        "passwd": "".join(f"{name}:x:{uid}:{uid}::{home}:/bin/sh\n" for name, uid, home in users),
        "group": "".join(f"{name}:x:{uid}:\n" for name, uid, _ in users),
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }


def helper_command(frame: SandboxFrame, spec: SandboxSpec, sockets: Path) -> list[str]:
    """bubblewrap with the helper as its first process; ``sockets`` is the folder of the sandbox's sockets."""
    mounts = ["--ro-bind", str(sockets), SOCKET_TARGET, "--ro-bind", str(HELPER_FOLDER), HELPER_TARGET]
    return wrap(frame, spec, mounts, [frame.python.executable, *HELPER_FLAGS, HELPER_TARGET])


def wrap(frame: SandboxFrame, spec: SandboxSpec, mounts: Sequence[str], command: Sequence[str]) -> list[str]:
    return [
        frame.bwrap,
        *_name_spaces(frame),
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        *_system(frame),
        *_hide(frame.hidden),
        *_in_memory(spec),
        *_folders(SOCKET_TARGET, HELPER_TARGET, *(mount.target for mount in spec.mounts)),
        *mounts,
        *[word for mount in spec.mounts for word in ("--ro-bind", str(mount.source), mount.target)],
        # The rest of the root and of /dev is in memory too, without a bound of its own.
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/",
        "--chdir",
        "/",
        "--",
        *command,
    ]


def _name_spaces(frame: SandboxFrame) -> list[str]:
    own = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    own += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    if frame.privileged:
        return own + [word for name in _CAPABILITIES for word in ("--cap-add", name)]
    uid = str(frame.agent_uid)
    once = ["--disable-userns"] if frame.one_user_name_space else []
    return ["--unshare-user", *once, "--uid", uid, "--gid", uid, *own]


def _system(frame: SandboxFrame) -> list[str]:
    words = [*_folders("/etc/ssl/certs", frame.python.prefix), "--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        else:
            words += ["--ro-bind-try", folder, folder]
    for file in _SYSTEM_FILES:
        words += ["--ro-bind-try", file, file]
    for name in sorted(passwd(0, 0)):
        words += ["--ro-bind", str(frame.etc / name), f"/etc/{name}"]
    if not frame.python.in_system:
        words += ["--ro-bind", frame.python.prefix, frame.python.prefix]
    return [*words, "--proc", "/proc", "--dev", "/dev"]


def _hide(paths: Sequence[Path]) -> list[str]:
    words: list[str] = []
    for path in paths:
        if path.is_dir():
            words += ["--tmpfs", str(path), "--remount-ro", str(path)]
        else:
            words += ["--ro-bind", "/dev/null", str(path)]
    return words


def _folders(*targets: str) -> list[str]:
    """The folders above mount points: those that bubblewrap makes by itself are closed to all but root."""
    above = {str(folder) for target in targets for folder in Path(target).parents} - {"/", "/usr", "/tmp", "/home"}
    return [word for folder in sorted(above) for word in ("--perms", "0755", "--dir", folder)]


def _in_memory(spec: SandboxSpec) -> list[str]:
    size = str(spec.limits.disk_bytes)
    words: list[str] = []
    for folder, mode in (("/tmp", "1777"), ("/dev/shm", "1777"), ("/home", "0755"), (spec.workdir, "0755")):
        words += ["--size", size, "--perms", mode, "--tmpfs", folder]
    return words
