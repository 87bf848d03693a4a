"""Makes one reward from the components of a task, as its field ``reward`` says. Pure.

Components come in one by one, in the order in which their graders are run. A gate that closes ends that: its
reward stands, and the graders that are left are listed as not run. What must hold: a reward is finite and in the
task's bounds, or there is none; nothing is cut to fit; what was graded is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.errors import GraderFailed, RewardInvalid
from turnstile_server.grading.protocol import Component, Grade
from turnstile_server.tasks.grader_options import unit_kind
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.reward import RewardGate


class Composition:
    """The reward of one work in the making."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._rules = task.reward
        self._values: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._known: set[str] = set()
        """Names that a gate or a weight may use: of components and of graders."""
        self._detail: dict[str, Any] = {}
        self._summary: list[str] = []
        self._closed: RewardGate | None = None
        self._spoiled = False

    @property
    def closed(self) -> bool:
        """A gate has closed: no further grader is run."""
        return self._closed is not None

    @property
    def components(self) -> dict[str, float]:
        return dict(self._values)

    @property
    def detail(self) -> dict[str, Any]:
        """Details from the graders so far, for the trainer."""
        return {**self._detail, **({"summary": list(self._summary)} if self._summary else {})}

    def add(self, grader: str, component: Component) -> None:
        """Raises TaskFailed where two graders give one component, GraderFailed for one that is not finite, and for
        a product of finite ones that is not where a gate asks for it."""
        given = {grader: component.value} if component.parts is None else dict(component.parts)
        others = {*self._values, *self._task.graders} - {grader}
        for name, value in {**given, **component.extra}.items():
            if name in others:
                raise TaskFailed(
                    f"task {self._task.id}: the grader {grader!r} gives a component {name!r}, "
                    "which another grader gives"
                )
            if not math.isfinite(value):
                raise GraderFailed(f"the grader {grader!r} gives {value} for {name!r}, which is not finite")
            if name in given and not 0.0 <= value <= 1.0 and self._is_unit(grader):
                raise GraderFailed(
                    f"the grader {grader!r} gives {value} for {name!r}, which is not in [0, 1]; graders of other "
                    "values say `parts = True` or `unit = False` in their options"
                )
            self._values[name] = value
            of_grader = 0.0 if name not in given else self._rules.weights.get(grader, 1.0)
            self._weights[name] = self._rules.weights.get(name, of_grader)
        self._known |= {grader, *given, *component.extra}
        self._detail.update(component.detail)
        self._summary += component.summary
        self._spoiled |= component.spoiled
        self._look_at_gates(grader, component, given)

    def _is_unit(self, grader: str) -> bool:
        """True if its values lie in [0, 1]: those of the task's environment do, too."""
        entry = self._task.grading.get(grader)
        return entry is None or unit_kind(entry)

    def _look_at_gates(self, grader: str, component: Component, given: dict[str, float]) -> None:
        known = {**given, **component.extra, grader: component.value}
        for gate in self._rules.gates:
            value = known.get(gate.component)
            if self._closed is not None or value is None:
                continue
            if not math.isfinite(value):  # NaN is below no threshold, and would leave the gate open
                raise GraderFailed(
                    f"the components of {grader!r} make a product of {value}, by which no gate can be decided"
                )
            if value < gate.at_least:
                self._closed = gate
                shown = {"component": gate.component, "value": value, "at_least": gate.at_least}
                self._detail["gate"] = {**shown, "reward": gate.otherwise}
                self._summary.append(
                    f"reward: {gate.component} is {value:g}, below its gate {gate.at_least:g}, so the reward is "
                    f"{gate.otherwise:g}"
                )

    def grade(self, not_run: Sequence[str]) -> Grade:
        """``not_run``: the graders that a closed gate left out. Raises RewardInvalid, TaskFailed."""
        if not_run:
            self._detail["not_run"] = list(not_run)
        reward = self._reward()
        if reward is not None and (problem := self._rules.problem(reward)) is not None:
            raise RewardInvalid(f"task {self._task.id}: {problem}", detail={"reward": repr(reward)})
        return Grade(reward, self._values, self.detail)

    def _reward(self) -> float | None:
        if self._spoiled and self._values:
            return self._rules.lowest
        if self._closed is not None:
            return self._closed.otherwise
        for name in (*self._rules.weights, *(gate.component for gate in self._rules.gates)):
            if name not in self._known:
                raise TaskFailed(
                    f"task {self._task.id}: `reward` names the component {name!r}, which no grader gave; "
                    f"they gave: {', '.join(self._values) or 'none'}"
                )
        if not self._values:
            return None
        counted = {name: weight for name, weight in self._weights.items() if weight > 0}
        if not counted:
            raise TaskFailed(f"task {self._task.id}: every component has weight 0, so nothing makes the reward")
        if self._rules.combine == "product":
            return math.prod(self._values[name] for name in counted)
        # Rounded once and so never above what the exact numbers allow: a mean of ones is 1.
        try:
            total = math.fsum(weight * self._values[name] for name, weight in counted.items())
            return total if self._rules.combine == "sum" else total / math.fsum(counted.values())
        except (OverflowError, ValueError):
            return math.inf
