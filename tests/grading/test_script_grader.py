"""A script that judges: in a sandbox of its own, with its tests, its variables, and a new reward file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grading_support import SANDBOXES, Watched, grader, spec_of, tar

from turnstile.models.evidence import grade_in_words
from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.grading.script import ScriptFailed
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.tasks.model import Task

pytestmark = [pytest.mark.anyio]

LONG_S = 60.0
SCRIPT = """\
#!/bin/bash
echo "$PWD $MODE $KEY $(cat work.txt) $(ls /tests | tr '\\n' ' ')"
. /tests/how.sh
exit 3
"""


def the_task(how: str, **changes: Any) -> Task:
    script = {
        "files": {"inline": {"test.sh": SCRIPT, "how.sh": how}},
        "env": {"KEY": "of the tests"},
        "timeout_s": 20,
        **changes,
    }
    fields = {"id": "judged", "instruction": "x", "env": {"MODE": "of the task"}, "script": script}
    return Task.model_validate({**fields, "base": {"inline": {"work.txt": "base"}}})


IN_DOCKER = pytest.mark.parametrize(
    "provider", [pytest.param("docker", marks=pytest.mark.docker)], indirect=True, scope="module"
)


async def graded(provider: Watched, how: str, **changes: Any) -> Grade:
    work = Work(archive=tar({"work.txt": "changed"}))
    return await grader(provider, timeout_s=LONG_S).grade(the_task(how, **changes), work)


@IN_DOCKER
async def test_it_sees_the_work_its_tests_and_the_variables_and_its_numbers_are_the_reward(
    provider: Watched,
) -> None:
    how = """
echo '{"reward": 0.5, "style": true}' > /logs/verifier/reward.json
echo 1 > /logs/verifier/reward.txt
sleep 600 &
"""
    grade = await graded(provider, how)
    assert (grade.reward, grade.components) == (0.5, {"script": 0.5})
    detail = grade.detail["script"]
    assert detail["output"] == "/workspace of the task of the tests changed how.sh test.sh"
    assert detail["rewards"] == {"reward": 0.5, "style": 1.0}
    assert grade_in_words(grade.detail, grade.components) == "the script gave 0.5"
    assert (detail["exit_code"], detail["trust"], detail["ignored"]) == (3, "in_process", ["reward.txt"])
    assert grade.detail["diff"]["changed"] == ["work.txt"]


@IN_DOCKER
@pytest.mark.parametrize(
    ("how", "changes", "said"),
    [
        ("echo 1 > /tmp/r; ln -s /tmp/r /logs/verifier/reward.txt", {}, "reward.txt cannot be read: it is a link"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 30", {"timeout_s": 1}, "it ran longer than 1 s"),
    ],
    ids=["a link", "out of time"],
)
async def test_without_a_reward_it_is_an_error_with_what_the_script_said(
    provider: Watched, how: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ScriptFailed) as told:
        await graded(provider, how, **changes)
    assert said in told.value.message
    assert "Of the untouched task it gives none, either" in told.value.message
    assert told.value.type == "no_reward"
    assert told.value.detail["output"].startswith("/workspace")


@IN_DOCKER
@pytest.mark.parametrize(
    ("work", "changes", "said"),
    [
        pytest.param("sleep 30", {"timeout_s": 2}, "it ran longer than 2 s", id="hangs"),
        pytest.param("kill -9 -1; sleep 5", {}, "neither reward.json nor reward.txt", id="kills all"),
        *(
            pytest.param(work, {}, said, id=name, marks=pytest.mark.thorough)
            for name, work, said in (
                ("kills the script", "kill -9 $$", "neither reward.json nor reward.txt"),
                ("writes nan", "echo nan > /logs/verifier/reward.txt; exit", "no finite number"),
                ("a folder", "mkdir /logs/verifier/reward.txt; exit", "it is a folder"),
                ("no place", "rm -rf /logs/verifier; exit", "no reward"),
            )
        ),
    ],
)
async def test_a_work_that_spoils_its_own_reward_scores_0_where_the_untouched_task_has_one(
    provider: Watched, work: str, changes: dict[str, Any], said: str
) -> None:
    how = ". ./work.txt\necho 0.5 > /logs/verifier/reward.txt\n"
    spoiled = Work(archive=tar({"work.txt": f"{work}\n"}))
    grade = await grader(provider, timeout_s=LONG_S).grade(the_task(how, **changes), spoiled)
    assert (grade.reward, grade.components) == (0.0, {"script": 0.0})
    assert said in grade.detail["script"]["note"]
    assert "of the untouched task it gives one" in grade.detail["script"]["note"]


@IN_DOCKER
async def test_the_untouched_task_has_the_time_of_a_grading_for_itself(provider: Watched) -> None:
    """Else a work that takes all the time of a long script would be the infrastructure's failure."""
    how = ". ./work.txt\nsleep 3; echo 0.5 > /logs/verifier/reward.txt\n"
    hanging = Work(archive=tar({"work.txt": "sleep 30\n"}))
    grade = await grader(provider, timeout_s=7, attempts=1).grade(the_task(how, timeout_s=5), hanging)
    assert grade.reward == 0.0
    assert "it ran longer than 5 s; of the untouched task it gives one" in grade.detail["script"]["note"]


@IN_DOCKER
async def test_a_reward_file_that_the_tests_do_not_name_is_the_works_own(provider: Watched) -> None:
    how = "echo 0 > /logs/verifier/reward.txt; bash work.txt\n"
    forging = "name=json; echo '{\"reward\": 1}' > /logs/verifier/reward.$name\n"
    work = Work(archive=tar({"work.txt": forging}))
    grade = await grader(provider, timeout_s=LONG_S).grade(the_task(how), work)
    assert (grade.reward, grade.detail["script"]["ignored"]) == (0.0, ["reward.json"])


async def test_a_script_that_may_take_as_long_as_a_grading_is_refused() -> None:
    with pytest.raises(TaskFailed, match=r"grading\.timeout_s"):
        await grader(None, timeout_s=601).grade(the_task("true", timeout_s=601), Work())


async def test_a_script_needs_folders_that_local_sandboxes_do_not_have(tmp_path: Path) -> None:
    with pytest.raises(TaskFailed, match="/logs, /tests, /solution, which only sandboxes with images have"):
        await LocalProvider(SANDBOXES, tmp_path).create(spec_of(the_task("true")))
