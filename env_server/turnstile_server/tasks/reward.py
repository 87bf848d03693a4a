"""Rules that make one number of the components of a task's reward: the field ``reward`` of a task.

What must hold: a task without the field has the product of its components, in [0, 1]. Weights are never
negative: a component that could not be measured is 0, which must not be better than a measured one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, FiniteFloat, field_validator, model_validator

from turnstile_server.tasks.part import TaskPart


class RewardGate(TaskPart):
    """A component that must reach a threshold. Below it the reward is ``else``, and later graders are not run."""

    model_config = ConfigDict(populate_by_name=True)

    component: str = Field(min_length=1, description="A grader of the task, or a component that one gives.")
    at_least: FiniteFloat = Field(1.0, description="The threshold.")
    otherwise: FiniteFloat = Field(0.0, alias="else", description="The reward below it.")


Weight = Annotated[FiniteFloat, Field(ge=0)]


def parse_bounds(text: str) -> tuple[float, float]:
    """The bounds that a source's text names: ``0,1``. Raises ValueError."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not two numbers, like 0,1") from None
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"{text!r} is not the least and the greatest reward, like 0,1")
    return low, high


class RewardRules(TaskPart):
    """The composition of a reward."""

    combine: Literal["product", "sum", "mean"] = Field(
        "product",
        description="`product` of the components; `sum` of weight × component; `mean`: that sum, divided by the "
        "sum of the weights.",
    )
    weights: dict[str, Weight] = Field(
        default_factory=dict,
        description="Weight by component, or by grader for all that it gives; 1 where none is named. 0: kept in "
        "the grade, without a part in the reward.",
    )
    gates: tuple[RewardGate, ...] = Field((), description="Each is looked at as soon as its component is known.")
    order: tuple[str, ...] = Field(
        (), description="Graders that are run first, in this order: cheap before expensive. The others follow."
    )
    bounds: tuple[FiniteFloat, FiniteFloat] = Field(
        (0.0, 1.0), description="Least and greatest reward. One outside is an error, never cut to fit."
    )
    turn_bounds: tuple[FiniteFloat, FiniteFloat] | None = Field(
        None, description="The same for rewards of single turns, which come from the trainer; none: `bounds`."
    )
    late: bool | Literal["override"] = Field(
        False,
        description="`true`: an episode ends without a reward, which comes later (`POST /episodes/{id}/reward`). "
        "`override`: its graders' reward may be replaced so.",
    )

    @field_validator("order")
    @classmethod
    def _once(cls, order: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(order)) != len(order):
            raise ValueError("`order` names a grader twice")
        return order

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"`bounds` are [least, greatest]; {low:g} is not less than {high:g}")
        if self.turn_bounds is not None and self.turn_bounds[0] >= self.turn_bounds[1]:
            raise ValueError("`turn_bounds` are [least, greatest]")
        wrong = [f"{name!r} {weight:g}" for name, weight in self.weights.items() if weight not in (0, 1)]
        if self.combine == "product" and wrong:
            raise ValueError(
                f"`weights` are for combine: sum and mean; with product a weight is 0 or 1 (is {', '.join(wrong)})"
            )
        for gate in self.gates:
            if not low <= gate.otherwise <= high:
                raise ValueError(
                    f"the gate of {gate.component!r} gives {gate.otherwise:g}, outside of `bounds` "
                    f"[{low:g}, {high:g}]; write its `else`"
                )
        return self

    @property
    def pending(self) -> bool:
        """An episode ends without its reward, which comes later."""
        return self.late is True

    @property
    def lowest(self) -> float:
        """The reward of work that its own agent made worthless."""
        return self.bounds[0]

    def problem(self, value: float) -> str | None:
        """Reason why ``value`` cannot be a reward of the task, as a sentence; None: it can. NaN cannot."""
        low, high = self.bounds
        if low <= value <= high:
            return None
        return (
            f"the reward {value:g} is not in the task's bounds [{low:g}, {high:g}] (reward.bounds; for a whole "
            "source of files or folders `?bounds=LEAST,GREATEST` behind its path)"
        )

    def ordered(self, graders: Sequence[str]) -> tuple[str, ...]:
        """The graders in the order in which they are run."""
        return (*self.order, *(name for name in graders if name not in self.order))

    def check(self, graders: Sequence[str], *, unit: Iterable[str], closed: bool) -> None:
        """Raises ValueError where the rules do not fit the task's graders. ``unit``: those whose components lie in
        [0, 1]. ``closed``: every component has the name of its grader, so that no other name can be meant."""
        have = ", ".join(graders) or "none"
        for name in self.order:
            if name not in graders:
                raise ValueError(f"`order` names {name!r}; the task's graders are: {have}")
        named = {**dict.fromkeys(self.weights, "weights"), **{gate.component: "gates" for gate in self.gates}}
        for name, field in named.items():
            if closed and name not in graders:
                raise ValueError(f"`{field}` names {name!r}; the task's graders are: {have}")
        weights = [self.weights.get(name, 1.0) for name in graders]
        if graders and closed and not any(weights):
            raise ValueError("every component has weight 0, so nothing is left that makes the reward")
        most = math.fsum(self.weights.get(name, 1.0) for name in graders if name in unit)
        if self.combine == "sum" and most > self.bounds[1]:
            raise ValueError(
                f"`weights` sum to {most:g}, above the greatest reward {self.bounds[1]:g}: use combine: mean, "
                "smaller weights, or `bounds`"
            )
