"""One command of an installation, on the event loop that the server runs on."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

from turnstile_server.agents.install_run import run_install
from turnstile_server.errors import AgentNotInstalled


def installed(what: str, *command: str, uvloop: bool) -> None:
    """On a loop of its own: that of other tests' fixtures may be there in this thread."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(anyio.run, run_install, what, command, backend_options={"use_uvloop": uvloop}).result()


@pytest.mark.parametrize("uvloop", [True, False])
def test_what_it_makes_can_be_read_by_every_user_whatever_the_servers_umask(tmp_path: Path, uvloop: bool) -> None:
    made = tmp_path / "a file"
    before = os.umask(0o077)
    try:
        installed("touch", "touch", str(made), uvloop=uvloop)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o644


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_failure_says_what_the_command_wrote(uvloop: bool) -> None:
    with pytest.raises(AgentNotInstalled, match=r"npm ended with 3: no such package"):
        installed("npm", "sh", "-c", "echo no such package >&2; exit 3", uvloop=uvloop)
