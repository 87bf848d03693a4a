"""What of the installed agents a sandbox gets: its own agent's, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnstile_server.agents.installer import Installer
from turnstile_server.agents.launch import INSTALLS
from turnstile_server.agents.packages import NODE
from turnstile_server.agents.registry import load_registry
from turnstile_server.episodes.plan import agent_mounts
from turnstile_server.grading.programs import LAUNCH_CLIENT
from turnstile_server.settings import AgentSettings

AGENTS = load_registry()


@pytest.mark.parametrize("name", sorted(spec.name for spec in AGENTS))
def test_a_sandbox_mounts_its_own_agent_and_nodejs_only_where_that_runs_it(name: str, tmp_path: Path) -> None:
    installer, spec = Installer(AgentSettings(install_dir=tmp_path), LAUNCH_CLIENT), AGENTS.get(name)
    own = installer.name_of(spec)
    runs_node = "{node}" in spec.command
    mounts = {mount.target: mount.source for mount in agent_mounts(installer, spec)}
    wanted = {own, NODE} if runs_node else {own}
    assert mounts == {f"{INSTALLS}/{folder}": tmp_path / folder for folder in wanted}
