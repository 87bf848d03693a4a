"""A work is compared with its task in a sandbox of its own, whatever its base is made of."""

from __future__ import annotations

import pytest
from grading_support import FIX, Watched, grader, the_task, work

from turnstile.models import LeftOut
from turnstile_server.errors import SandboxUnavailable, TaskFailed

pytestmark = pytest.mark.anyio


async def test_a_work_is_compared_with_the_task_after_its_set_up(provider: Watched) -> None:
    task = the_task(setup=["printf 'made\\n' > made"], tests={"protected": ["README.md"]})
    given = work({"mathx/__init__.py": FIX, "made": "made\nmore\n", "README.md": "x", "conftest.py": "x"})
    assert given.archive is not None
    known = [LeftOut(path="conftest.py", reason="as the grade says"), LeftOut(path=".git/hooks/x", reason="git")]
    found = await grader(provider).diff("ep_1", task, given.archive, known)
    assert found.refused is None
    assert {one.path: one.left_out for one in found.files} == {
        "README.md": "protected by the task",
        "conftest.py": "as the grade says",
        "made": None,
        "mathx/__init__.py": None,
    }
    assert [one.diff for one in found.files if one.path == "made"] == [
        "--- a/made\n+++ b/made\n@@ -1 +1,2 @@\n made\n+more\n"
    ]
    assert found.left_out == (known[1],)
    few = await grader(provider, shown_changes=1).diff("ep_1", task, given.archive, ())
    assert ([one.path for one in few.files], few.further) == (["README.md"], 3)
    assert provider.made == provider.destroyed


async def test_what_makes_the_copy_impossible_is_raised(provider: Watched) -> None:
    given = work({})
    assert given.archive is not None
    with pytest.raises(TaskFailed, match="ended 3"):
        await grader(provider).diff("ep_1", the_task(setup=["exit 3"]), given.archive, ())
    assert provider.made == provider.destroyed
    with pytest.raises(SandboxUnavailable):
        await grader(None).diff("ep_1", the_task(), given.archive, ())
