"""One command of an installation, on the event loop that the server runs on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import anyio
import pytest

from turnstile_server.agents.install_run import run_install
from turnstile_server.errors import AgentNotInstalled


@pytest.mark.parametrize("uvloop", [True, False])
def test_what_it_makes_can_be_read_by_every_user_whatever_the_servers_umask(tmp_path: Path, uvloop: bool) -> None:
    made = tmp_path / "a file"
    before = os.umask(0o077)
    try:
        command = ("touch", str(made))
        anyio.run(run_install, "touch", command, backend_options={"use_uvloop": uvloop})
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o644


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_failure_says_what_the_command_wrote(uvloop: bool) -> None:
    command = ("sh", "-c", "echo no such package >&2; exit 3")
    with pytest.raises(AgentNotInstalled, match=r"npm ended with 3: no such package"):
        anyio.run(run_install, "npm", command, backend_options={"use_uvloop": uvloop})
