"""What a validation says of grades; the rest of it is tested by the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from grading_support import spec_of

from turnstile_server.errors import SandboxUnavailable, TaskFailed
from turnstile_server.grading.proof_works import ProofParts
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.grading.validation import ProofVerdict, Validator
from turnstile_server.sandboxes.no_sandboxes import NoSandboxes
from turnstile_server.settings import Settings
from turnstile_server.tasks.model import Gold, Task, WrongWork
from turnstile_server.tasks.tarball import pack

pytestmark = pytest.mark.anyio

TASK = Task.model_validate(
    {"id": "t", "instruction": "x", "answer": {"value": "right"}, "gold": {"answer": "right"}}
)


class Fickle:
    """Grades as it is told to, which tests that depend on chance or time would."""

    def __init__(self, gold: Sequence[float | Exception], empty: Sequence[float | Exception]) -> None:
        self._gold: Iterator[float | Exception] = iter(gold)
        self._empty: Iterator[float | Exception] = iter(empty)

    async def grade(self, task: Task, work: Work) -> Grade:
        grade = next(self._gold if work.answer == "right" else self._empty)
        if isinstance(grade, Exception):
            raise grade
        return Grade(grade, {"answer": grade})


def parts() -> ProofParts:
    nobody = NoSandboxes("none here")
    return ProofParts(nobody, spec_of, pack, 1 << 20, Settings())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gold", "empty", "verdict", "said"),
    [
        ([1.0, 1.0], [0.0, 0.0], ProofVerdict.PROVEN, ""),
        ([1.0, 0.0], [0.0, 0.0], ProofVerdict.WRONG, "the gold solution scores 1, then 0"),
        ([1.0, 1.0], [0.0, 1.0], ProofVerdict.WRONG, "the empty work scores 0, then 1"),
        ([0.0, 0.0], [0.0, 0.0], ProofVerdict.WRONG, "the gold solution scores 0, not 1"),
        ([1.0, 1.0], [1.0, 1.0], ProofVerdict.WRONG, "the empty work scores 1, too"),
        ([TaskFailed("cannot run")], [], ProofVerdict.WRONG, "cannot run"),
        ([SandboxUnavailable("no room")], [], ProofVerdict.NOT_TRIED, "no room"),
    ],
)
async def test_a_proof_needs_1_and_not_1_twice(
    gold: list[float | Exception], empty: list[float | Exception], verdict: ProofVerdict, said: str
) -> None:
    validator = Validator(Fickle(gold, empty), parts())
    proof = await validator.prove(TASK)
    assert proof.verdict is verdict
    assert said in "".join(proof.problems)
    assert bool(proof.problems) is (verdict is not ProofVerdict.PROVEN)


async def test_every_run_counts_and_a_wrong_work_must_score_what_it_says() -> None:
    task = TASK.model_copy(update={"wrong": (WrongWork(name="half", reward=0.5, answer="almost"),)})
    late = Fickle([1.0, 1.0, 1.0, 0.0], [0.0] * 4 + [0.5] * 4)
    proof = await Validator(late, parts(), runs=4).prove(task)
    assert proof.problems == ("the gold solution scores 1, then 0 (in 1 of 4 runs another than the first)",)
    assert [(work.work, work.rewards) for work in proof.works] == [
        ("gold", (1.0, 1.0, 1.0, 0.0)),
        ("nothing", (0.0,) * 4),
        ("half", (0.5,) * 4),
    ]
    better = Fickle([1.0] * 2, [0.0] * 2 + [0.75] * 2)
    proof = await Validator(better, parts()).prove(task)
    assert proof.problems == ("the wrong work 'half' scores 0.75, not 0.5",)


@pytest.mark.parametrize(
    ("gold", "empty", "problems"),
    [
        (2.5, 1.0, ()),
        (1.0, 0.0, ("the gold solution scores 1, not 2.5",)),
        (2.5, 2.5, ("the empty work scores 2.5, too",)),
        (2.5, 3.0, ("the empty work scores 3, more than 2.5",)),
    ],
)
async def test_a_gold_solution_says_what_it_scores_where_that_is_not_1(
    gold: float, empty: float, problems: tuple[str, ...]
) -> None:
    task = TASK.model_copy(update={"gold": Gold(answer="right", reward=2.5)})
    proof = await Validator(Fickle([gold] * 2, [empty] * 2), parts()).prove(task)
    assert proof.problems == problems
