"""Folders for sockets and agents that cannot serve: told at start or at installation, as infrastructure."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest
from server_process import AS_A_USER, environment, mounted, refusal

from turnstile.models import Fault
from turnstile_server import backends
from turnstile_server.agents.installer import Installer
from turnstile_server.agents.spec import AgentSpec, Install
from turnstile_server.errors import AgentNotInstalled
from turnstile_server.grading.programs import LAUNCH_CLIENT
from turnstile_server.sandboxes.run_folder import MAX_FOLDER_PATH
from turnstile_server.settings import AgentSettings, Settings


@pytest.mark.thorough
@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "local"])
def test_a_folder_for_sockets_with_too_long_a_path(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / ("x" * MAX_FOLDER_PATH)
    line = refusal(
        *("--model", tiny_model, "--data-dir", tmp_path / "data", "--sandbox", kind),
        TURNSTILE_SANDBOXES__RUN_DIR=str(folder),
    )
    assert f"{folder}, has a path of {len(str(folder))} bytes" in line
    assert "choose a shorter sandboxes.run_dir" in line


@pytest.mark.slow
def test_a_model_folder_that_the_servers_user_cannot_read(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir(mode=0o000)
    line = refusal("--data-dir", tmp_path / "data", under=AS_A_USER, TURNSTILE_MODEL=str(model))
    assert f"the model folder {model} cannot be read by uid" in line
    assert f"chmod -R a+rX {model}" in line


@pytest.mark.thorough
@pytest.mark.slow
def test_a_folder_for_sockets_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    # Not below tmp_path, which is too long for a socket where tests run in parallel.
    with tempfile.TemporaryDirectory(prefix="ts-") as place:
        run_dir = Path(place, "run")
        Path(place).chmod(0o500)
        line = refusal(
            *("--model", tiny_model, "--data-dir", tmp_path / "data"),
            under=AS_A_USER,
            TURNSTILE_SANDBOXES__RUN_DIR=str(run_dir),
        )
    assert f"the folder of the sandboxes' sockets, {run_dir}, cannot be used by uid" in line
    assert "Permission denied; choose another with sandboxes.run_dir" in line


def test_without_any_temporary_folder_sockets_are_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(backends.tempfile, "gettempdir", none)
    made = backends.build_backends(Settings(data_dir=tmp_path, sandboxes={"kind": "local"}))
    assert made.sandboxes.inner._run_dir == tmp_path / "run"


def spec(**install: object) -> AgentSpec:
    return AgentSpec(name="mine", version="1", summary="s", command=("true",), install=Install(**install))


def install_under(folder: Path, options: str, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turnstile", "agents", "install", *names]
    extra = {"TURNSTILE_AGENTS__INSTALL_DIR": str(folder / "agents")}
    return subprocess.run(
        [*mounted(folder, options), *command],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_agents_are_not_installed_where_nothing_can_be_run(tmp_path: Path) -> None:
    done = install_under(tmp_path, "noexec", "claude-code")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("turnstile: agent claude-code cannot run: agents are installed in ")
    assert "mounted noexec" in line
    assert "agents.install_dir (TURNSTILE_AGENTS__INSTALL_DIR)" in line


@pytest.mark.thorough
@pytest.mark.slow
def test_an_agent_of_plain_files_is_installed_anywhere(tmp_path: Path) -> None:
    assert install_under(tmp_path, "noexec", "plain-loop").returncode == 0


def test_an_agent_that_was_installed_before_its_place_became_noexec_is_the_infrastructures_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer = Installer(AgentSettings(install_dir=tmp_path), LAUNCH_CLIENT)
    agent = spec(pip=("one==1",))
    (tmp_path / installer.name_of(agent)).mkdir()
    anyio.run(installer.install, agent)
    monkeypatch.setattr(Installer, "place_problem", lambda _: "mounted noexec")
    with pytest.raises(AgentNotInstalled, match="agent mine cannot run: mounted noexec") as refused:
        anyio.run(installer.install, agent)
    assert refused.value.fault is Fault.INFRASTRUCTURE


def test_a_folder_for_agents_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    installer = Installer(AgentSettings(install_dir=tmp_path / "file" / "agents"), LAUNCH_CLIENT)
    with pytest.raises(
        AgentNotInstalled, match=r"by uid \d+: Not a directory; make it writable, or .*install_dir"
    ):
        anyio.run(installer.install, spec(pip=("one==1",)))
