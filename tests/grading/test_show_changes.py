"""The program that shows what a work changed, on folders of this machine: its diffs are what changed."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from products import examples
from turnstile_server.grading.inside import show_changes
from turnstile_server.grading.inside.show_changes import FileSide, diff_text
from turnstile_server.grading.programs import IMAGE_TESTS, INSIDE

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "\r", "\x0c", "é"]), max_size=12).map("\n".join)


def show(root: Path, archive: bytes, **config: Any) -> dict[str, Any]:
    tar = root.parent / "work.tar"
    tar.write_bytes(archive)
    wanted = {
        "work": str(tar),
        "root": str(root),
        "protected": [],
        "not_work": [],
        "max_files": 100,
        "max_file_bytes": 1000,
        "max_bytes": 1 << 20,
        "seconds": 60,
        **config,
    }
    command = [*IMAGE_TESTS, str(INSIDE / "start.py"), "show_changes"]
    done = subprocess.run(command, input=json.dumps(wanted).encode(), capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def packed(folder: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(folder, ".")
    return out.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    (folder / "sub" / "b.txt").write_text("b")
    (folder / "run.sh").write_text("true\n")
    (folder / "data.bin").write_bytes(b"\0\1")
    (folder / "same.txt").write_text("same")
    (folder / "link").symlink_to("a.txt")
    return folder


@pytest.fixture
def agent(root: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", root, tmp_path / "agent"], check=True)
    return tmp_path / "agent"


def test_each_change_is_named_by_what_it_is(root: Path, agent: Path) -> None:
    (agent / "a.txt").write_text("one\n2\nthree\n")
    (agent / "sub" / "b.txt").unlink()
    (agent / "run.sh").chmod(0o755)
    (agent / "data.bin").write_bytes(b"\0\2\3")
    (agent / "link").unlink()
    (agent / "link").symlink_to("sub")
    (agent / "new.py").write_text("print()\n")
    (agent / "conftest.py").write_text("")
    (agent / "away").symlink_to("/etc/passwd")
    (agent / "empty").mkdir()
    (agent / ".git").mkdir()
    (agent / ".git" / "config").write_text("[core]")
    found = show(root, packed(agent), protected=["new.*"])
    files = {one["path"]: one for one in found["files"]}
    changes = {path: (one["change"], one["mode_before"], one["mode_after"]) for path, one in files.items()}
    assert changes == {
        "a.txt": ("modified", "100644", "100644"),
        "away": ("added", None, "120000"),
        "conftest.py": ("added", None, "100644"),
        "data.bin": ("modified", "100644", "100644"),
        "link": ("modified", "120000", "120000"),
        "new.py": ("added", None, "100644"),
        "run.sh": ("mode", "100644", "100755"),
        "sub/b.txt": ("deleted", "100644", None),
    }
    assert [path for path, one in files.items() if one["diff"] is None] == ["data.bin", "run.sh"]
    assert [path for path, one in files.items() if one["binary"]] == ["data.bin"]
    assert (files["data.bin"]["size_before"], files["data.bin"]["size_after"]) == (2, 3)
    assert files["a.txt"]["diff"] == "--- a/a.txt\n+++ b/a.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
    assert {path: one["left_out"] for path, one in files.items() if one["left_out"]} == {
        "away": "a link that leaves the work folder",
        "conftest.py": "acts at import",
        "new.py": "protected by the task",
    }
    assert (found["further"], found["left_out"]) == (0, [])


def test_an_answer_is_bounded_and_says_what_it_lacks(root: Path, agent: Path) -> None:
    (agent / "a.txt").write_text("x" * 1001)
    for index in range(30):
        (agent / f"n{index:02}").write_text(f"{index}" * 400)
    large = show(root, packed(agent))["files"][0]
    assert (large["path"], large["diff"], large["omitted"]) == ("a.txt", None, "larger than 1000 bytes")
    few = show(root, packed(agent), max_files=3)
    assert (len(few["files"]), few["further"]) == (3, 28)
    omitted = set[str | None]()
    for most in range(4000, 4800, 200):
        small = show(root, packed(agent), max_bytes=most)
        assert len(json.dumps(small)) < most + 100
        assert len(small["files"]) + small["further"] == 31
        omitted |= {one["omitted"] for one in small["files"]}
    assert any("the answer has no more than" in (why or "") for why in omitted)


def test_what_is_no_file_is_left_out_and_no_archive_is_refused(root: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, target in (
            ("../up", tarfile.REGTYPE, ""),
            ("pipe", tarfile.FIFOTYPE, ""),
            ("hard", tarfile.LNKTYPE, "nowhere"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    found = show(root, out.getvalue())
    assert sorted(found["left_out"]) == [
        ["../up", "not a plain path"],
        ["hard", "a hard link to nothing"],
        ["pipe", "not a regular file"],
    ]
    assert {one["change"] for one in found["files"]} == {"deleted"}
    assert "refused" in show(root, b"no archive at all" * 100)


@pytest.mark.parametrize("quick", [False, True])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(st.tuples(LINES, LINES))
def test_git_makes_the_work_of_the_base_by_the_diff(tmp_path: Path, quick: bool, texts: tuple[str, str]) -> None:
    before, after = (text.encode() for text in texts)
    if before == after:
        return
    made = diff_text("f", FileSide("", 0, before), FileSide("", 0, after), quick=quick)
    (tmp_path / "f").write_bytes(before)
    command = ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", "-"]
    subprocess.run(command, cwd=tmp_path, input=made.encode(), check=True)
    assert (tmp_path / "f").read_bytes() == after


def test_many_lines_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show_changes, "MOST_PAIRS", 0)
    monkeypatch.setattr(show_changes.difflib, "unified_diff", lambda *_: pytest.fail("they were compared"))
    assert "-x\n" in diff_text("f", FileSide("", 0, b"x\n"), FileSide("", 0, b"y\n"), quick=False)
