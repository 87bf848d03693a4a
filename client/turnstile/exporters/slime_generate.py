"""The ``generate`` of slime and miles: each call plays one rollout of a task on Turnstile.

In a module of your own, on the trainer's path:

    generate = Generate(AsyncClient("http://127.0.0.1:8000", key=KEY), agent="tool-loop")

and ``--custom-generate-function-path that_module.generate``. The trainer's semaphore bounds how many run at
once. A call that the trainer cancels cancels its episode. The client is not closed here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnstile import errors
from turnstile.client import AsyncClient, AsyncNewEpisodeHandle
from turnstile.exporters.single_rollouts import SingleRollouts
from turnstile.exporters.slime import rows_of
from turnstile.models import Limits
from turnstile.rollout import TaskLike


def task_in(sample: Any) -> TaskLike:
    """The task of a trainer's sample: ``metadata["task"]`` (an id, an instruction or an inline dict), else the
    prompt: text as it stands, or the one message of a conversation. Raises InvalidRequest for anything else.

    With ``--apply-chat-template`` the prompt is not the instruction any more: use the metadata then.
    """
    if sample.metadata and "task" in sample.metadata:
        task: TaskLike = sample.metadata["task"]
        return task
    prompt = sample.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0].get("content"), str):
        prompt = prompt[0]["content"]
    if not isinstance(prompt, str) or not prompt:
        raise errors.InvalidRequest(
            f"sample {sample.index} names no task: put an id or an inline task into metadata['task']"
        )
    return prompt


class Generate:
    """``await generate(args, sample, sampling_params, evaluation=False) -> list[Sample]``.

    ``agent``: as in ``rollouts()``. ``task``: the task of a sample. Of ``sampling_params`` temperature, top_p,
    top_k and min_p pin the sampling of the episode. The rest (lengths, stop strings) is meant for a single
    completion and does not bound an agent: set ``limits`` instead. It always returns a list, also for an ungraded
    rollout.

    Raises InvalidRequest, NotFound and the like for a task or an agent that the server refuses, and
    ServerUnavailable as long as no episode was accepted: errors of the configuration, which end the trainer's run.
    Later outages are waited for (``ClientSettings.outage_s``); then the rollout has failed.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        agent: str | Callable[[AsyncNewEpisodeHandle], Awaitable[object]],
        task: Callable[[Any], TaskLike] = task_in,
        limits: Limits | Mapping[str, Any] | None = None,
        retries: int = 2,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._task = task
        self._rollouts = SingleRollouts(client, agent=agent, limits=limits, retries=retries, env=env)

    async def __call__(
        self, args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False
    ) -> list[Any]:
        rollout = await self._rollouts.play(
            self._task(sample),
            sampling_params=sampling_params,
            group_id=None if sample.group_index is None else f"group_{sample.group_index}",
            # Greedy completions, as evaluations often are, train nothing, but they are what happened.
            include_untrained=evaluation,
            metadata={"index": sample.index, "group_index": sample.group_index, "evaluation": evaluation},
        )
        key = args.eval_reward_key if evaluation else args.reward_key
        return rows_of(rollout, sample, evaluation=evaluation, as_components=bool(key))
