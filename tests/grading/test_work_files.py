"""Files of a work that graders are shown: read in a fresh sandbox, regular files of bounded size, through no
link."""

from __future__ import annotations

import pytest
from grading_support import BASE, FIX, Watched, spec_of, work
from judge_server import RIGHT, JudgeServer

from bounded import bounded
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.package_processes import PackageProcesses
from turnstile_server.grading.places import GradingPlaces
from turnstile_server.grading.protocol import GradingTools, Work
from turnstile_server.grading.work_files import WorkReader
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.tasks.model import Task

pytestmark = pytest.mark.anyio

TASK = Task.model_validate({"id": "t", "instruction": "x", "base": {"inline": BASE}})


def reader(provider: Watched, **settings: int) -> WorkReader:
    made = bounded(GradingSettings, **settings)
    tasks = TaskSettings()
    packages = PackageProcesses(made, tasks)
    return WorkReader(GradingTools(provider, spec_of, made, tasks, GradingPlaces(2), packages))


async def test_regular_files_are_read_and_nothing_else(provider: Watched) -> None:
    given = work(
        {
            "out/small.txt": "small",
            "out/exact": "x" * 100,
            "out/large": "x" * 101,
            "out/link": ("link", "small.txt"),
            "out/away": ("link", "/etc/passwd"),
            "dir": ("link", "out"),
            "out/pipe": ("pipe", ""),
            "out/hard": ("hard", "out/small.txt"),
        }
    )
    paths = ["out/small.txt", "out/exact", "out/large", "out/link", "out/away", "dir/small.txt", "out/pipe", "out"]
    found = await reader(provider, max_read_bytes=100).read(TASK, given, [*paths, "none", "README.md"], "c")
    assert found.spoiled is None
    read = {path: file.data for path, file in found.work.items() if file.data is not None}
    assert read == {"out/small.txt": b"small", "out/exact": b"x" * 100, "README.md": b"mathx\n"}
    why = {path: file.missing for path, file in found.work.items() if file.data is None}
    assert "101 bytes, more than 100" in why["out/large"]
    assert why["out/link"] == "it is not a regular file"
    assert set(why) == {"out/large", "out/link", "out/away", "dir/small.txt", "out/pipe", "out", "none"}
    assert found.work["none"].text == "(no file: no such file or directory)"


async def test_changes_are_told_as_a_diff(provider: Watched) -> None:
    given = work({"mathx/__init__.py": FIX, "new.txt": "n"}, "tests/test_visible.py")
    paths = ["mathx/__init__.py", "new.txt", "README.md", "tests/test_visible.py", "none"]
    found = await reader(provider).read(TASK, given, paths, "c", start=True)
    assert "-    return n + 1\n+    return 2 * n" in found.diff("mathx/__init__.py")
    assert found.diff("new.txt").endswith("@@ -0,0 +1 @@\n+n")
    assert found.diff("README.md") == "(unchanged)"
    assert found.diff("tests/test_visible.py").startswith("(deleted")
    assert found.diff("none").startswith("(no file")


async def test_work_that_cannot_be_taken_over_is_spoiled_and_not_shown(provider: Watched) -> None:
    found = await reader(provider).read(TASK, Work(archive=b"no tar"), ["README.md"], "c")
    assert found.spoiled is not None
    assert (found.spoiled.value, found.spoiled.spoiled, dict(found.work)) == (0.0, True, {})


async def test_a_judge_is_shown_files_of_the_work(provider: Watched) -> None:
    with JudgeServer(lambda body: RIGHT).serving() as server:
        settings = GradingSettings.model_validate({"judges": {"j": {"url": server.url, "model": "m"}}})
        grader = TaskGrader(provider, spec_of, settings, TaskSettings())
        entry = {"judge": "j", "question": "Good?", "files": ["mathx/__init__.py", "none"]}
        for shown, said in (("text", "return 2 * n"), ("diff", "-    return n + 1")):
            grading = {"judge": {**entry, "files_as": shown, "show": []}}
            task = TASK.model_copy(update={"grading": {}})
            task = Task.model_validate({**task.model_dump(exclude={"world"}), "grading": grading})
            assert (await grader.grade(task, work({"mathx/__init__.py": FIX}))).reward == 1.0
            prompt = server.bodies[-1]["messages"][1]["content"]
            assert said in prompt
            assert "file none\n(no file" in prompt
            assert "instruction" not in prompt
