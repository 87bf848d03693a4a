"""Sandboxes of a rootless Podman: the service and the server are a plain user's, who is made for the test."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from test_podman_episodes import nothing_left, turnstile

from waiting import wait_until_sync

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

USER = "turnstile-podman"
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups")
READING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
"""For the server: a checkout may be root's alone."""


def run(*words: str) -> None:
    subprocess.run(words, check=True)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    run("useradd", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/sh", USER)
    try:
        run("usermod", "--add-subuids=700000-765535", "--add-subgids=700000-765535", USER)
        with tempfile.TemporaryDirectory(prefix="tp-", dir="/tmp") as folder:
            os.chmod(folder, 0o755)
            for name in ("home", "run", "tmp"):
                Path(folder, name).mkdir()
            run("chown", "-R", f"{USER}:", folder)
            yield Path(folder)
    finally:
        run("userdel", "--force", USER)


@pytest.fixture(scope="module")
def podman(home: Path, docker_image: str) -> Iterator[str]:
    """The address of its service."""
    address = f"unix://{home}/run/podman.sock"
    (home / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{home}/home/graph"\nrunroot = "{home}/run/storage"\n'
    )
    (home / "containers.conf").write_text(
        '[containers]\ndefault_ulimits = []\n[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        f'tmp_dir = "{home}/run/tmp"\n'
    )
    own = [f"HOME={home}/home", f"XDG_RUNTIME_DIR={home}/run", f"PATH={os.environ['PATH']}"]
    own += [f"CONTAINERS_CONF={home}/containers.conf", f"CONTAINERS_STORAGE_CONF={home}/storage.conf"]
    # crun refuses both versions of control groups beside each other. All ends with the shell, the first process of
    # the name space: it stays root's, because a change of users would undo --kill-child.
    script = 'umount /sys/fs/cgroup/unified 2> /dev/null; "$@"; exit $?'
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh"]
    command += [*AS_USER, "env", "-i", *own, "podman", "system", "service", "--time=0", address]
    service = subprocess.Popen(command)
    try:
        wait_until_sync(lambda: (home / "run" / "podman.sock").exists() or service.poll() is not None)
        assert service.poll() is None, "Podman's service does not start"
        with subprocess.Popen(["docker", "image", "save", docker_image], stdout=subprocess.PIPE) as saved:
            subprocess.run(["docker", "--host", address, "image", "load"], stdin=saved.stdout, check=True)
        yield address
    finally:
        service.kill()
        service.wait()
        wait_until_sync(lambda: subprocess.run(["pgrep", "-u", USER], check=False).returncode == 1)


def test_a_shipped_task_validates_and_what_is_not_held_is_said(podman: str, home: Path, docker_image: str) -> None:
    before = (*AS_USER, *READING)
    own = {"HOME": f"{home}/home", "TMPDIR": f"{home}/tmp"}
    said = turnstile(
        podman, "tasks", "validate", "--only", "fix-calculator", "--image", docker_image, before=before, **own
    )
    assert "1 of 1 tasks are sound" in said
    engine = docker.DockerClient(base_url=podman)
    try:
        version = engine.info()["CgroupVersion"]
    finally:
        engine.close()
    assert ("memory, cpus and pids are NOT held" in said) == (version == "1")
    assert nothing_left(podman)
