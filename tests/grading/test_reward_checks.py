"""Checks of the reward where plays are given none, which is neither a reward of 0 nor a floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from turnstile.models import LeftOut, WorkDiff
from turnstile_server.grading.certification.attacks import ANSWER_ATTACKS, CONSTANTS
from turnstile_server.grading.certification.certifier import TASK_CHECKS, certify_task
from turnstile_server.grading.certification.check_result import CheckStatus
from turnstile_server.grading.certification.declarations import DeclaredReward
from turnstile_server.grading.certification.episode_play import CertifiedTask
from turnstile_server.grading.certification.reward_checks import (
    check_attacks,
    check_canaries,
    check_floor,
    check_oracle,
    check_verifier,
)
from turnstile_server.grading.proof_works import ProofParts
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.sandboxes.no_sandboxes import NoSandboxes
from turnstile_server.settings import Settings
from turnstile_server.tasks.images import ImageBuildFailed, ReadyImage, TaskImages
from turnstile_server.tasks.model import Task

pytestmark = pytest.mark.anyio
QUESTION = {
    "id": "question",
    "instruction": "Six times eight?",
    "answer": {"value": "48"},
    "gold": {"answer": "48"},
}


class ByAnswer:
    """A grader whose reward is a function of the answer."""

    def __init__(self, reward: Callable[[str | None], float | None]) -> None:
        self._reward = reward

    async def grade(self, task: Task, work: Work) -> Grade:
        return Grade(self._reward(work.answer))

    async def diff(self, episode_id: str, task: Task, archive: bytes, left_out: Iterable[LeftOut]) -> WorkDiff:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def subject(reward: Callable[[str | None], float | None]) -> CertifiedTask:
    """A task without a sandbox, so that its parts are not used."""
    parts = ProofParts(NoSandboxes("the test needs none"), _unused, _unused, 0, Settings())
    return CertifiedTask(Task.model_validate(QUESTION), parts, ByAnswer(reward), DeclaredReward())


def _unused(_: object) -> object:
    raise NotImplementedError


async def test_without_any_reward_nothing_is_checked_and_no_floor_is_made_up() -> None:
    without = subject(lambda answer: None)
    for check, reason in (
        (check_floor, "doing nothing was given no reward"),
        (check_attacks, "doing nothing was given no reward"),
        (check_canaries, f"none of its {len(CONSTANTS) + 1} canaries was given a reward"),
        (check_verifier, "neither doing nothing nor a solution was given a reward"),
    ):
        found = await check(without)
        assert (found.status, found.applies) == (CheckStatus.SKIP, True)
        assert reason in found.evidence[0]
    assert (await check_oracle(without)).evidence == (
        "its own solution earns no reward, and must earn at least 1",
    )


async def test_attacks_without_a_reward_are_unchecked_where_doing_nothing_has_one() -> None:
    some = subject(lambda answer: 0.0 if answer is None else None)
    assert (await check_floor(some)).status is CheckStatus.PASS
    for check in (check_canaries, check_attacks):
        assert (await check(some)).status is CheckStatus.SKIP


async def test_attacks_without_a_reward_are_counted_beside_those_that_have_one() -> None:
    found = await check_attacks(subject(lambda answer: None if answer == ".*" else 0.0))
    assert found.status is CheckStatus.PASS
    assert found.measured == {"attacks": len(ANSWER_ATTACKS), "unrewarded": 1, "attacks_paid": 0}


async def test_an_attack_is_held_to_a_floor_above_0() -> None:
    found = await check_attacks(subject(lambda answer: 0.5 if answer is None else 0.6 if answer == ".*" else 0.2))
    assert found.evidence == ("a pattern as the answer earns 0.6; doing nothing earns 0.5",)


@pytest.mark.parametrize("command", [["sh", "{tests}/check.sh"], ["sh", "{tests}/check.sh", "{answer}"]])
def test_a_command_that_is_given_the_answer_is_attacked_by_answers(command: list[str]) -> None:
    tests = {"runner": "command", "command": command, "files": {"inline": {"check.sh": 'test "$1" = 48'}}}
    fields = {"id": "q", "instruction": "Six times eight?", "tests": tests, "gold": {"answer": "forty-eight"}}
    task = Task.model_validate(fields)
    made = subject(lambda answer: 0.0)
    made.task = task
    assert made.reads_answers is ("{answer}" in command)


class NoImage(TaskImages):
    async def ensure(self, task: Task, backend: str, *, again: bool = False) -> ReadyImage | None:
        raise ImageBuildFailed("its image cannot be built")


async def test_without_its_image_no_check_says_anything_of_the_task() -> None:
    """An image that cannot be had is no proof that the start depends on the clock, or that an attack is paid."""
    images = NoImage(Settings().sandboxes, may_build=True)
    checked = await certify_task(subject(lambda answer: 1.0), images, 10, TASK_CHECKS)
    assert {each.finding.status for each in checked} == {CheckStatus.ERROR}
    assert {each.finding.evidence for each in checked} == {("its image cannot be built",)}
