"""The system call filter that ships: what it allows beyond Docker's own, and what it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import seccomp_profile

BASE = json.loads(seccomp_profile.BASE.read_text())
SHIPPED = json.loads(seccomp_profile.PROFILE.read_text())
KEYS = {"add_key", "keyctl", "request_key"}
NEW_MOUNTS = {"fsconfig", "fsmount", "fsopen", "fspick", "mount_setattr", "move_mount", "open_tree"}
OTHERS = {
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "kexec_load",
    "init_module",
    "reboot",
    "swapon",
    "umount",
}


def allowed(profile: dict[str, Any], *, arch: str = "amd64") -> set[tuple[str, str]]:
    """Every call that a container without capabilities is allowed, with its conditions on arguments."""
    found = set()
    for rule in profile["syscalls"]:
        included, excluded = rule["includes"], rule["excludes"]
        if included.get("caps") or arch in excluded.get("arches", ()):
            continue
        if included.get("arches") and arch not in included["arches"]:
            continue
        if rule["action"] == "SCMP_ACT_ALLOW":
            conditions = json.dumps(rule["args"] or [], sort_keys=True)
            found |= {(name, conditions) for name in rule["names"]}
    return found


def test_the_shipped_file_is_what_the_script_writes() -> None:
    done = subprocess.run([sys.executable, seccomp_profile.__file__, "--check"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("arch", ["amd64", "arm64", "s390x"])
def test_it_opens_the_listed_calls_and_nothing_else(arch: str) -> None:
    opened = allowed(SHIPPED, arch=arch) - allowed(BASE, arch=arch)
    assert sorted(name for name, _ in opened) == [
        "clone",
        "mount",
        "pivot_root",
        "sethostname",
        *["setns"] * 3,
        "socket",  # allowed without condition in the base; here not to the hypervisor
        "umount2",
        *["unshare"] * 3,
    ]
    closed = allowed(BASE, arch=arch) - allowed(SHIPPED, arch=arch)
    assert {name for name, _ in closed} == {"io_uring_enter", "io_uring_register", "io_uring_setup", "socket"}


def test_keys_newer_mount_calls_and_other_name_spaces_stay_closed() -> None:
    assert not {name for name, _ in allowed(SHIPPED)} & (KEYS | NEW_MOUNTS | OTHERS)


def test_name_spaces_are_entered_and_left_for_compartments_only() -> None:
    profile = seccomp_profile
    mounts, ipc, pids = profile.CLONE_NEWNS, profile.CLONE_NEWIPC, profile.CLONE_NEWPID
    rules = [(name, json.loads(args)) for name, args in allowed(SHIPPED) if name in ("setns", "unshare")]
    assert all(len(args) == 1 and args[0]["op"] == "SCMP_CMP_EQ" for _, args in rules)
    assert {(name, args[0]["index"], args[0]["value"]) for name, args in rules} == {
        ("unshare", 0, profile.CLONE_NEWUSER),
        ("unshare", 0, mounts | pids),
        ("unshare", 0, mounts | pids | ipc),
        ("setns", 1, mounts),
        ("setns", 1, ipc),
        ("setns", 1, pids),
    }


def test_default_and_architectures_are_those_of_docker() -> None:
    for field in ("defaultAction", "archMap"):
        assert SHIPPED[field] == BASE[field]
    assert SHIPPED["defaultAction"] == "SCMP_ACT_ERRNO"


def test_a_clone_gets_all_name_spaces_or_none() -> None:
    """As the kernel's filter compares: ``argument & value == valueTwo``."""
    rules = [json.loads(args) for name, args in allowed(SHIPPED) if name == "clone"]

    def passes(flags: int) -> bool:
        return any(all(flags & arg["value"] == arg.get("valueTwo", 0) for arg in rule) for rule in rules)

    sigchld = 17
    assert passes(sigchld)
    assert passes(sigchld | seccomp_profile.NAME_SPACES)
    for flag in (seccomp_profile.CLONE_NEWUSER, seccomp_profile.CLONE_NEWNS, seccomp_profile.CLONE_NEWNET):
        assert not passes(sigchld | flag)
        assert not passes(sigchld | (seccomp_profile.NAME_SPACES & ~flag))
