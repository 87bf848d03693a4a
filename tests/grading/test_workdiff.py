"""The program that takes over an agent's work, started as the grader starts it, on folders of this machine."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from turnstile_server.grading.inside.workdiff import REFUSED, stays_inside
from turnstile_server.grading.programs import IMAGE_TESTS, INSIDE

BASE = {"a.txt": "a", "sub/b.txt": "b", "sub/deep/c.txt": "c", "run.sh": "true", "conftest.py": "base's own"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    for path, text in BASE.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "link").symlink_to("a.txt")
    (folder / "outer").symlink_to("/etc/hostname")
    return folder


def agents_copy(root: Path, tmp_path: Path) -> Path:
    """What an agent would find and change: the same files elsewhere."""
    subprocess.run(["cp", "-a", root, tmp_path / "agent"], check=True)
    return tmp_path / "agent"


def packed(folder: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(folder, ".")
    return out.getvalue()


def take_over(root: Path, archive: bytes, **config: Any) -> tuple[dict[str, Any], int]:
    tar = root.parent / "work.tar"
    tar.write_bytes(archive)
    wanted = {
        "work": str(tar),
        "root": str(root),
        "shared": str(root.parent.parent / "shared"),
        "protected": [],
        "git": True,
        "not_work": [],
        "max_changed": 100,
        "max_shown": 100,
        **config,
    }
    argv = [sys.executable, *IMAGE_TESTS[1:], str(INSIDE / "workdiff.py")]
    done = subprocess.run(argv, input=json.dumps(wanted).encode(), capture_output=True, check=False, timeout=60)
    assert not done.stderr, done.stderr.decode()
    assert not tar.exists()
    said: dict[str, Any] = json.loads(done.stdout)
    return said, done.returncode


def tree(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            found[name] = "/"
        else:
            found[name] = path.read_text() + (" (runs)" if os.access(path, os.X_OK) else "")
    return found


def test_unchanged_work_changes_nothing(root: Path, tmp_path: Path) -> None:
    before = tree(root)
    said, exit_status = take_over(root, packed(agents_copy(root, tmp_path)))
    assert (exit_status, said["counts"]) == (0, {"added": 0, "changed": 0, "deleted": 0, "left_out": 0})
    assert tree(root) == before


def test_every_kind_of_change_is_made(root: Path, tmp_path: Path) -> None:
    agent = agents_copy(root, tmp_path)
    (agent / "a.txt").write_text("A")
    (agent / "run.sh").chmod(0o755)
    (agent / "sub/b.txt").unlink()
    (agent / "sub/deep/c.txt").unlink()
    (agent / "sub/deep").rmdir()
    (agent / "sub/deep").write_text("now a file")
    (agent / "link").unlink()
    (agent / "link").mkdir()
    (agent / "link/inner").write_text("now a folder")
    (agent / "empty").mkdir()
    (agent / "new").symlink_to("sub")
    (agent / "sub/up").symlink_to("../a.txt")
    (agent / "twin").hardlink_to(agent / "a.txt")
    wanted = tree(agent)
    said, exit_status = take_over(root, packed(agent))
    assert (exit_status, said["left_out"]) == (0, [])
    assert tree(root) == wanted
    assert said["added"] == ["empty", "link/inner", "new", "sub/up", "twin"]
    assert said["changed"] == ["a.txt", "link", "run.sh", "sub/deep"]
    assert said["deleted"] == ["sub/b.txt", "sub/deep/c.txt"]


def test_what_acts_by_itself_stays_as_the_task_has_it(root: Path, tmp_path: Path) -> None:
    agent = agents_copy(root, tmp_path)
    (agent / "conftest.py").write_text("the agent's")
    (agent / "sitecustomize.so").write_text("")
    (agent / "sub/__pycache__").mkdir()
    (agent / "sub/__pycache__/b.pyc").write_text("")
    before = tree(root)
    said, _ = take_over(root, packed(agent))
    assert tree(root) == before
    assert {path for path, _ in said["left_out"]} == {
        "conftest.py", "sitecustomize.so", "sub/__pycache__", "sub/__pycache__/b.pyc"
    }  # fmt: skip


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_no_work_stays_and_nothing_is_said_of_it(root: Path, tmp_path: Path, kept: bool) -> None:
    agent = agents_copy(root, tmp_path)
    (agent / "a.txt").write_text("A")
    shutil.rmtree(agent / "sub")
    if kept:
        (agent / "sub").write_text("the agent's")
    said, exit_status = take_over(root, packed(agent), not_work=["sub", "more"], max_changed=1)
    assert (exit_status, said["changed"]) == (0, ["a.txt"])
    assert said["counts"] == {"added": 0, "changed": 1, "deleted": 0, "left_out": 0}
    assert tree(root / "sub") == {"b.txt": "b", "deep": "/", "deep/c.txt": "c"}


GIT = {".git/HEAD": "ref: x", ".git/config": "[core]", ".git/objects/ab/cd": "old", "sub/.git/HEAD": "ref: y"}
GIT_OF_THE_WORK = {
    ".git/hooks/post-checkout": "evil",
    ".git/config": "[core]\nfsmonitor = evil",
    ".git/commondir": "../sub",
    ".git/modules/a/b/hooks/post-checkout": "evil",
    "sub/other/.git": "gitdir: ../deep",
}
GIT_STATE = {".git/HEAD": "ref: z", ".git/refs/heads/config": "id", ".git/objects/ef/01": "new"}


def with_git(root: Path, tmp_path: Path) -> Path:
    put(root, GIT)
    agent = agents_copy(root, tmp_path)
    put(agent, {**GIT_OF_THE_WORK, **GIT_STATE})
    return agent


def put(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def test_what_git_acts_on_stays_as_the_task_has_it_and_the_rest_of_git_is_work(root: Path, tmp_path: Path) -> None:
    agent = with_git(root, tmp_path)
    said, _ = take_over(root, packed(agent))
    assert {path for path, reason in said["left_out"] if reason == "git acts on it"} >= set(GIT_OF_THE_WORK)
    now = tree(root)
    assert (now[".git/config"], now[".git/HEAD"]) == ("[core]", "ref: z")
    assert now.items() >= GIT_STATE.items()
    assert not now.keys() & (GIT_OF_THE_WORK.keys() - {".git/config"})


def test_a_git_folder_that_the_work_makes_a_file_or_removes_keeps_its_configuration(
    root: Path, tmp_path: Path
) -> None:
    agent = with_git(root, tmp_path)
    shutil.rmtree(agent / ".git")
    (agent / ".git").write_text("gitdir: sub/deep")
    take_over(root, packed(agent))
    assert (root / ".git/config").read_text() == "[core]"


def test_nothing_of_git_is_work_where_its_history_was_removed_for_the_agent(root: Path, tmp_path: Path) -> None:
    agent = with_git(root, tmp_path)
    (agent / "a.txt").write_text("A")
    said, _ = take_over(root, packed(agent), git=False)
    assert (said["changed"], said["deleted"], said["left_out"]) == (["a.txt"], [], [])
    assert tree(root).items() >= GIT.items()
    assert not tree(root).keys() & (GIT_OF_THE_WORK.keys() - GIT.keys())


def test_protected_files_survive_their_folder(root: Path, tmp_path: Path) -> None:
    agent = agents_copy(root, tmp_path)
    (agent / "sub/deep/c.txt").unlink()
    (agent / "sub/deep").rmdir()
    said, exit_status = take_over(root, packed(agent), protected=["sub/deep/*"])
    assert (exit_status, (root / "sub/deep/c.txt").read_text()) == (0, "c")
    assert said["left_out"] == [["sub/deep/c.txt", "protected by the task"]]


def member(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", data: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(data)
    return info, data


@pytest.mark.parametrize(
    "members",
    [
        [member("../out", data=b"x")],
        [member("/tmp/turnstile-out", data=b"x")],
        [member("sub/../../out", data=b"x")],
        [member("l", tarfile.SYMTYPE, ".."), member("l/out", data=b"x")],
        [member("outer", tarfile.SYMTYPE, "/etc"), member("outer/out", data=b"x")],
        [member("h", tarfile.LNKTYPE, "/etc/passwd")],
        [member("h", tarfile.LNKTYPE, "h")],
        [member("d", tarfile.CHRTYPE), member("p", tarfile.FIFOTYPE), member("b", tarfile.BLKTYPE)],
        [member("x", tarfile.SYMTYPE, "sub/deep"), member("y", tarfile.SYMTYPE, "x/../../../etc")],
        [member("a.txt/below", data=b"x"), member("a.txt", data=b"x")],
        [member("outer/below", data=b"x")],
    ],
)
def test_nothing_is_made_outside_and_no_link_leads_there(
    root: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    changed = Path("/etc/passwd").stat().st_mtime_ns
    beside = {path.name for path in root.parent.parent.iterdir()}
    take_over(root, out.getvalue())
    assert Path("/etc/passwd").stat().st_mtime_ns == changed
    assert {path.name for path in root.parent.parent.iterdir()} == beside
    assert sorted(path.name for path in root.parent.iterdir()) == ["root"]
    assert not Path("/tmp/turnstile-out").exists()
    for path in root.rglob("*"):
        if path.is_symlink() and path.name != "outer":
            assert root.resolve() in (path.resolve(), *path.resolve().parents)
        else:
            assert path.is_symlink() or path.is_dir() or path.is_file()


@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        ("a/b", "../c", True),
        ("a/b", "../../c", False),
        ("a", "b/c", True),
        ("a", "b/../c", False),
        ("a", "/work/b", True),
        ("a", "/work", True),
        ("a", "/work/../etc", False),
        ("a", "/workshop", False),
        ("a", "./b", True),
        ("a/b/c", ".././../d", True),
    ],
)
def test_where_a_link_leads(path: str, target: str, inside: bool) -> None:
    assert stays_inside(path, target, "/work") is inside


def test_too_many_changes_are_refused_before_any_is_made(root: Path, tmp_path: Path) -> None:
    agent = agents_copy(root, tmp_path)
    for number in range(5):
        (agent / f"f{number}").write_text("")
    before = tree(root)
    said, exit_status = take_over(root, packed(agent), max_changed=4)
    assert (exit_status, tree(root) == before) == (REFUSED, True)
    assert said["refused"] == "the work changes 5 files; at most 4 may be"
