"""``turnstile openenv layout``: what it writes passes the checks of ``openenv validate`` and ``openenv push``."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from openenv.cli._validation import validate_multi_mode_deployment
from openenv.cli.commands.push import _prepare_staging_directory, _validate_openenv_directory

from turnstile_server.commands.openenv_layout import build_sources, write_layout

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
KEY = "k" * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("layout") / "my-turnstile"
    write_layout(made, ROOT, "my-turnstile")
    return made


def test_the_checks_of_the_last_openenv_core_find_only_that_the_server_does_without_it(folder: Path) -> None:
    issues = ["Missing required dependency: openenv-core>=0.2.0 (or openenv>=0.2.0)"]
    assert validate_multi_mode_deployment(folder) == (False, issues)


def test_the_checks_of_openenv_push_pass_without_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, manifest = _validate_openenv_directory(folder)
    assert (name, manifest["app"], manifest["port"]) == ("my-turnstile", "server.app:app", 8000)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("interface", [True, False])
def test_what_push_would_upload_is_a_space_that_builds_from_its_root(
    folder: Path, tmp_path: Path, interface: bool
) -> None:
    staged = tmp_path / "staging"
    _prepare_staging_directory(
        folder, "my-turnstile", staged, [".*", "__pycache__", "*.pyc"], enable_interface=interface
    )
    dockerfile = (staged / "Dockerfile").read_text()
    for source in build_sources(dockerfile):
        assert (staged / source).exists() or source == "server", source
    assert dockerfile.count("\nCMD ") == 1
    readme = (staged / "README.md").read_text()
    matter = yaml.safe_load(readme.split("---\n")[1])
    assert {"sdk": "docker", "app_port": 8000, "tags": ["openenv"]}.items() <= matter.items()
    assert matter["base_path"] == "/health"


def test_the_image_s_sources_are_read_from_the_dockerfile() -> None:
    text = "COPY --from=a /x /y\nCOPY a b c/\nRUN --mount=type=bind,source=d/e.py,target=/f \\\n  true\n"
    text += "COPY --chown=1:1 g h\n"
    assert build_sources(text) == ["a", "b", "d/e.py", "g"]
    found = build_sources((ROOT / "server" / "Dockerfile").read_text())
    assert {"client", "env_server", "pyproject.toml"} <= set(found)


def test_the_package_at_its_root_can_be_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder.parent))
    linked = folder.parent / "my_turnstile"
    linked.symlink_to(folder)
    package = importlib.import_module("my_turnstile")
    models = importlib.import_module("my_turnstile.models")
    assert package.TurnstileEnv.__mro__[1].__name__ == "GenericEnvClient"
    assert models.TurnstileAction(type="wait").type == "wait"


@pytest.mark.parametrize(
    ("where", "source", "name", "said"),
    [
        ("full", ROOT, "x", "not an empty folder"),
        ("new", ROOT / "docs", "x", "no checkout"),
        ("new", ROOT, "no spaces", "--name"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    tmp_path: Path, where: str, source: Path, name: str, said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=said):
        write_layout(tmp_path / where, source, name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "mine.txt"]


def _run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.slow
def test_the_command_writes_a_layout_that_serves(tmp_path: Path) -> None:
    done = _run(BIN / "turnstile", "openenv", "layout", "space", "--name", "my_space", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = _run(BIN / "turnstile", "openenv", "layout", "space", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (2, "turnstile: space is not an empty folder\n")
    for url in _served(tmp_path / "space"):
        assert httpx.get(f"{url}/health").json() == {"status": "healthy"}


def _served(folder: Path) -> Iterator[str]:
    env = {**os.environ, "TURNSTILE_CONTROL_KEY": KEY, "TURNSTILE_DATA_DIR": str(folder / "outputs")}
    flags = ["--engine", "none", "--port", "0", "--agent-port", "0"]
    command = [sys.executable, "-m", "server.app", *flags]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["control_url"]
        finally:
            process.terminate()
