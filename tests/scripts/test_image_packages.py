"""What the image leaves out: said against the lock, and needed by nothing that a server imports."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import uvloop.loop
from packaging.requirements import Requirement

import image_first_start
from image_packages import LEFT_OUT, LOCK, Lock, image_packages, strip

LOCKED = tomllib.loads(LOCK.read_text())
ROOT = LOCK.parent
ABSENT = ("gradio", "pandas", "pillow", "tomli", "hf-xet", "watchfiles", "cyclopts", "jsonschema-path")


def names(requirements: list[str]) -> set[str]:
    return {Requirement(requirement).name for requirement in requirements}


def test_the_image_has_every_package_that_the_server_asks_for_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = names([*project["dependencies"], *project["optional-dependencies"]["server"]])
    assert asked - names(image_packages(LOCKED, ["server"])) == set()


def test_the_image_has_none_of_what_is_left_out() -> None:
    assert names(image_packages(LOCKED, ["server", "embedded"])) & set(ABSENT) == set()
    assert "torch" not in names(image_packages(LOCKED, ["server"]))
    assert "torch" in names(image_packages(LOCKED, ["server", "embedded"]))


@pytest.mark.parametrize(("asking", "need"), LEFT_OUT)
def test_what_is_left_out_is_still_asked_for(asking: str, need: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LEFT_OUT, (asking, need))
    name, _, extra = asking.rstrip("]").partition("[")
    needs = {one for one, _ in Lock(LOCKED).needs(name, extra or None)}
    assert needs if need == "*" else need in needs


@pytest.mark.thorough
@pytest.mark.slow
def test_a_server_needs_nothing_of_it() -> None:
    left_out = {
        name.replace("-", "_")
        for name in {package["name"] for package in LOCKED["package"]}
        - names(image_packages(LOCKED, ["server", "embedded"]))
        - {"turnstile-rl"}
    } | {"PIL"}
    program = f"""
import sys
for name in {sorted(left_out)!r}:
    sys.modules[name] = None
import turnstile_server.app, turnstile_server.hosted, turnstile_server.commands.serve
import turnstile_server.control.openenv.server
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_library_without_its_symbols_still_loads(tmp_path: Path) -> None:
    library = tmp_path / Path(uvloop.loop.__file__).name
    shutil.copy(uvloop.loop.__file__, library)
    before = library.stat().st_size
    cut = strip(library)
    assert cut > 1 << 20
    assert library.stat().st_size == before - cut
    assert strip(library) == 0
    load = (
        "import importlib.util as u, sys; spec = u.spec_from_file_location('uvloop.loop', sys.argv[1]); "
        "module = u.module_from_spec(spec); spec.loader.exec_module(module); module.Loop().close()"
    )
    subprocess.run([sys.executable, "-c", load, library], check=True, timeout=60)


def test_files_that_are_no_libraries_keep_every_byte(tmp_path: Path) -> None:
    text = tmp_path / "notes.so.txt"
    text.write_bytes(b"GROUP ( libc.so.6 )\n" * 100)
    assert strip(text) == 0
    assert text.read_bytes() == b"GROUP ( libc.so.6 )\n" * 100


def test_a_cuda_build_of_torch_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_first_start.check_torch()
    monkeypatch.setattr(
        image_first_start, "requires", lambda name: ["sympy", 'nvidia-cublas==13.1; platform_system == "Linux"']
    )
    with pytest.raises(SystemExit, match=r"nvidia-cublas.*TORCH_INDEX"):
        image_first_start.check_torch()


@pytest.mark.slow
def test_every_module_of_ours_is_imported_where_only_the_images_packages_are() -> None:
    """As the image's build does; what lacks a package that no image has is known."""
    packages = [re.sub(r"[-_.]+", "-", name).lower() for name in names(image_packages(LOCKED, ["server", "otel"]))]
    without_others = """
import importlib.metadata, re, sys
import image_first_start
known, owners = set(sys.argv[1].split(",")) | {"turnstile-rl"}, importlib.metadata.packages_distributions()
class Others:
    @staticmethod
    def find_spec(name, path=None, target=None):
        of = {re.sub(r"[-_.]+", "-", each).lower() for each in owners.get(name.partition(".")[0], ())}
        if of and not of & known:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Others)
image_first_start.import_all()
"""
    path = os.pathsep.join([str(ROOT / "scripts"), *sys.path])
    command = [sys.executable, "-c", without_others, ",".join(packages)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
