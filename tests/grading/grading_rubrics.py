"""OpenEnv rubrics that the tests of ``test_host_code.py`` name as graders."""

from __future__ import annotations

from typing import Any

from openenv.core.rubrics import Gate, LLMJudge, Rubric, WeightedSum


class Short(Rubric):
    def forward(self, action: Any, observation: Any) -> float:
        return 1.0 if len(str(action)) < 5 else 0.25


class Asked(Rubric):
    async def forward(self, action: Any, observation: Any) -> float:
        return float(observation.task["instruction"] == "x" and observation.done)


class Tree(Rubric):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.both = WeightedSum([Short(), Asked()], weights=[weight, 1 - weight])

    async def forward(self, action: Any, observation: Any) -> float:
        score: float = await self.both(action, observation)
        return score


TREE = Tree(0.8)


class Says:
    """An LLM client of OpenEnv, without a model behind it."""

    def __init__(self, reply: str | Exception) -> None:
        self.reply = reply

    async def complete(self, prompt: str) -> str:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


def judged(reply: str) -> Rubric:
    client: Any = Says(RuntimeError("503") if reply == "down" else reply)
    return Gate(LLMJudge("Rate {action}", client), threshold=0.5)
