"""``turnstile doctor --image`` and ``turnstile agents install --runtime``: what an image lacks, told first."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from bare_images import BUSYBOX, image_of

from local import TURNSTILE
from turnstile_server.testing import image_check


@pytest.mark.docker
def test_what_works_in_an_image_without_python_and_bash_is_told() -> None:
    done = subprocess.run(
        [TURNSTILE, "doctor", "--json", "--image", image_of(BUSYBOX)], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    found = {each["name"]: (each["passed"], each["text"]) for each in report["findings"]}
    assert report["passed"]
    assert found["architecture"] == (True, "amd64")
    assert found["helper"] == (True, "on the carried runtime")
    assert found["shell"] == (True, "/bin/sh")
    assert found["writable"] == (True, "/tmp, the home, the work folder")
    assert found["tests"] == (None, "no python3: `runner: command` alone works")
    assert found["bash"] == (None, "none: commands of the model run by sh")
    able, _, unable = found["agents"][1].partition("; not ")
    assert {"mini-swe-agent", "pi", "plain-loop"} <= set(able.split(", "))
    assert "claude-code (needs bash)" in unable


@pytest.mark.docker
def test_an_image_that_is_not_there_is_told() -> None:
    command = [TURNSTILE, "doctor", "--image", "turnstile-test:nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Docker has no image turnstile-test:nothing; fetch or build it first" in done.stderr


@pytest.mark.slow
def test_the_runtime_is_prepared_by_command() -> None:
    command = [TURNSTILE, "agents", "install", "--runtime"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "The runtime for containers, Python 3." in first.stdout
    assert "was made before" in again.stdout
    assert "plain-loop" not in again.stdout


@pytest.mark.slow
def test_where_it_cannot_be_made_the_command_says_so_and_fails() -> None:
    env = {**os.environ, "TURNSTILE_AGENTS__INSTALL_DIR": "/dev/null/agents"}
    command = [TURNSTILE, "agents", "install", "--runtime"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "agents cannot be installed into /dev/null/agents" in done.stderr


def test_no_agent_runs_where_there_is_no_helper_or_no_shell() -> None:
    assert image_check.runnable([], set(), helper=False, shell=True).text == "none"
    assert image_check.runnable([], set(), helper=True, shell=False).text == "none"
