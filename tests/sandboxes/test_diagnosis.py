"""What is said where bubblewrap does not work: the likely cause, and what to add."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnstile_server.sandboxes.local.diagnosis import Machine, failing, lacking, look

# As bubblewrap 0.8 prints them.
NO_NAME_SPACES = (
    "bwrap: No permissions to create new namespace, likely because the kernel does not allow non-privileged user "
    "namespaces. See <https://deb.li/bubblewrap> or <file:///usr/share/doc/bubblewrap/README.Debian.gz>."
)
NO_PROC = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
NO_MOUNT = "bwrap: Failed to make / slave: Permission denied"
NO_UID_MAP = "bwrap: setting up uid map: Permission denied"
NO_ROOT_MAP = "bwrap: setting up uid map: Operation not permitted"
NO_PYTHON = "bwrap: execvp /root/pythons/bin/python3: No such file or directory"
NO_SOURCE = "bwrap: Can't find source path /root/pythons: Permission denied"
NONE_LEFT = "bwrap: Creating new namespace failed: No space left on device"

SECCOMP = "--security-opt seccomp=server/seccomp.json"
PATHS = "--security-opt systempaths=unconfined"
DOCKER = "Docker (/.dockerenv)"


@pytest.mark.parametrize(
    ("error", "machine", "told"),
    [
        (NO_NAME_SPACES, Machine(DOCKER, filtered=True), ("system call filter", SECCOMP, PATHS)),
        (NO_PROC, Machine(DOCKER, True, ("/proc/kcore",)), ("hides parts of /proc (/proc/kcore", SECCOMP, PATHS)),
        (NO_PROC, Machine(None, False, ("/proc/kcore",)), ("mounted over parts of /proc", "unmount it")),
        (
            NO_MOUNT,
            Machine(DOCKER, True, apparmor_profile="docker-default (enforce)"),
            ("docker-default", "--security-opt apparmor=unconfined"),
        ),
        (NO_UID_MAP, Machine(apparmor_restricts=True), ("apparmor_restrict_unprivileged_userns=0` as root",)),
        (NO_UID_MAP, Machine(DOCKER, True, apparmor_restricts=True), ("userns=0` on the container's host",)),
        (NO_ROOT_MAP, Machine(DOCKER, True, root=True), ("root without its capabilities", "--user 10001:10001")),
        (NONE_LEFT, Machine(max_user_namespaces=0), ("sysctl -w user.max_user_namespaces=15000` as root",)),
        (
            NONE_LEFT,
            Machine(DOCKER, True, max_user_namespaces=0),
            ("max_user_namespaces=15000` on the container's",),
        ),
        (NO_NAME_SPACES, Machine(unprivileged_userns_clone=0), ("kernel.unprivileged_userns_clone=1",)),
        *(
            (
                error,
                Machine(where, filtered=True, python_below="/root"),
                ("Python lies below /root", "chmod o+x /root"),
            )
            for error in (NO_PYTHON, NO_SOURCE)
            for where in (None, DOCKER)
        ),
        ("bwrap: something new", Machine("Podman (/run/.containerenv)"), ("Podman", SECCOMP, PATHS)),
        ("it does not end", Machine(), ("it does not end", "use Docker")),
    ],
)
def test_the_likely_cause_and_the_remedy_are_named(error: str, machine: Machine, told: tuple[str, ...]) -> None:
    sentence = failing(error, machine)
    assert error.removeprefix("bwrap: ").split(". See <")[0] in sentence
    assert "https://" not in sentence  # that page is about Debian's kernels
    for words in told:
        assert words in sentence, sentence


def test_outside_a_container_no_flags_of_containers_are_named() -> None:
    for error in (NO_NAME_SPACES, NO_PROC, NO_MOUNT, NO_UID_MAP, NONE_LEFT):
        assert "--security-opt" not in failing(error, Machine(filtered=True))


def test_a_python_out_of_reach_is_not_blamed_on_the_containers_flags() -> None:
    for error in (NO_PYTHON, NO_SOURCE):
        assert "--security-opt" not in failing(error, Machine(DOCKER, filtered=True, python_below="/root"))


def test_the_uppermost_folder_that_may_not_be_entered_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "closed" / "inner" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "link").symlink_to(python)
    assert look(tmp_path, {}, tmp_path / "link").python_below is None
    closed = (str(tmp_path / "closed"), str(tmp_path / "closed" / "inner"))
    monkeypatch.setattr("os.access", lambda path, mode: str(path) not in closed)  # root may enter all folders
    assert look(tmp_path, {}, tmp_path / "link").python_below == closed[0]


def test_without_bubblewrap_the_package_is_named_and_in_a_container_the_image() -> None:
    assert "apt install bubblewrap" in lacking(Machine())
    assert "server/Dockerfile" in lacking(Machine(DOCKER))
    assert SECCOMP in lacking(Machine(DOCKER))


def machine_in(tmp_path: Path, files: dict[str, str], **environment: str) -> Machine:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return look(tmp_path, environment)


def test_a_machine_of_which_nothing_can_be_read_is_one_of_which_nothing_is_known(tmp_path: Path) -> None:
    assert machine_in(tmp_path, {}) == Machine()


def test_the_facts_are_read_from_the_files_of_the_kernel_and_of_the_engine(tmp_path: Path) -> None:
    mountinfo = (
        "1 0 0:1 / / ro,relatime - overlay overlay rw\n"
        "2 1 0:2 / /proc rw,nosuid - proc proc rw\n"
        "3 2 0:3 /null /proc/kcore rw,nosuid - tmpfs tmpfs rw\n"
    )
    status = "Name:\tpython3\nUid:\t0\t0\t0\t0\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n"
    found = machine_in(
        tmp_path,
        {
            ".dockerenv": "",
            "proc/self/status": status,
            "proc/self/mountinfo": mountinfo,
            "proc/self/attr/current": "docker-default (enforce)\n",
            "proc/sys/user/max_user_namespaces": "96365\n",
            "proc/sys/kernel/unprivileged_userns_clone": "1\n",
            "proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
        },
    )
    assert found == Machine(DOCKER, True, ("/proc/kcore",), 96365, 1, True, "docker-default (enforce)", True)


@pytest.mark.parametrize(
    ("files", "environment", "container"),
    [
        ({"run/.containerenv": ""}, {}, "Podman (/run/.containerenv)"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes (KUBERNETES_SERVICE_HOST)"),
        ({}, {"container": "lxc"}, "lxc (the variable container)"),
        ({"proc/self/attr/current": "unconfined\n"}, {}, None),
    ],
)
def test_a_container_is_known_by_what_its_engine_puts_into_it(
    tmp_path: Path, files: dict[str, str], environment: dict[str, str], container: str | None
) -> None:
    assert machine_in(tmp_path, files, **environment).container == container
