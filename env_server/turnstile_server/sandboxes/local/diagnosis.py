"""Diagnosis of a bubblewrap that does not work on a machine, and the remedy: from its error and from what the
kernel shows.

Pure but for ``look``, which reads a few small files. The kernel answers "Operation not permitted" for many
reasons, so a cause is named as likely, bubblewrap's own words stay beside it, and the remedy is exact: flags of
the container, a setting of the host, or a package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SECCOMP_FLAG = "--security-opt seccomp=server/seccomp.json"
SYSTEMPATHS_FLAG = "--security-opt systempaths=unconfined"
APPARMOR_FLAG = "--security-opt apparmor=unconfined"
_PAGE = "docs/container.md"
_FLAGS = f"Start the container with {SECCOMP_FLAG} {SYSTEMPATHS_FLAG} ({_PAGE})"


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that decide whether a process without rights may make name spaces here."""

    container: str | None = None
    """The sign that this is a container, e.g. ``Docker (/.dockerenv)``; None where nothing shows it."""
    filtered: bool = False
    """A system call filter is active on this process (proc(5), ``Seccomp: 2``)."""
    proc_covered: tuple[str, ...] = ()
    """Paths below /proc with something mounted over them: the kernel then refuses a new /proc."""
    max_user_namespaces: int | None = None
    """sysctl user.max_user_namespaces; None where it cannot be read."""
    unprivileged_userns_clone: int | None = None
    """sysctl kernel.unprivileged_userns_clone, of Debian's kernels."""
    apparmor_restricts: bool = False
    """sysctl kernel.apparmor_restrict_unprivileged_userns, on by default since Ubuntu 24.04."""
    apparmor_profile: str | None = None
    """The AppArmor profile that confines this process; None where none does."""
    root: bool = False
    """This process runs as uid 0, perhaps without its rights."""
    python_below: str | None = None
    """The folder above the server's Python that this process may not enter; None where it may enter all."""


def look(
    root: Path = Path("/"), environment: Mapping[str, str] | None = None, python: Path = Path(sys.executable)
) -> Machine:
    """Reads the facts below ``root``. A file that is not there, or closed, is a fact that is not known.

    ``python``: the server's.
    """
    proc = root / "proc"
    status = _read(proc / "self/status") or ""
    profile = (_read(proc / "self/attr/current") or "").rstrip("\n\0")
    return Machine(
        container=_container(root, os.environ if environment is None else environment),
        filtered="\nSeccomp:\t2\n" in status,
        proc_covered=tuple(
            point for point in _mount_points(_read(proc / "self/mountinfo") or "") if point.startswith("/proc/")
        ),
        max_user_namespaces=_number(proc / "sys/user/max_user_namespaces"),
        unprivileged_userns_clone=_number(proc / "sys/kernel/unprivileged_userns_clone"),
        apparmor_restricts=_number(proc / "sys/kernel/apparmor_restrict_unprivileged_userns") == 1,
        apparmor_profile=profile if profile.endswith(("(enforce)", "(complain)")) else None,
        root="\nUid:\t0\t" in status,
        python_below=_closed_above(python),
    )


def lacking(machine: Machine) -> str:
    """The remedy where there is no ``bwrap``. One or more sentences."""
    if machine.container is not None:
        return (
            f"there is no `bwrap` in this container ({machine.container}). Use the image of server/Dockerfile, or "
            f"install the package `bubblewrap` into this one. {_FLAGS}"
        )
    return "there is no `bwrap`. Install it (`apt install bubblewrap`), or use Docker"


def failing(error: str, machine: Machine) -> str:
    """The reason why ``bwrap`` failed with ``error``, and the remedy. One or more sentences."""
    said = error.strip().removeprefix("bwrap: ").partition(". See <")[0].rstrip(".")
    return f"`bwrap` does not work here: {said}. {_advice(error, machine)}"


def _advice(error: str, machine: Machine) -> str:
    if machine.python_below is not None and ("execvp " in error or "source path" in error):
        return (
            f"The server's Python lies below {machine.python_below}, which the server's user may not enter, so no "
            "sandbox can show it. Run the server on a Python that its user can read (one in /usr or /opt), or let "
            f"it through: `chmod o+x {machine.python_below}`"
        )
    host = "on the container's host" if machine.container is not None else "as root"
    if machine.max_user_namespaces == 0:
        return f"User name spaces are switched off: run `sysctl -w user.max_user_namespaces=15000` {host}"
    if machine.unprivileged_userns_clone == 0:
        return (
            "User name spaces are switched off for all but root: run "
            f"`sysctl -w kernel.unprivileged_userns_clone=1` {host}"
        )
    if "mount proc" in error and machine.proc_covered:
        covered = ", ".join(machine.proc_covered[:3])
        if machine.container is not None:
            return (
                f"Likely cause: the container hides parts of /proc ({covered}, …), and the kernel then refuses "
                f"the sandbox a /proc of its own. {_FLAGS}"
            )
        return f"Likely cause: something is mounted over parts of /proc ({covered}): unmount it"
    if "uid map: Operation not permitted" in error and machine.root:
        return (
            "Likely cause: root without its capabilities may not make a user name space. Run the server as "
            "another user (a container: `--user 10001:10001`)"
        )
    if "Permission denied" in error and machine.container is not None and machine.apparmor_profile is not None:
        return (
            f"Likely cause: the AppArmor profile {machine.apparmor_profile} of the container. {_FLAGS}, and "
            f"{APPARMOR_FLAG}"
        )
    if machine.filtered and machine.container is not None and "uid map" not in error:
        return f"Likely cause: the container's system call filter. {_FLAGS}"
    if machine.apparmor_restricts:
        return (
            "Likely cause: AppArmor restricts user name spaces on this machine (Ubuntu 24.04 and newer): run "
            f"`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` {host}, or give bubblewrap a profile "
            f"that allows them ({_PAGE})"
        )
    if machine.container is not None:
        return f"It runs in a container ({machine.container}). {_FLAGS}"
    return "Allow user name spaces on this machine, or use Docker"


def _container(root: Path, environment: Mapping[str, str]) -> str | None:
    """Files that engines put into every container, or the variables that they set; a guess from anything else
    would also fit machines that are none."""
    for name, file in (("Docker", ".dockerenv"), ("Podman", "run/.containerenv")):
        if (root / file).exists():
            return f"{name} (/{file})"
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes (KUBERNETES_SERVICE_HOST)"
    if environment.get("container"):  # systemd.io/CONTAINER_INTERFACE
        return f"{environment['container']} (the variable container)"
    return None


def _closed_above(python: Path) -> str | None:
    """A process can run on a Python that it cannot find again: who started it, as root, could."""
    real = Path(os.path.realpath(python))
    # From the root down: of two closed folders the upper one is what it meets.
    for folder in reversed(real.parents):
        if folder.is_dir() and not os.access(folder, os.X_OK):
            return str(folder)
    return None


def _mount_points(mountinfo: str) -> list[str]:
    """Field 5 of proc(5)'s mountinfo."""
    return [fields[4] for line in mountinfo.splitlines() if len(fields := line.split()) > 4]


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
