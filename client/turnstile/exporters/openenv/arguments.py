"""The arguments of TRL's harness worker as Turnstile's: the sampling of its policy, and the task of a prompt.

TRL 1.16.0 names its sampling as ``training_sampling`` of openenv 0.10.0 gives it, and calls
``create(prompt, seed=group, episode_id=…)`` with the ``prompt`` of a row of the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import ValidationError

from turnstile import errors
from turnstile.models import Sampling
from turnstile.models.draw import draw_position, generator_of
from turnstile.models.faults import fault_text
from turnstile.rollout import TaskLike

TaskOf: TypeAlias = Callable[[Any, int | None], TaskLike]
"""The task of a prompt and a seed. TRL's seed is the number of the group: equal seeds must give one task."""

_NEUTRAL: Mapping[str, float] = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""What Turnstile does not sample with, and the value at which each changes nothing."""


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """The task is drawn by the seed from the server's own list; the prompt is not read.

    ``where``: only tasks for which these hold (``repo=django/*``), as of ``Client.tasks``. The draw is that of the
    Gymnasium environment and of the OpenEnv server, over the list as it was when the factory was made.
    """

    where: tuple[str, ...] = ()


def sampling_of(policy: Mapping[str, Any] | None) -> Sampling | None:
    """The sampling of every episode; None, the server's own, for None or an empty ``policy``.

    Raises InvalidRequest for a value that Turnstile cannot sample with, and for a name that it does not know.
    """
    if not policy:
        return None
    for name, neutral in _NEUTRAL.items():
        if name in policy and policy[name] != neutral:
            raise errors.InvalidRequest(
                f"sampling: {name}={policy[name]!r} is not possible; Turnstile samples without it ({neutral:g})"
            )
    wanted = {name: value for name, value in policy.items() if name not in _NEUTRAL}
    if wanted.get("top_k") == 0:
        wanted["top_k"] = -1  # some write 0 for all tokens
    try:
        return Sampling.model_validate(wanted)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in found["loc"])
        raise errors.InvalidRequest(
            f"sampling: {place}={found['input']!r} is not possible: {fault_text(found)}"
        ) from error


def task_of_prompt(prompt: Any, seed: int | None) -> TaskLike:
    """The prompt itself: an id, an instruction or an inline task, or the text of its one user message. Raises
    InvalidRequest for anything else."""
    match prompt:
        case [{"role": "user", "content": str() as text}]:
            task: TaskLike = text
        case str() | Mapping():
            task = prompt
        case _:
            raise errors.InvalidRequest(
                "the prompt names no task: it must be one user message with a task id or an instruction; give "
                "task_of= to choose the task in another way"
            )
    if not task:
        raise errors.InvalidRequest("the prompt is empty, so it names no task")
    return task


def task_of_seed(task_ids: Sequence[str]) -> TaskOf:
    """Draws one of these by the seed. Raises InvalidRequest without ids."""
    if not task_ids:
        raise errors.InvalidRequest("the server has no task to draw from")

    def drawn(prompt: Any, seed: int | None) -> TaskLike:
        if seed is None:
            raise errors.InvalidRequest("a task is drawn by the seed, and there is none")
        return task_ids[draw_position(generator_of(seed), len(task_ids))]

    return drawn


def initial_messages(prompt: Any) -> list[dict[str, Any]]:
    """The prompt as messages."""
    if isinstance(prompt, list):
        return [dict(message) for message in prompt]
    return [{"role": "user", "content": prompt if isinstance(prompt, str) else str(prompt)}]
