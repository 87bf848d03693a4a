"""What the grades of steps make of a task: which steps begin, and the reward of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harbor_support import loaded, steps_folder

from turnstile.models.evidence import grade_in_words
from turnstile_server.grading.protocol import Grade
from turnstile_server.grading.step_grades import StepGrades
from turnstile_server.tasks.model import Task


def grade_of(rewards: dict[str, float]) -> Grade:
    detail: dict[str, Any] = {
        "script": {"rewards": rewards},
        "summary": [f"script: it gave {rewards['reward']:g}"],
    }
    return Grade(rewards["reward"], {"script": rewards["reward"]}, detail)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return task_of(tmp_path)


def task_of(folder: Path, **changes: str) -> Task:
    (task,), problems = loaded(steps_folder(folder / "task", {"one": "", **changes}))
    assert problems == []
    return task


@pytest.mark.parametrize(
    ("least", "rewards", "begins"),
    [
        ("", {"reward": 0.0}, True),
        ("min_reward = 0.5", {"reward": 0.5}, True),
        ("min_reward = 0.5", {"reward": 0.49}, False),
        ("min_reward = {reward = 0.5, style = 0.1}", {"reward": 1.0, "style": 0.1}, True),
        ("min_reward = {reward = 0.5, style = 0.1}", {"reward": 1.0, "style": 0.0}, False),
        ("min_reward = {style = 0.1}", {"reward": 1.0}, False),
        ("min_reward = {style = 1}", {"reward": 0.0, "style": 1.0}, True),
    ],
)
def test_the_next_step_begins_where_no_number_is_below_min_reward(
    tmp_path: Path, least: str, rewards: dict[str, float], begins: bool
) -> None:
    grades = StepGrades(task_of(tmp_path, one=least))
    grades.add(grade_of(rewards), {})
    assert grades.over is not begins
    assert (grades.gate is None) is begins


@pytest.mark.parametrize(
    ("strategy", "least", "rewards", "whole"),
    [
        ("mean", "", (1.0, 0.5, 0.25), 1.75 / 3),
        ("final", "", (1.0, 0.5, 0.25), 0.25),
        ("mean", "min_reward = 1", (1.0, 0.5), 0.75),
        ("final", "min_reward = 1", (1.0, 0.5), 0.5),
        ("mean", "", (1.0, 0.5), 0.5),  # the third did not begin: by a budget, so it counts
        ("final", "", (1.0, 0.5), 0.0),
        ("mean", "", (), 0.0),
    ],
)
def test_the_reward_of_the_whole(
    tmp_path: Path, strategy: str, least: str, rewards: tuple[float, ...], whole: float
) -> None:
    grades = StepGrades(task_of(tmp_path, strategy=strategy, two=least))
    for reward in rewards:
        grades.add(grade_of({"reward": reward}), {"turns": 1})
    found = grades.grade(spent=True)
    assert found.reward == whole
    assert list(found.components.values()) == list(rewards)


@pytest.mark.parametrize(("rewards", "whole"), [((1.0, 0.5), 0.75), ((), None)])
def test_steps_that_somebody_else_kept_from_being_played_have_no_part_in_it(
    task: Task, rewards: tuple[float, ...], whole: float | None
) -> None:
    grades = StepGrades(task)
    for reward in rewards:
        grades.add(grade_of({"reward": reward}), {})
    assert grades.grade(spent=False).reward == whole


def test_each_step_keeps_its_evidence_and_a_failure_takes_only_the_reward(task: Task) -> None:
    grades = StepGrades(task)
    grades.add(grade_of({"reward": 0.5}), {"turns": 3})
    assert grades.unfinished.reward is None
    failed = grades.unearned("agent: it broke")
    assert (failed.reward, failed.components) == (0.0, {"one": 0.5})
    assert failed.detail["steps"]["one"] == {
        "reward": 0.5,
        "turns": 3,
        "script": {"rewards": {"reward": 0.5}},
        "summary": ["script: it gave 0.5"],
    }
    words = "the mean of 3 steps: one is 0.5 (script: it gave 0.5), two was not played, three was not played"
    assert grade_in_words(failed.detail, failed.components) == words
    assert failed.detail["summary"] == [
        "agent: it broke",
        "one: script: it gave 0.5",
        "steps: two, three did not begin, or were not judged",
    ]
