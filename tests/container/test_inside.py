"""The tests of sandboxes, of grading and of the key, inside the hardened image: what they claim holds there too.

The image has no tests and no pytest: the checkout and this Python's packages are mounted read-only, and the
image's own packages come first. So what is tested is the server that was built, as its user, under its flags.
"""

from __future__ import annotations

import re
import secrets
import sys
import sysconfig
from pathlib import Path

import pytest
from container_support import HARDENED, sandbox_flags
from image_builds import ROOT, run

pytestmark = [pytest.mark.docker, pytest.mark.container, pytest.mark.thorough, pytest.mark.timeout(1500)]

FOLDER = "/data/run"
"""Where tests write, for sockets and records; `--tmpfs` is noexec and root's where nothing else is said."""
PYTEST = """
import sys
sys.path.append("/site")
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
IMAGE_PYTHON = (3, 11)
TESTS_S = 600

QUICK = ("-m", "not docker and not agents and not cheats and not slow")
PLAYED = ("-m", "not docker and not agents and not cheats")
GROUPS = {
    # Users of one uid: every attacker on every victim, and the key of an episode in whole episodes.
    "users": (
        *PLAYED,
        "tests/sandboxes/test_users_apart.py",
        "tests/agents/test_key_out_of_reach.py",
        *("-k", "not tool-loop"),  # an install of an agent, which is tried elsewhere
    ),
    # What a sandbox shows, what is bounded, and what is said of its end.
    "sandboxes": (
        *QUICK,
        "tests/sandboxes/test_sandbox_isolation.py",
        "tests/sandboxes/test_sandbox_disk.py",
        "tests/sandboxes/test_sandbox_deaths.py",
    ),
    # Frames, objects, the parent's memory, everything killed, hidden tests, on the shipped tasks: the third of
    # these cheats that falls to this kind of sandbox (tests/grading/conftest.py).
    "cheats": (*PLAYED, "tests/grading/test_shipped_cheats.py", "-k", "that_cheats or hidden"),
    # Reward 0, and why.
    "faults": (*QUICK, "tests/episodes/test_agent_faults.py"),
}

LEAST = {"users": 14, "sandboxes": 14, "cheats": 7, "faults": 14}
"""Tests of each group that must have passed: fewer would mean that a selection has gone wrong."""


@pytest.mark.skipif(sys.version_info[:2] != IMAGE_PYTHON, reason="this Python's packages are not the image's")
@pytest.mark.parametrize("group", GROUPS)
def test_in_the_hardened_image_the_tests_of_sandboxes_and_of_grading_pass(
    group: str, server_image: str, tiny_model: Path
) -> None:
    assert tiny_model.is_relative_to(ROOT)  # made here, because the checkout is read-only there
    mounts = ("-v", f"{ROOT}:/repo:ro", "-v", f"{sysconfig.get_path('purelib')}:/site:ro")
    folder = ("--tmpfs", f"{FOLDER}:uid=10001,mode=700", "-e", f"TMPDIR={FOLDER}", "-e", f"HOME={FOLDER}")
    program = ("python3", "-c", PYTEST, *GROUPS[group])
    name = f"turnstile-test-{secrets.token_hex(4)}"
    try:
        said = run(
            *("docker", "run", "--rm", "--init", "--name", name, *HARDENED, *sandbox_flags(), *mounts, *folder),
            *("--workdir", "/repo", server_image, *program),
            timeout_s=TESTS_S,
        )
    finally:
        run("docker", "rm", "--force", "--volumes", name, ok=False)
    counted = re.search(r"(\d+) passed", said)
    assert counted is not None, said
    assert int(counted[1]) >= LEAST[group], said
