"""verl's agent loop on Turnstile: each call plays one rollout of a task, of as many rows as it has.

In a module of your own, on the path of verl's workers:

    class Errands(TurnstileAgentLoop):
        rollouts = SingleRollouts(AsyncClient("http://127.0.0.1:8000", key=KEY), agent="tool-loop")

and in the file that ``actor_rollout_ref.rollout.agent.agent_loop_config_path`` names:

    - {name: turnstile, _target_: that_module.Errands}

verl makes one object of the class for each rollout, so what they share is the class's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from turnstile import errors
from turnstile.exporters.single_rollouts import SingleRollouts
from turnstile.exporters.trained_rows import number_of
from turnstile.exporters.verl.rows import outputs_of
from turnstile.rollout import TaskLike


def task_in(row: Mapping[str, Any]) -> TaskLike:
    """The task of a row of the data set: the column ``task`` or ``extra_info["task"]`` (an id, an instruction or
    an inline dict), else the text of a prompt that is one message. Raises InvalidRequest for anything else."""
    task: TaskLike | None = row.get("task") or (row.get("extra_info") or {}).get("task")
    if task is not None:
        return task
    messages = list(row.get("raw_prompt", ()))
    if len(messages) == 1 and isinstance(messages[0].get("content"), str) and messages[0]["content"]:
        return str(messages[0]["content"])
    raise errors.InvalidRequest(
        f"row {row.get('index')} of the data set names no task: put an id or an inline task into a column `task`"
    )


class TurnstileAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is not installed where types are checked
    """A subclass sets ``rollouts``, and may override ``task`` and ``step_of``.

    Of verl's sampling parameters temperature, top_p, top_k and min_p pin those of the episode. A validation at
    temperature 0 gives the main conversation as one masked row.
    """

    rollouts: ClassVar[SingleRollouts]

    def task(self, row: Mapping[str, Any]) -> TaskLike:
        return task_in(row)

    def step_of(self, version: str) -> int:
        return number_of(version)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[Any]:
        """The rollout's rows; ``[]``, which verl leaves out, where it has no reward.

        Raises ValueError outside verl's v1 trainers and for a ``uid`` that its keys cannot hold, RowTooLong, and
        the errors of ``SingleRollouts.play``: verl logs them and fails the group.
        """
        if "session_id" not in kwargs:
            raise ValueError("verl's legacy trainer takes one row of a rollout: set trainer.use_v1=True")
        uid = str(kwargs["uid"])
        if "_" in uid:
            raise ValueError(f"uid {uid!r} has an underscore, at which verl splits the keys of rows: leave it out")
        rollout = await self.rollouts.play(
            self.task(kwargs),
            sampling_params=sampling_params,
            group_id=f"group_{uid}",
            index=int(kwargs["session_id"]),
            include_untrained=sampling_params.get("temperature") == 0,
            metadata={
                "uid": uid,
                "session_id": int(kwargs["session_id"]),
                "global_steps": int(kwargs["global_steps"]),
            },
        )
        return outputs_of(
            rollout,
            step_of=self.step_of,
            step=int(kwargs["global_steps"]),
            prompt_length=self.rollout_config.prompt_length,
            response_length=self.rollout_config.response_length,
        )
