"""The command line of bubblewrap: pure, from a spec and the folders of the host.

What a sandbox sees: the host's /usr (and what belongs to it) and the server's own Python, read-only; generated
/etc files; an empty work folder, /home, /tmp and /dev/shm in memory, together of the spec's disk size; a small
/dev; a /proc of its own processes; no network but its own loopback. Everything that the frame hides is empty
inside. No secret may be in the command line: every user can read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.runtimes.layout import TARGET
from turnstile_server.sandboxes.helper import HELPER_FOLDER, HELPER_TARGET, SOCKET_TARGET
from turnstile_server.sandboxes.helper.turnstile_helper.compartments import APART, VISIBLE_PROC
from turnstile_server.sandboxes.helper.turnstile_helper.disk import DISK_TARGET, IMAGE_TARGET, writable
from turnstile_server.sandboxes.local.image_root import IN_MEMORY, ImageRoot
from turnstile_server.sandboxes.protocol import HOMES, SandboxSpec
from turnstile_server.sandboxes.users import Uids

HELPER_FLAGS = ("-I", "-S", "-B")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_CHOWN", "CAP_SYS_ADMIN")
"""Capabilities that the helper keeps where bubblewrap runs as root: to make the agent's folders, and to run and
end commands under other uids. No command has any, not even in its bounding set; the helper itself gives up
CAP_SYS_ADMIN when it has mounted what can be written, before the first command."""
_COMPARTMENT_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SETPCAP", "CAP_SYS_RESOURCE")
"""Capabilities that the helper keeps in the user name space of a sandbox with one uid. No command has any."""
_TREE_CAPABILITIES = ("CAP_DAC_OVERRIDE", "CAP_FOWNER")
"""Beside those, where the work folder's files are an image's: to give them to the agent, and because the kernel
makes an overlay with the rights of its mounter."""
_TRY_KERNEL = "import ctypes"
"""The helper takes rights from commands by it."""
_TRY_COMPARTMENTS = """
import sys
sys.path.insert(0, sys.argv[1])
from turnstile_helper import setup
setup.try_compartments(dict(word.split("=") for word in sys.argv[3:]), sys.argv[2])
"""
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
_PYTHON_PARTS = ("bin", "lib", "lib64", "include", "ssl", "share/zoneinfo", "share/terminfo")
"""Folders of a Python outside of /usr. Not the whole prefix: it may be somebody's home, or ``~/.local``."""
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
    privileged: bool
    """bubblewrap runs as root: a uid for each user, no user name space. Else a user name space with one uid."""
    agent_uid: int
    compartments: bool = False
    """The helper keeps capabilities in the sandbox's user name space, by which it keeps users of one uid apart
    (``helper/turnstile_helper/compartments.py``). It also sees to it that code inside can make no user name
    space."""
    visible_proc: bool = False
    """Show the helper, and no command, the machine's own /proc. bubblewrap covers parts of /proc where root runs
    it, and the kernel then lets nobody inside mount a new one, unless another is wholly visible."""
    one_user_name_space: bool = False
    """Code inside can make no user name space of its own, in which it would have every capability: closes much of
    the kernel to it. bubblewrap 0.8 and newer, and only where it makes a user name space itself."""

    @property
    def mounts_disk(self) -> bool:
        """The helper may mount, and makes one file system of all that can be written."""
        return self.privileged or self.compartments

    hidden: tuple[Path, ...] = ()
    """Files and folders, as ``shown_of`` gives them, that are empty inside."""
    helper: Path = HELPER_FOLDER
    """The folder of the helper."""


def shown_of(paths: Sequence[Path], python: HostPython) -> tuple[Path, ...]:
    """Those of ``paths`` that sandboxes would show, by where they are inside: they exist below a folder that is
    mounted from the host. A server that is installed for its whole Python, or below it, has its tasks there."""
    of_python = (f"{python.prefix}/{part}" for part in _PYTHON_PARTS)
    mounted = ["/usr", *(folder for folder in _SYSTEM_FOLDERS if not os.path.islink(folder)), *of_python]
    real = {path.resolve() for path in paths if path.exists()}
    found = {
        Path(folder) / path.relative_to(above)
        for folder, above in ((folder, os.path.realpath(folder)) for folder in mounted)
        for path in real
        if path.is_relative_to(above)
    }
    return tuple(sorted(found))


def write_etc(folder: Path, uids: Uids) -> None:
    """Writes the generated /etc files into a folder, which is made. Raises OSError."""
    folder.mkdir(mode=0o755, exist_ok=True)
    for name, text in passwd(uids).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)


def passwd(uids: Uids) -> dict[str, str]:
    """The generated /etc files, by name."""
    users = [("root", 0, "/"), *((str(user), uid, HOMES[user]) for user, uid in uids.items())]
    return {
        "passwd": "".join(f"{name}:x:{uid}:{uid}::{home}:/bin/sh\n" for name, uid, home in users),
        "group": "".join(f"{name}:x:{uid}:\n" for name, uid, _ in users),
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }


def helper_command(
    frame: SandboxFrame, etc: Path, spec: SandboxSpec, sockets: Path, root: ImageRoot | None = None
) -> list[str]:
    """bubblewrap with the helper as its first process; ``etc`` is what ``write_etc`` made, ``sockets`` the folder
    of the sandbox's sockets, ``root`` what is there instead of the host's system."""
    mounts = ["--ro-bind", str(sockets), SOCKET_TARGET, "--ro-bind", str(frame.helper), HELPER_TARGET]
    if root is not None and root.runtime is not None:
        mounts += ["--ro-bind", str(root.runtime), TARGET]
    apart = [APART] if frame.compartments else []
    python = frame.python.executable if root is None else root.python
    return wrap(frame, etc, spec, mounts, [python, *HELPER_FLAGS, HELPER_TARGET, *apart], root)


def probe_command(frame: SandboxFrame, etc: Path, spec: SandboxSpec) -> list[str]:
    """Works where sandboxes of this kind can be made."""
    program = [frame.python.executable, *HELPER_FLAGS, "-c"]
    if not frame.compartments:
        return wrap(frame, etc, spec, (), [*program, _TRY_KERNEL])
    homes = [f"{user}={home}" for user, home in HOMES.items()]
    mounts = ["--ro-bind", str(HELPER_FOLDER), HELPER_TARGET]
    return wrap(frame, etc, spec, mounts, [*program, _TRY_COMPARTMENTS, HELPER_TARGET, spec.workdir, *homes])


def wrap(
    frame: SandboxFrame,
    etc: Path,
    spec: SandboxSpec,
    mounts: Sequence[str],
    command: Sequence[str],
    root: ImageRoot | None = None,
) -> list[str]:
    more = _TREE_CAPABILITIES if spec.image_files else ()
    return [
        frame.bwrap,
        *_name_spaces(frame),
        *(word for name in more for word in ("--cap-add", name)),
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        *([*_system(frame, etc), *_hide(frame.hidden)] if root is None else _image(root, etc, spec)),
        *_kernel(frame),
        *(_disk(spec) if frame.mounts_disk else _in_memory(spec)),
        *_folders(SOCKET_TARGET, HELPER_TARGET, *(mount.target for mount in spec.mounts)),
        *mounts,
        *[word for mount in spec.mounts for word in ("--ro-bind", str(mount.source), mount.target)],
        # The rest of the root and of /dev is in memory too, without a bound of its own.
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/",
        *(word for folder in (IN_MEMORY if root is not None else ()) for word in ("--remount-ro", folder)),
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
    kept = [word for name in _COMPARTMENT_CAPABILITIES for word in ("--cap-add", name)]
    return ["--unshare-user", *once, "--uid", uid, "--gid", uid, *own, *(kept if frame.compartments else ())]


def _system(frame: SandboxFrame, etc: Path) -> list[str]:
    parts = () if frame.python.in_system else [f"{frame.python.prefix}/{part}" for part in _PYTHON_PARTS]
    words = [*_folders("/etc/ssl/certs", *parts), "--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        else:
            words += ["--ro-bind-try", folder, folder]
    for file in _SYSTEM_FILES:
        words += ["--ro-bind-try", file, file]
    for name in sorted(passwd({})):
        words += ["--ro-bind", str(etc / name), f"/etc/{name}"]
    for part in parts:
        words += ["--ro-bind-try", part, part]
    return words


def _image(root: ImageRoot, etc: Path, spec: SandboxSpec) -> list[str]:
    words = ["--ro-bind", str(root.folder), "/", "--ro-bind", str(etc / "hosts"), "/etc/hosts"]
    for folder in IN_MEMORY:
        words += ["--perms", "0755", "--tmpfs", folder]
    if spec.image_files:
        words += ["--ro-bind", str(root.folder), IMAGE_TARGET]
    return words


def _kernel(frame: SandboxFrame) -> list[str]:
    seen = ["--dev-bind", "/proc", VISIBLE_PROC] if frame.visible_proc else []
    return [*seen, "--proc", "/proc", "--dev", "/dev"]


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


def _disk(spec: SandboxSpec) -> list[str]:
    """Arguments for a sandbox whose helper mounts the writable folders: only empty folders to mount at."""
    words = ["--perms", "0755", "--dir", "/run", "--perms", "0700", "--dir", DISK_TARGET]
    return words + [word for folder, _ in writable(spec.workdir) for word in ("--perms", "0755", "--dir", folder)]


def _in_memory(spec: SandboxSpec) -> list[str]:
    """Arguments for a sandbox whose helper may not mount: one tmpfs per writable folder, equal sizes."""
    folders = writable(spec.workdir)
    size = str(max(1, spec.limits.disk_bytes // len(folders)))
    words: list[str] = []
    for folder, mode in folders:
        words += ["--size", size, "--perms", f"{mode:04o}", "--tmpfs", folder]
    return words
