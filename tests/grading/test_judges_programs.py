"""An image may have the work folder on its PATH: what judges is found elsewhere all the same."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from posixpath import join

import pytest
from grading_support import FIX, Watched, grader, the_task, work
from reward_attacks.judged import GOLD, judged_task

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Work
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox

pytestmark = pytest.mark.anyio

FAKE_PYTHON = r"""#!/usr/bin/python3 -I
import hashlib, hmac, json, os, sys
if "run_tests" not in sys.argv:
    os.execv("/usr/bin/python3", ["python3", *sys.argv[1:]])
told = json.load(sys.stdin)
said = json.dumps({"faults": [], "passed": told["expected"], "failed": [], "output": ""}).encode()
print(hmac.new(bytes.fromhex(told["nonce"]), said, hashlib.sha256).hexdigest() + " " + said.decode())
"""
FAKE_BASH = "#!/bin/sh\n[ -e mathx ] || [ -e out.txt ]\n"


def executable(made: Work) -> Work:
    """The same with every file executable."""
    assert made.archive is not None
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(made.archive)) as given, tarfile.open(fileobj=out, mode="w") as archive:
        for member in given:
            member.mode = 0o755
            archive.addfile(member, given.extractfile(member))
    return Work(archive=out.getvalue())


@pytest.fixture
def work_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sandbox is one of an image with ``bin`` of the work folder first on PATH."""
    plain = HelperSandbox.open

    async def opened(self: HelperSandbox) -> None:
        self._layout = replace(self._layout, path=f"{self._layout.workdir}/bin:{self._layout.path}")
        await plain(self)

    monkeypatch.setattr(HelperSandbox, "open", opened)


@pytest.mark.usefixtures("work_on_path")
async def test_a_program_of_the_work_takes_the_place_of_none_that_judges(provider: Watched) -> None:
    planted = {"bin/python3": FAKE_PYTHON, "bin/bash": FAKE_BASH}
    judge = grader(provider)
    grade = await judge.grade(the_task(), executable(work(planted)))
    assert grade.reward == 0.0, grade.detail
    grade = await judge.grade(judged_task("file"), executable(work({**planted, "out.txt": "no"})))
    assert grade.reward == 0.0, grade.detail
    solved = await judge.grade(the_task(), executable(work({**planted, "mathx/__init__.py": FIX})))
    assert solved.reward == 1.0, solved.detail
    solved = await judge.grade(judged_task("file"), executable(work({**planted, **GOLD["file"]})))
    assert solved.reward == 1.0, solved.detail


COPIED = ["/bin/mkdir bin", "/bin/cp -L /usr/bin/python3 bin/python3"]


@pytest.mark.parametrize(
    ("path", "more"), [("bin", []), ("/tmp/bin", ["/bin/mkdir /tmp/bin", "/bin/ln -s $PWD/bin/python3 /tmp/bin"])]
)
async def test_an_image_whose_python_is_of_the_work_folder_alone_is_told(
    provider: Watched, monkeypatch: pytest.MonkeyPatch, path: str, more: list[str]
) -> None:
    plain = HelperSandbox.open

    async def opened(self: HelperSandbox) -> None:
        self._layout = replace(self._layout, path=join(self._layout.workdir, path))
        await plain(self)

    monkeypatch.setattr(HelperSandbox, "open", opened)
    with pytest.raises(TaskFailed, match="outside of the work folder"):
        await grader(provider).grade(the_task(setup=[*COPIED, *more]), work({"mathx/__init__.py": FIX}))
