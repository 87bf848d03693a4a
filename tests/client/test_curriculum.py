"""A curriculum draws what the policy can learn from, leaves out what it cannot, and goes on from its state."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from client.trainer_types import rollout
from control_support import Door, engine, open_door
from trainers.conftest import playing_door
from turnstile import Client, errors
from turnstile.curriculum import Curriculum, CurriculumState, Standing
from turnstile.models import TaskInfo, TaskRef

__all__ = ["engine", "open_door", "playing_door"]

NAMES = [f"task-{number}" for number in range(10)]


def earned(curriculum: Curriculum, name: str, *rewards: float | None) -> None:
    for reward in rewards:
        curriculum.note(replace(rollout(reward), task=TaskRef(id=name)))


def drawn(curriculum: Curriculum, count: int) -> Counter[str | None]:
    return Counter(task.id for task in islice(curriculum, count))


def test_every_task_is_played_before_any_comes_again_where_nothing_is_known() -> None:
    assert drawn(Curriculum(NAMES), 10) == dict.fromkeys(NAMES, 1)


def test_the_easy_ones_come_first() -> None:
    levels = ["hard", "easy", "odd", "medium", "easy"]
    tasks = [TaskInfo(id=f"{level}-{n}", instruction="x", difficulty=level) for n, level in enumerate(levels)]
    order = [task.id for task in islice(Curriculum(tasks, difficulties=("easy", "medium", "hard")), 5)]
    assert order == ["easy-1", "easy-4", "medium-3", "hard-0", "odd-2"]


def test_what_is_solved_hopeless_or_flat_is_left_out_but_for_some_draws() -> None:
    curriculum = Curriculum(NAMES[:5], least=4, window=8, revisit=0.1)
    drawn(curriculum, 5)
    earned(curriculum, "task-0", *[1.0] * 4)
    earned(curriculum, "task-1", *[0.0] * 4)
    earned(curriculum, "task-2", *[0.5] * 4)
    earned(curriculum, "task-3", 1.0, 0.0, 1.0, 0.0)
    earned(curriculum, "task-4", 1.0, 1.0, 1.0)
    assert curriculum.standing() == Standing(unseen=0, learning=2, solved=1, hopeless=1, flat=1)
    found = drawn(curriculum, 1000)
    assert 60 < sum(found[name] for name in NAMES[:3]) < 140
    assert found["task-3"] > 2 * found["task-4"] > 0, "variances of 1/4 and, with too few rewards, 1/12"


def test_a_task_that_changes_comes_back() -> None:
    curriculum = Curriculum(NAMES[:2], least=2, window=4, revisit=0.0)
    drawn(curriculum, 2)
    earned(curriculum, "task-0", 0.0, 0.0)
    earned(curriculum, "task-1", 1.0, 0.0)
    assert drawn(curriculum, 20) == {"task-1": 20}
    earned(curriculum, "task-0", 1.0)
    assert drawn(curriculum, 100)["task-0"] > 20
    earned(curriculum, "task-0", 1.0, 1.0, 1.0)
    assert drawn(curriculum, 20) == {"task-1": 20}, "it is solved by its latest four"


def test_what_has_no_reward_and_what_is_of_another_task_count_as_nothing() -> None:
    curriculum = Curriculum(NAMES)
    earned(curriculum, "task-0", None)
    earned(curriculum, "other", 1.0)
    assert curriculum.standing().unseen == 10


def test_the_same_seed_and_state_give_the_same_order() -> None:
    def play(curriculum: Curriculum, count: int) -> list[str | None]:
        order = []
        for task in islice(curriculum, count):
            order.append(task.id)
            reward = float(random.Random(f"{task.id}{len(order)}").random() < 0.5)
            curriculum.note(replace(rollout(reward), task=task))
        return order

    whole = Curriculum(NAMES, seed=7)
    first = play(whole, 30)
    saved = CurriculumState.model_validate_json(whole.state().model_dump_json())
    rest = [task.id for task in islice(whole, 30)]
    assert first == play(Curriculum(NAMES, seed=7), 30)
    assert [task.id for task in islice(Curriculum(NAMES, seed=7, state=saved), 30)] == rest
    assert [task.id for task in islice(Curriculum(NAMES, seed=8, state=saved), 30)] != rest


REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "none": ([], {}, "needs a task"),
    "without an id": ([{"instruction": "do"}], {}, "has none"),
    "least": (NAMES, {"least": 1}, "2 <= least"),
    "explore": (NAMES, {"explore": 1.5}, "shares, 0 to 1"),
}


@pytest.mark.parametrize(("tasks", "options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_means_nothing_is_refused(tasks: list[Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=said):
        Curriculum(tasks, **options)


@pytest.mark.slow
def test_rollouts_take_their_tasks_from_it_for_as_long_as_they_are_wanted(playing_door: Door) -> None:
    with Client(playing_door.url, key=playing_door.key) as client:
        curriculum = Curriculum(client.tasks(), least=2, window=4)
        for number, found in enumerate(client.rollouts(curriculum, agent="tool-loop", n=2, max_concurrent=4)):
            curriculum.note(found)
            if number == 11:
                break
    assert sum(len(rewards) for rewards in curriculum.state().rewards.values()) >= 4
