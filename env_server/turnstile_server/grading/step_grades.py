"""The grades of the steps of one task: whether the next step begins, and the grade of the whole. Pure.

As Harbor has it: a step below its ``min_reward`` is the last one, and the steps after it have no part in the
reward. Steps that a budget kept from being played count as the lowest reward: otherwise an agent could use it up
to keep hard steps out of the mean. Those that somebody else kept from being played have no part in it, either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile_server.grading.protocol import Grade
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.steps import TaskStep


class StepGrades:
    """Collects them, in the order of the task's steps."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._grades: list[Grade] = []
        self._played: list[Mapping[str, Any]] = []
        self.gate: str | None = None
        """Reason why no further step begins, as a line for a person; None: nothing keeps it from beginning."""

    def __len__(self) -> int:
        return len(self._grades)

    @property
    def over(self) -> bool:
        """No further step is to begin."""
        return self.gate is not None or len(self) == len(self._task.steps)

    def add(self, grade: Grade, played: Mapping[str, Any]) -> None:
        """The grade of the next step, which has a reward. ``played``: how it went, for the evidence."""
        step = self._task.steps[len(self)]
        self._grades.append(grade)
        self._played.append(played)
        if (failure := _below(step, grade)) is not None and len(self) < len(self._task.steps):
            self.gate = f"steps: {step.name}: {failure}, so no further step began"

    def grade(self, *, spent: bool) -> Grade:
        """The grade of the whole, as it stands; without a reward where nothing was judged. ``spent``: the steps
        that are left were not played because a budget of the agent was used up."""
        if not self._grades and not spent:
            return self.unfinished
        rewards = [0.0 if grade.reward is None else grade.reward for grade in self._grades]
        counted, left = list(rewards), self._task.steps[len(self) :]
        if self.gate is None and spent:
            counted += [self._task.reward.lowest] * len(left)
        reward = sum(counted) / len(counted) if self._task.step_reward == "mean" else counted[-1]
        return self._with(reward, () if self.gate is None else (self.gate,))

    def unearned(self, why: str) -> Grade:
        """The grade of an agent that failed: the lowest reward, whatever it had earned before."""
        return self._with(self._task.reward.lowest, (why,))

    @property
    def unfinished(self) -> Grade:
        """The grade of what was found so far, without a reward."""
        return self._with(None, ())

    def _with(self, reward: float | None, lines: tuple[str, ...]) -> Grade:
        names = [step.name for step in self._task.steps]
        components, evidence, summary = {}, {}, list(lines)
        for name, grade, played in zip(names, self._grades, self._played, strict=False):
            components[name] = 0.0 if grade.reward is None else grade.reward
            evidence[name] = {"reward": grade.reward, **played, **grade.detail}
            summary += [f"{name}: {line}" for line in grade.detail.get("summary", ())]
        left = names[len(self) :]
        if left:
            summary.append(f"steps: {', '.join(left)} did not begin, or were not judged")
        detail = {"steps": evidence, "step_reward": self._task.step_reward, "not_played": left, "summary": summary}
        return Grade(reward, components, detail)


def _below(step: TaskStep, grade: Grade) -> str | None:
    """A sentence about a grade below the step's ``min_reward``; None: it is not below. A number that the tests did
    not give is below all."""
    if step.min_reward is None:
        return None
    least = step.min_reward if isinstance(step.min_reward, dict) else {"reward": step.min_reward}
    given: Mapping[str, float] = grade.detail.get("script", {}).get("rewards", {"reward": grade.reward})
    for key, wanted in least.items():
        actual = given.get(key)
        if actual is None or actual < wanted:
            return f"{key} is {'missing' if actual is None else f'{actual:g}'}, below min_reward {wanted:g}"
    return None
