"""The agent's repository in real sandboxes: one commit, usable by git, and no part of the work."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from grading_support import BASE, FIX, Watched, grader, spec_of, the_task

from turnstile_server.grading.protocol import Work
from turnstile_server.sandboxes.protocol import Command, User
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Files
from turnstile_server.tasks.tarball import pack
from turnstile_server.tasks.workspace import prepare_for_agent

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, with the solution in the next commit."""
    folder = tmp_path_factory.mktemp("repository")
    for path, text in BASE.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    git(folder, "checkout", "-q", "-b", "future")
    (folder / "mathx/__init__.py").write_text(FIX)
    git(folder, "commit", "-q", "-a", "-m", "fix")
    git(folder, "checkout", "-q", "trunk")
    return folder


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


READS_THE_HISTORY = """
import pathlib, zlib
for each in pathlib.Path(".git/objects").rglob("*"):
    if each.is_file() and len(each.name) == 38:
        text = zlib.decompress(each.read_bytes())
        if text.startswith(b"blob") and b"return 2 * n" in text:
            exec(text.partition(b"\\0")[2])
"""
"""A work that finds the solution where it is judged."""


@pytest.mark.parametrize("provider", ["local", pytest.param("docker", marks=pytest.mark.docker)], indirect=True)
async def test_the_agent_has_one_commit_and_its_changes_are_the_work(provider: Watched, repository: Path) -> None:
    task = the_task(git_history="one_commit", base={"folder": str(repository)})
    sandbox = await provider.create(spec_of(task))
    try:
        await prepare_for_agent(sandbox, task, lambda files: pack(files, TaskSettings()), TaskSettings())
        for user in (User.AGENT, User.HARNESS):
            seen = await sandbox.exec(
                Command(("sh", "-c", "git status --porcelain && git log --all --format=%s"), user=user)
            )
            if seen.exit_code != 127:  # the image has a git
                assert (seen.exit_code, seen.stdout, seen.stderr) == (0, b"Base\n", b"")
        left = await sandbox.exec(Command(("sh", "-c", "ls /tmp; find .git -type f | grep -v /pack/ | sort")))
        assert left.stdout.split() == [
            f".git/{n}".encode() for n in ("HEAD", "config", "index", "info/exclude", "refs/heads/main")
        ]
        await sandbox.write(f"{sandbox.workdir}/mathx/__init__.py", READS_THE_HISTORY.encode())
        cheat = await sandbox.download(sandbox.workdir, 1 << 24)
        await sandbox.write(f"{sandbox.workdir}/mathx/__init__.py", FIX.encode())
        await sandbox.write(f"{sandbox.workdir}/.git/hooks/post-checkout", b"evil")
        fixed = await sandbox.download(sandbox.workdir, 1 << 24)
    finally:
        await sandbox.destroy()
    grade = await grader(provider).grade(task, Work(archive=fixed))
    assert grade.reward == 1.0, grade.detail
    assert grade.detail["diff"]["changed"] == ["mathx/__init__.py"]
    assert grade.detail["diff"]["counts"] == {"added": 0, "changed": 1, "deleted": 0, "left_out": 0}
    assert (await grader(provider).grade(task, Work(archive=cheat))).reward == 0.0
    naive = task.model_copy(update={"git_history": "keep"})
    history = Files(folder=repository, inline={"mathx/__init__.py": READS_THE_HISTORY})
    assert (await grader(provider).grade(naive, Work(archive=pack(history, TaskSettings())))).reward == 1.0
