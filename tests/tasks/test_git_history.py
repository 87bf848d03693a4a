"""The program that leaves one commit of a repository, on repositories whose history contains the solution.

The agent may read the whole of ``tmp_path``. The solution's text is looked for in every file there, also in
compressed objects.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from turnstile_server.errors import FileProblem, TaskFailed
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox
from turnstile_server.tasks import git_history
from turnstile_server.tasks.git_history import keep_one_commit, program
from turnstile_server.tasks.model import Task

SECRET = "return 2 * n  # the solution, word for word"
ENV = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "3",
    "GIT_CONFIG_KEY_0": "protocol.file.allow",
    "GIT_CONFIG_VALUE_0": "always",
    "GIT_CONFIG_KEY_1": "safe.directory",
    "GIT_CONFIG_VALUE_1": "*",
    "GIT_CONFIG_KEY_2": "init.defaultBranch",
    "GIT_CONFIG_VALUE_2": "trunk",
    **{f"GIT_{who}_{what}": f"{who}@x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def put(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


BASE = {
    "pkg/mathx.py": "def double(n):\n    return n + 1\n",
    "pkg/deep/er/a.txt": "a\n",
    "pkg-b/b.txt": "b\n",
    "run.sh": "true\n",
    ".gitignore": "*.log\n",
    "ä name with spaces.txt": "x\n",
}


def commit_all(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


def repository(folder: Path, *options: str) -> Path:
    """At its base; the solution is the next commit, on a branch."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", *options)
    put(folder, BASE)
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("pkg/mathx.py")
    commit_all(folder, "base")
    git(folder, "checkout", "-q", "-b", "future")
    put(folder, {"pkg/mathx.py": f"def double(n):\n    {SECRET}\n"})
    commit_all(folder, "the fix")
    git(folder, "checkout", "-q", "trunk")
    return folder


def future_branch_and_tag(at: Path) -> None:
    git(repository(at), "tag", "v2", "future")


def packed(at: Path) -> None:
    git(repository(at), "tag", "v2", "future")
    git(at, "gc", "-q")
    git(at, "pack-refs", "--all")


def reflog_alone(at: Path) -> None:
    git(repository(at), "merge", "-q", "future")
    git(at, "reset", "-q", "--hard", "HEAD~1")
    git(at, "branch", "-q", "-D", "future")


def unreachable(at: Path) -> None:
    reflog_alone(at)
    git(at, "reflog", "expire", "--expire=now", "--all")


def stash(at: Path) -> None:
    reflog_alone(at)
    put(at, {"pkg/mathx.py": SECRET})
    git(at, "stash", "-q")


def remote_refs(at: Path) -> None:
    git(repository(at.parent / "origin").parent, "clone", "-q", "origin", str(at))
    subprocess.run(["rm", "-rf", at.parent / "origin"], check=True)


def partial_clone(at: Path) -> None:
    origin = repository(at.parent / "origin")
    git(origin, "config", "uploadpack.allowFilter", "true")
    git(at.parent, "clone", "-q", "--filter=tree:0", f"file://{origin}", str(at))
    git(at, "show", "-s", "origin/future:pkg/mathx.py")
    assert list(at.glob(".git/objects/pack/*.promisor"))
    subprocess.run(["rm", "-rf", origin], check=True)


def alternates(at: Path) -> None:
    git(repository(at.parent / "origin").parent, "clone", "-q", "--shared", "origin", str(at))
    git(at.parent / "origin", "checkout", "-q", "--detach", "trunk")


def linked_worktrees(at: Path) -> None:
    git(repository(at), "worktree", "add", "-q", "../elsewhere", "future")
    git(at, "worktree", "add", "-q", "--detach", "inner", "future")


def leftovers(at: Path) -> None:
    repository(at)
    put(at, {"pkg/mathx.py.orig": SECRET, "pkg/mathx.py.rej": SECRET})
    git(at, "fetch", "-q", ".", "future")
    put(at, {".git/ORIG_HEAD": git(at, "rev-parse", "future"), ".git/hooks/post-commit": SECRET})


def submodule(at: Path) -> None:
    inner = repository(at.parent / "inner")
    repository(at)
    git(at, "submodule", "-q", "add", str(inner), "sub")
    commit_all(at, "with a submodule")
    subprocess.run(["rm", "-rf", inner], check=True)
    git(at, "branch", "-q", "-D", "future")


def nested_and_untracked(at: Path) -> None:
    repository(at)
    repository(at / "vendor" / "inner")


def bare_mirror(at: Path) -> None:
    repository(at)
    git(at, "clone", "-q", "--mirror", ".", "mirror.git")


def git_folder_elsewhere(at: Path) -> None:
    repository(at)
    (at / ".git").rename(at.parent / "history")
    (at / ".git").write_text(f"gitdir: {at.parent / 'history'}\n")


def a_link_to_the_git_folder(at: Path) -> None:
    repository(at)
    (at / ".git").rename(at.parent / "history")
    (at / ".git").symlink_to("../history")


def detached(at: Path) -> None:
    git(repository(at), "checkout", "-q", "--detach")


def index_of_version_4(at: Path) -> None:
    git(repository(at), "update-index", "--index-version", "4")


def split_index(at: Path) -> None:
    git(repository(at), "update-index", "--split-index")
    put(at, {"new.txt": "new\n"})
    git(at, "add", "new.txt")
    assert list(at.glob(".git/sharedindex.*"))


def ids_of_sha256(at: Path) -> None:
    repository(at, "--object-format=sha256")


HISTORIES: list[Callable[[Path], None]] = [
    future_branch_and_tag,
    packed,
    reflog_alone,
    unreachable,
    stash,
    remote_refs,
    partial_clone,
    alternates,
    linked_worktrees,
    leftovers,
    submodule,
    nested_and_untracked,
    bare_mirror,
    git_folder_elsewhere,
    a_link_to_the_git_folder,
    detached,
    index_of_version_4,
    split_index,
    ids_of_sha256,
]


def scrub(root: Path) -> dict[str, Any]:
    place = root.parent / "program"
    for name, data in program().items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    config = json.dumps({"root": str(root), "program": str(place)})
    argv = [sys.executable, "-I", "-S", "-B", str(place), config]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=60)
    assert not done.stderr, done.stderr.decode()
    assert not place.exists()
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def streams(data: bytes) -> Iterator[bytes]:
    """What zlib unpacks, from any place of the data on."""
    at = data.find(b"\x78")
    while at >= 0:
        unpacked = b""
        with contextlib.suppress(zlib.error):
            unpacked = zlib.decompressobj().decompress(data[at:])
        yield unpacked
        at = data.find(b"\x78", at + 1)


def holders(folder: Path, text: str) -> list[str]:
    """The files with the text, as it is or compressed."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if text.encode() in data or any(text.encode() in each for each in streams(data)):
                found.append(str(path.relative_to(folder)))
    return found


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_nothing_of_the_history_can_be_read_and_git_goes_on_working(
    history: Callable[[Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "work"
    history(root)
    put(root, {"untracked.txt": "u\n", "ignored.log": "i\n"})
    assert holders(tmp_path, SECRET), "the history does not hold the solution, so this shows nothing"
    tracked = git(root, "ls-files", "-z")
    files = {path: path.read_bytes() for path in root.glob("pkg/**/*") if path.is_file()}

    report = scrub(root)

    assert "problem" not in report
    assert holders(tmp_path, SECRET) == []
    assert report["verified_by"] == "git"
    assert git(root, "ls-files", "-z") == tracked
    assert set(git(root, "status", "--porcelain", "--ignored").splitlines()) >= {
        "?? untracked.txt",
        "!! ignored.log",
    }
    assert git(root, "status", "--porcelain", "-uno") == ""
    assert git(root, "diff", "HEAD", "--stat") == ""
    assert {path: path.read_bytes() for path in files if path.suffix not in (".orig", ".rej")} == {
        path: data for path, data in files.items() if path.suffix not in (".orig", ".rej")
    }
    for one in report["repositories"]:
        at = root / one["path"]
        assert git(at, "fsck", "--full", "--strict") == ""
        assert git(at, "log", "--all", "--reflog", "--format=%H %an %ad") == (
            f"{one['commit']} Base Sat Jan 1 00:00:00 2000 +0000\n"
        )
        objects = git(at, "cat-file", "--batch-all-objects", "--batch-check").splitlines()
        assert [line.split()[0] for line in objects if " commit " in line] == [one["commit"]]
        assert [git(at, "for-each-ref", "--format=%(refname)"), git(at, "remote"), git(at, "stash", "list")] == [
            "refs/heads/main\n",
            "",
            "",
        ]
        names = {path.name for path in (at / ".git").iterdir()}
        assert names <= {"HEAD", "config", "index", "info", "objects", "refs"}


def test_an_agent_can_commit_on_it(tmp_path: Path) -> None:
    root = tmp_path / "work"
    packed(root)
    scrub(root)
    put(root, {"pkg/mathx.py": "def double(n):\n    return 2 * n\n", "new.txt": "n\n"})
    (root / "run.sh").chmod(0o644)
    assert git(root, "status", "--porcelain").splitlines() == [" M pkg/mathx.py", " M run.sh", "?? new.txt"]
    assert "+    return 2 * n" in git(root, "diff")
    commit_all(root, "mine")
    git(root, "gc", "-q", "--prune=now")
    assert git(root, "log", "--format=%s").splitlines() == ["mine", "Base"]


@pytest.mark.slow
def test_the_commit_is_the_same_for_the_same_files(tmp_path: Path) -> None:
    roots = [tmp_path / "one" / "work", tmp_path / "two" / "work"]
    for root, history in zip(roots, (packed, stash), strict=True):
        history(root)
    assert len({scrub(root)["repositories"][0]["commit"] for root in roots}) == 1


def test_pruning_keeps_the_solution_beside_a_promisor(tmp_path: Path) -> None:
    """The usual way to remove a history, which this one is there for."""
    root = tmp_path / "work"
    partial_clone(root)
    git(root, "remote", "remove", "origin")
    git(root, "reflog", "expire", "--expire=now", "--all")
    git(root, "gc", "-q", "--prune=now")
    assert git(root, "for-each-ref", "--format=%(refname)") == "refs/heads/trunk\n"
    assert holders(tmp_path, SECRET)


def test_files_as_they_stand_are_committed_and_not_those_of_the_index(tmp_path: Path) -> None:
    root = repository(tmp_path / "work")
    put(root, {"pkg/mathx.py": "changed\n", "staged.txt": "s\n"})
    git(root, "add", "staged.txt")
    (root / "pkg-b" / "b.txt").unlink()
    scrub(root)
    assert git(root, "status", "--porcelain") == ""
    assert git(root, "show", "HEAD:pkg/mathx.py") == "changed\n"
    assert git(root, "ls-files", "pkg-b", "staged.txt") == "staged.txt\n"


def test_what_decides_whether_a_file_is_ignored_or_changed_is_kept_of_the_configuration(tmp_path: Path) -> None:
    root = repository(tmp_path / "work")
    put(root, {".git/info/exclude": "*.tmp\n", "a.tmp": "a\n"})
    git(root, "config", "core.fileMode", "false")
    git(root, "config", "core.fsmonitor", "./evil")
    git(root, "config", "remote.origin.url", "https://example.invalid/x.git")
    (root / "run.sh").chmod(0o644)
    scrub(root)
    assert git(root, "status", "--porcelain") == ""
    assert git(root, "ls-files", "-s", "run.sh").startswith("100755 ")
    assert "evil" not in (root / ".git/config").read_text()
    assert "example" not in (root / ".git/config").read_text()


def test_a_bare_repository_that_is_a_file_of_another_is_kept_and_told(tmp_path: Path) -> None:
    root = repository(tmp_path / "work")
    git(root, "init", "-q", "--bare", "tests/data/sample.git")
    put(root, {"tests/data/sample.git/objects/keep": "", "tests/data/sample.git/refs/keep": ""})
    commit_all(root, "data of the tests")
    report = scrub(root)
    assert report["kept"] == ["tests/data/sample.git"]
    assert git(root, "status", "--porcelain") == ""


def test_a_folder_without_a_repository_stays_as_it_is(tmp_path: Path) -> None:
    put(tmp_path / "work", BASE)
    assert scrub(tmp_path / "work") == {"repositories": [], "removed": [], "kept": [], "verified_by": "git"}
    assert not (tmp_path / "work" / ".git").exists()


def bare_root(at: Path) -> None:
    git(repository(at.parent / "origin").parent, "clone", "-q", "--bare", "origin", str(at))


def below_another(at: Path) -> None:
    repository(at.parent)
    put(at, BASE)


def a_linked_worktree(at: Path) -> None:
    git(repository(at.parent / "main"), "worktree", "add", "-q", "--detach", str(at))


def a_broken_index(at: Path) -> None:
    (repository(at) / ".git" / "index").write_bytes(b"DIRC\0\0\0\2\0\0\0\1")


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (bare_root, "itself is a bare repository"),
        (below_another, "lies in the repository"),
        (a_linked_worktree, "linked worktree of"),
        (a_broken_index, "index is cut off"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_cleaned_is_told_and_left_alone(
    history: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    root = tmp_path / "outer" / "work"
    history(root)
    before = holders(tmp_path, SECRET)
    assert said in scrub(root)["problem"]
    assert holders(tmp_path, SECRET) == before


@pytest.mark.anyio
async def test_its_program_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def noted() -> dict[str, bytes]:
        threads.add(threading.get_ident())
        return {}

    class Full:
        async def upload(self, archive: bytes, path: str) -> None:
            raise FileProblem("no room")

    monkeypatch.setattr(git_history, "program", noted)
    with pytest.raises(FileProblem):
        await git_history.keep_one_commit(cast(Sandbox, Full()), Task(id="t", instruction="x"), 1)
    assert threads
    assert threading.get_ident() not in threads


@dataclass
class Answering:
    """A sandbox in which the program is another one, that prints ``output``."""

    output: bytes
    python = "python3"
    workdir = "/testbed"

    async def upload(self, archive: bytes, target: str) -> None:
        pass

    async def exec(self, command: Command) -> ExecResult:
        return ExecResult(0, self.output, b"", 0, False, 0.1)


@pytest.mark.anyio
@pytest.mark.parametrize("output", [b"3", b"null", b"[]", b'"problem"', b"", b"[" * 100_000])
async def test_a_program_that_reports_no_object_fails_the_task(output: bytes) -> None:
    task = Task.model_validate({"id": "t", "instruction": "Mend it.", "git_history": "one_commit"})
    with pytest.raises(TaskFailed, match="git_history of task t: `one_commit` needs a python3"):
        await keep_one_commit(Answering(output), task, 5.0)  # type: ignore[arg-type]
