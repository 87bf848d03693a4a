"""How components become a reward: weights, gates, order, bounds, and what is kept where there is none."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from grading_support import grader
from pydantic import ValidationError

from installed_plugins import declare
from turnstile.models import Fault
from turnstile_server.episodes.outcome import unearned
from turnstile_server.errors import StartupError, TaskFailed
from turnstile_server.grading.composition import Composition
from turnstile_server.grading.errors import GraderFailed, GraderUnavailable, RewardInvalid
from turnstile_server.grading.protocol import Component, GradingTools, Work
from turnstile_server.grading.registry import unknown_graders
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions
from turnstile_server.tasks.registry import load_tasks

pytestmark = pytest.mark.anyio


def the_task(reward: dict[str, Any] | None = None, **grading: Any) -> Task:
    fields: dict[str, Any] = {"id": "t", "instruction": "x", "grading": grading}
    return Task.model_validate(fields | ({} if reward is None else {"reward": reward}))


YES = {"grader": "exact", "value": "yes", "credit": {"maybe": 0.5}}
SHORT = {"grader": "regex", "patterns": [r".{0,3}", r".{0,5}"]}


class PlayedOptions(GraderOptions):
    parts: ClassVar[bool] = True


class Played:
    """A grader whose component, or error, each grading takes from a list; and what it was asked."""

    def __init__(self, *given: Component | Exception) -> None:
        self.given = list(given)
        self.asked = 0

    Options = PlayedOptions

    def __call__(self, tools: GradingTools, name: str, options: PlayedOptions) -> Played:
        return self

    async def grade(self, task: Task, work: Work) -> Component:
        self.asked += 1
        found = self.given.pop(0) if len(self.given) > 1 else self.given[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    declare(monkeypatch, tmp_path / "site", "turnstile.graders", played=f"{__name__}:PLAYED")

    def register(*given: Component | Exception) -> Played:
        made = Played(*given)
        monkeypatch.setattr(sys.modules[__name__], "PLAYED", made, raising=False)
        return made

    return register


@pytest.mark.parametrize(
    ("rules", "reward"),
    [
        (None, 0.25),
        ({"combine": "mean"}, 0.5),
        ({"combine": "mean", "weights": {"yes": 3, "short": 1}}, 0.5),
        ({"combine": "mean", "weights": {"yes": 0}}, 0.5),
        ({"combine": "sum", "bounds": [0, 5], "weights": {"yes": 3, "short": 2}}, 2.5),
        ({"combine": "sum", "weights": {"yes": 0.25, "short": 0.5}}, 0.375),
        ({"weights": {"short": 0}}, 0.5),
    ],
)
async def test_weights_make_the_reward(rules: dict[str, Any] | None, reward: float) -> None:
    grade = await grader(None).grade(the_task(rules, yes=YES, short=SHORT), Work(answer="maybe"))
    assert grade.components == {"yes": 0.5, "short": 0.5}
    assert grade.reward == reward


async def test_a_gate_below_its_threshold_gives_its_reward_and_later_graders_are_not_run(played: Any) -> None:
    late = played(Component(1.0))
    gates = [{"component": "short", "at_least": 0.6, "else": 0.2}, {"component": "yes", "at_least": 0.6}]
    task = the_task({"gates": gates, "order": ["short", "yes"]}, yes=YES, played={}, short=SHORT)
    grade = await grader(None).grade(task, Work(answer="maybe"))
    assert (grade.reward, grade.components, late.asked) == (0.2, {"short": 0.5}, 0)
    assert grade.detail["not_run"] == ["yes", "played"]
    assert grade.detail["gate"] == {"component": "short", "value": 0.5, "at_least": 0.6, "reward": 0.2}
    assert "short is 0.5, below its gate 0.6" in grade.detail["summary"][-1]
    grade = await grader(None).grade(task, Work(answer="no"))
    assert (grade.reward, grade.components, grade.detail["not_run"]) == (
        0.0,
        {"short": 1.0, "yes": 0.0},
        ["played"],
    )
    grade = await grader(None).grade(task, Work(answer="yes"))
    assert (grade.reward, late.asked, "gate" in grade.detail) == (1.0, 1, False)


async def test_graders_run_in_the_order_of_the_task(played: Any) -> None:
    played(Component(1.0))
    task = the_task({"order": ["played"]}, yes=YES, short=SHORT, played={})
    assert list((await grader(None).grade(task, Work(answer="yes"))).components) == ["played", "yes", "short"]
    assert task.graders == ("yes", "short", "played")


async def test_gates_and_weights_name_components_that_a_grader_gives_under_its_own_names(played: Any) -> None:
    parts = Component(0.5, parts={"style": 0.25, "facts": 1.0, "speed": 0.1})
    played(parts)
    rules = {"combine": "mean", "weights": {"played": 2, "speed": 0, "yes": 1}}
    task = the_task(rules, yes=YES, played={})
    grade = await grader(None).grade(task, Work(answer="yes"))
    assert grade.reward == (1.0 + 2 * 0.25 + 2 * 1.0) / 5
    for component, reward in (("style", 0.0), ("played", 0.0), ("facts", 0.025)):
        gates = {"gates": [{"component": component}]}
        assert (await grader(None).grade(the_task(gates, played={}), Work())).reward == pytest.approx(reward)
    with pytest.raises(TaskFailed, match="'tests', which no grader gave; they gave: style, facts, speed"):
        await grader(None).grade(the_task({"gates": [{"component": "tests"}]}, played={}), Work())


async def test_two_graders_cannot_give_one_component(played: Any) -> None:
    played(Component(1.0, parts={"yes": 1.0}))
    with pytest.raises(TaskFailed, match="'played' gives a component 'yes', which another grader gives"):
        await grader(None).grade(the_task(played={}, yes=YES), Work(answer="yes"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_component_that_is_not_finite_is_no_reward(played: Any, value: float) -> None:
    played(Component(value))
    with pytest.raises(GraderFailed, match="not finite"):
        await grader(None).grade(the_task(played={}), Work())


@pytest.mark.parametrize("value", [1.5, -0.5])
async def test_a_reward_outside_its_bounds_is_an_error_and_not_cut(played: Any, value: float) -> None:
    played(Component(value))
    with pytest.raises(RewardInvalid, match=r"not in the task's bounds \[0, 1\]"):
        await grader(None).grade(the_task(played={}), Work())
    wide = the_task({"bounds": [-1, 2]}, played={})
    assert (await grader(None).grade(wide, Work())).reward == value


@pytest.mark.parametrize("parts", [(1e200, 1e200, 0.0), (1e200, 1e200)])
async def test_a_gate_is_not_decided_by_a_product_that_is_not_finite(
    played: Any, parts: tuple[float, ...]
) -> None:
    named = {f"part{index}": part for index, part in enumerate(parts)}
    played(Component(math.prod(parts), parts=named))
    rules = {"gates": [{"component": "played", "at_least": 0.5}], "combine": "mean", "bounds": [0, 1e300]}
    with pytest.raises(GraderFailed, match="no gate can be decided"):
        await grader(None).grade(the_task(rules, played={}), Work())


async def test_components_whose_sum_overflows_are_no_reward(played: Any) -> None:
    played(Component(0.0, parts={"a": 1e308, "b": 1e308}))
    for combine in ("sum", "mean"):
        with pytest.raises(RewardInvalid) as caught:
            await grader(None).grade(the_task({"combine": combine, "bounds": [0, 1e308]}, played={}), Work())
        assert caught.value.detail["components"] == {"a": 1e308, "b": 1e308}


async def test_work_that_spoils_its_own_grading_has_the_lowest_reward(played: Any) -> None:
    played(Component(0.0, spoiled=True))
    rules = {"combine": "mean", "bounds": [-1, 1]}
    assert (await grader(None).grade(the_task(rules, played={}, yes=YES), Work(answer="yes"))).reward == -1.0
    assert unearned(the_task(rules, yes=YES), "x").reward == -1.0
    assert unearned(the_task(yes=YES), "x").reward == 0.0


async def test_a_grader_that_fails_leaves_no_reward_and_what_was_graded_before_it(played: Any) -> None:
    played(GraderFailed("it broke"))
    with pytest.raises(GraderFailed) as caught:
        await grader(None).grade(the_task(yes=YES, played={}), Work(answer="maybe"))
    assert caught.value.fault is Fault.TASK
    found = caught.value.detail
    assert (found["grader"], found["components"]) == ("played", {"yes": 0.5})
    assert found["grading"]["yes"]["credit"] == 0.5


async def test_only_passing_failures_are_tried_again_and_only_so_often(played: Any) -> None:
    down = GraderUnavailable("down")
    quick = {"retry_pause_s": 0.0}
    made = played(down, down, Component(1.0))
    assert (await grader(None, retries=2, **quick).grade(the_task(played={}), Work())).reward == 1.0
    assert made.asked == 3
    made = played(down)
    with pytest.raises(GraderUnavailable):
        await grader(None, retries=2, **quick).grade(the_task(played={}), Work())
    assert made.asked == 3
    made = played(GraderFailed("it broke"))
    with pytest.raises(GraderFailed):
        await grader(None, retries=2, **quick).grade(the_task(played={}), Work())
    assert made.asked == 1
    made = played(GraderFailed("it broke"), Component(1.0))
    again = grader(None, retries=1, retry_errors=("grader_failed",), **quick)
    assert (await again.grade(the_task(played={}), Work())).reward == 1.0


async def test_the_pause_is_what_the_grader_asks_for_and_bounded(
    played: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    down = GraderUnavailable("down")
    played(down, GraderUnavailable("slow down", retry_after_s=7.0), down, down, Component(1.0))
    settings = {"retries": 4, "retry_pause_s": 1.0, "max_retry_pause_s": 6.0}
    await grader(None, **settings).grade(the_task(played={}), Work())
    assert pauses == [1.0, 6.0, 4.0, 6.0]


async def test_a_pending_reward_keeps_what_the_graders_found() -> None:
    grade = await grader(None).grade(the_task({"late": True}, yes=YES), Work(answer="maybe"))
    assert (grade.reward, grade.pending) == (0.5, False)
    late = grade.awaited()
    assert (late.reward, late.pending, late.components) == (None, True, {"yes": 0.5})
    assert late.detail["graders_reward"] == 0.5
    nothing = the_task({"late": True})
    assert nothing.graded
    assert (await grader(None).grade(nothing, Work())).reward is None


NUMBERS = [("42", 1.0), ("41.5", 1.0), ("44", 1 - 1 / 3), ("39.5", 0.5), ("46", 0.0), ("many", 0.0), (None, 0.0)]


@pytest.mark.parametrize(("answer", "credit"), NUMBERS)
async def test_a_number_gets_credit_by_its_distance(answer: str | None, credit: float) -> None:
    task = the_task(near={"grader": "numeric", "value": 42, "tolerance": 1, "zero_at": 4})
    grade = await grader(None).grade(task, Work(answer=answer))
    assert grade.reward == pytest.approx(credit)


async def test_an_exact_answer_has_its_own_credit_and_full_credit_wins() -> None:
    options = {"grader": "exact", "value": " Paris ", "credit": {"france": 0.5, "paris": 0.1}, "ignore_case": True}
    for answer, credit in (("PARIS", 1.0), ("France ", 0.5), ("Lyon", 0.0), (None, 0.0)):
        assert (await grader(None).grade(the_task(city=options), Work(answer=answer))).reward == credit


BAD: dict[str, tuple[str, int, str, str]] = {
    "an unknown field": ("grading:\n  a: {grader: exact, valu: x}\n", 4, "grading.a.valu", "no such field"),
    "a wrong type": ("grading:\n  numeric: {value: x}\n", 4, "grading.numeric.value", "valid number"),
    "a bad pattern": (
        "grading:\n  r: {grader: regex, patterns: ['(']}\n",
        4,
        "grading.r",
        "not a regular expression",
    ),
    "weights of nothing": (
        "reward: {weights: {b: 1}}\nanswer: {value: x}\n",
        3,
        "reward",
        "'b'; the task's graders",
    ),
    "a gate of nothing": (
        "reward: {gates: [{component: b}]}\nanswer: {value: x}\n",
        3,
        "reward",
        "`gates` names 'b'",
    ),
    "an order of nothing": ("reward: {order: [b]}\nanswer: {value: x}\n", 3, "reward", "`order` names 'b'"),
    "a negative weight": (
        "reward: {combine: sum, weights: {a: -1}}\n",
        3,
        "reward.weights.a",
        "greater than or equal",
    ),
    "bounds that are none": ("reward: {bounds: [1, 0]}\n", 3, "reward", "1 is not less than 0"),
    "a gate out of bounds": ("reward: {gates: [{component: a, else: 2}]}\n", 3, "reward", "outside of `bounds`"),
    "weights of a product": ("reward: {weights: {answer: 2}}\nanswer: {value: x}\n", 3, "reward", "combine: sum"),
    "too much in sum": (
        "reward: {combine: sum, weights: {answer: 2}}\nanswer: {value: x}\n",
        3,
        "reward",
        "sum to 2",
    ),
    "nothing that counts": (
        "reward: {weights: {answer: 0}}\nanswer: {value: x}\n",
        3,
        "reward",
        "nothing is left",
    ),
    "a bad name": ("grading:\n  'a b': {grader: exact, value: x}\n", 3, "grading", "'a b' has other characters"),
}


@pytest.mark.parametrize(("text", "line", "field", "said"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_told_with_file_line_and_field(
    tmp_path: Path, text: str, line: int, field: str, said: str
) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(f"id: t\ninstruction: x\n{text}")
    with pytest.raises(StartupError) as caught:
        load_tasks([file])
    [problem] = caught.value.detail
    assert (problem["line"], problem["field"]) == (line, field), problem
    assert said in problem["message"]


def test_a_task_that_is_written_out_is_the_same_task() -> None:
    task = the_task({"gates": [{"component": "yes", "else": 0.5}], "late": "override"}, yes=YES, short=SHORT)
    assert Task.model_validate_json(task.model_dump_json()) == task
    with pytest.raises(ValidationError):
        the_task({"late": "perhaps"}, yes=YES)


@pytest.mark.parametrize("kind", [["exact"], {"exact": 1}, 1, None])
def test_a_grader_that_is_no_name_is_told_as_an_unknown_one(kind: Any) -> None:
    said = unknown_graders(the_task(part={"grader": kind}))
    assert said is not None
    assert f"there is no grader {str(kind)!r}" in said


def test_a_script_may_give_what_the_bounds_allow_and_an_environment_gives_parts_of_1() -> None:
    scripted = Task.model_validate(
        {
            "id": "t",
            "instruction": "x",
            "script": {"files": {"inline": {"test.sh": ""}}},
            "reward": {"bounds": [-1, 3]},
        }
    )
    made = Composition(scripted)
    made.add("script", Component(2.5))
    assert made.grade(()).reward == 2.5
    alone = Composition(Task(id="t", instruction="x"))
    with pytest.raises(GraderFailed, match=r"'lamp' gives 7.0 for 'lit', which is not in \[0, 1\]"):
        alone.add("lamp", Component(7.0, parts={"lit": 7.0}))
