"""Bodies of containers for Podman, which speaks Docker's API with differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes import call_filter
from turnstile_server.sandboxes.docker.podman import adapted, is_podman, write_profile

PODMAN = {"Version": "4.3.1", "Components": [{"Name": "Podman Engine"}, {"Name": "Conmon"}]}
"""Of what Podman 4.3.1 answered to ``GET /version``."""
DOCKER = {"Version": "20.10.24", "Components": [{"Name": "Engine"}, {"Name": "containerd"}]}
HOST = {
    "SecurityOpt": ["no-new-privileges", f"seccomp={call_filter.docker_profile()}"],
    "Tmpfs": {"/workspace": "rw,exec,nosuid,nodev,size=1024,nr_inodes=204,mode=0755,uid=1001,gid=1001"},
    "CapAdd": ["SETUID", "CHOWN"],
    "Memory": 5,
}


def test_the_engine_says_what_it_is() -> None:
    assert is_podman(PODMAN)
    assert not is_podman(DOCKER)
    assert not is_podman({"Version": "1"})


def test_a_body_has_what_podman_takes_and_everything_else_stays(tmp_path: Path) -> None:
    profile = write_profile(tmp_path)
    assert json.loads(profile.read_text()) == json.loads(call_filter.docker_profile())
    assert adapted(HOST, profile) == {
        "SecurityOpt": ["no-new-privileges", f"seccomp={profile}"],
        "Tmpfs": {"/workspace": "rw,exec,nosuid,nodev,size=1024,mode=0755"},
        "CapAdd": ["SETUID", "CHOWN", "DAC_OVERRIDE", "FOWNER"],
        "Memory": 5,
    }
    assert adapted({"CapAdd": []}, profile)["CapAdd"] == []
    assert adapted(HOST, None)["SecurityOpt"] == ["no-new-privileges"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="Podman"):
        write_profile(tmp_path / "missing")
