"""What goes into the grading sandbox compiled is what its sources say, and is left where it does not fit."""

from __future__ import annotations

import importlib.util
import io
import marshal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from turnstile_server.grading.inside.boundary import work_process
from turnstile_server.grading.programs import INSIDE, pack_programs

PYTHON = ("python3", "-I", "-S", "-B")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(pack_programs(PYTHON))) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "inside"


def test_every_module_is_there_with_the_code_of_its_source(programs: Path) -> None:
    sources = sorted(path.relative_to(INSIDE) for path in INSIDE.rglob("*.py"))
    assert sorted(path.relative_to(programs) for path in programs.rglob("*.py")) == sources
    for name in sources:
        data = Path(importlib.util.cache_from_source(str(programs / name))).read_bytes()
        assert data[:4] == importlib.util.MAGIC_NUMBER
        shown = f"<boundary {name.stem}>"
        assert marshal.loads(data[16:]) == compile((INSIDE / name).read_bytes(), shown, "exec", dont_inherit=True)


def test_an_interpreter_takes_what_is_compiled_and_names_the_source(programs: Path) -> None:
    """Whatever the source says by then: the compiled form is not compared with it."""
    (programs / "suite_rules.py").write_text("raise SystemExit('the source was taken')")
    shows = "import sys; sys.path.insert(0, sys.argv[1]); import inside.suite_rules as m; print(m.__cached__)"
    done = subprocess.run(
        [sys.executable, *PYTHON[1:], "-c", shows, str(programs.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == importlib.util.cache_from_source(str(programs / "suite_rules.py")), done.stderr


@pytest.mark.parametrize("header", [b"", b"\0\0\0\0" + b"\1\0\0\0", importlib.util.MAGIC_NUMBER + b"\0\0\0\0"])
def test_the_works_process_gets_the_source_where_the_compiled_form_does_not_fit(
    programs: Path, header: bytes
) -> None:
    """None; of another interpreter; of the kind that could be older than its source."""
    path = programs / "boundary" / "wire.py"
    name, source, compiled = work_process._module(path)
    assert (name, source) == ("wire", "")
    assert compiled is not None
    cached = Path(importlib.util.cache_from_source(str(path)))
    if header:
        cached.write_bytes(header + cached.read_bytes()[len(header) :])
    else:
        cached.unlink()
    assert work_process._module(path) == ("wire", path.read_text(), None)
