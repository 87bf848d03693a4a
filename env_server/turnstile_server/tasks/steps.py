"""A step of a task of several: asked of the agent and judged by itself, in the order of the task.

The steps share one sandbox, so each begins with what the one before left in the work folder.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from turnstile_server.tasks.files import Files
from turnstile_server.tasks.part import TaskPart
from turnstile_server.tasks.script import GoldScript, ScriptTests

StepReward = Literal["mean", "final"]
"""Rule for the task's reward: the mean of the steps' rewards, or that of the last step played."""


class TaskStep(TaskPart):
    """One step."""

    name: Annotated[str, Field(min_length=1, description="Its component of the reward.")]
    instruction: str = Field(min_length=1, description="What a new conversation begins with.")
    files: Files | None = Field(None, description="Put into the work folder when it begins.")
    setup: tuple[str, ...] = Field((), description="Shell commands, then run there as the agent.")
    start: Files | None = Field(None, description="The `files` of all steps up to it, for its grader.")
    timeout_s: float | None = Field(
        None, gt=0, description="Time for its agent; then its work is judged as it is."
    )
    script: ScriptTests
    gold: GoldScript | None = None
    min_reward: FiniteFloat | dict[str, FiniteFloat] | None = Field(
        None, description="Least reward, or numbers by key of `reward.json`, with which the next step begins."
    )
