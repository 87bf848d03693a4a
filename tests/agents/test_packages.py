"""The commands of an agent's installation, on the event loop that the server runs on."""

from __future__ import annotations

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

from turnstile_server.agents import packages
from turnstile_server.agents.packages import install_python_packages, run_install
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


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that `uv venv` made has no pip."""
    monkeypatch.setattr(packages, "find_spec", lambda _: None)


def module(folder: Path) -> str:
    """A project without dependencies, made of one module ``one``; its build needs nothing but what is here."""
    folder.mkdir()
    (folder / "one.py").write_text("ONE = 1\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "one"\nversion = "1"\n'
    )
    (folder / "backend.py").write_text(
        "import zipfile\n"
        "def build_wheel(folder, *_):\n"
        "    with zipfile.ZipFile(f'{folder}/one-1-py3-none-any.whl', 'w') as wheel:\n"
        "        wheel.write('one.py')\n"
        "        info = 'one-1.dist-info'\n"
        "        wheel.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\\nName: one\\nVersion: 1\\n')\n"
        "        tag = 'Root-Is-Purelib: true\\nTag: py3-none-any\\n'\n"
        "        wheel.writestr(f'{info}/WHEEL', f'Wheel-Version: 1.0\\n{tag}')\n"
        "        wheel.writestr(f'{info}/RECORD', '')\n"
        "    return 'one-1-py3-none-any.whl'\n"
    )
    return str(folder)


def test_uv_installs_where_there_is_no_pip(tmp_path: Path, no_pip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    before = os.umask(0o077)
    try:
        anyio.run(install_python_packages, "mine", (module(tmp_path / "one"),), tmp_path / "python")
    finally:
        os.umask(before)
    assert (tmp_path / "python" / "one.py").read_text() == "ONE = 1\n"
    for path in (tmp_path / "python").rglob("*"):
        assert path.stat().st_mode & 0o044 == 0o044, path


def test_without_pip_and_uv_the_error_says_what_to_install(
    tmp_path: Path, no_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AgentNotInstalled, match=r"agent mine .* no pip, and there is no uv .* install one"):
        anyio.run(install_python_packages, "mine", ("x==1",), tmp_path / "python")
