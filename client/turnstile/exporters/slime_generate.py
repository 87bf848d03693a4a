"""The ``generate`` of slime and miles: each call plays one rollout of a task on Turnstile.

In a module of your own, on the trainer's path:

    generate = Generate(AsyncClient("http://127.0.0.1:8000", key=KEY), agent="tool-loop")

and ``--custom-generate-function-path that_module.generate``. The trainer's semaphore bounds how many run at
once. A call that the trainer cancels cancels its episode. The client is not closed here.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from turnstile import errors
from turnstile._rollout_run import RolloutHooks, RolloutPlan
from turnstile.client import AsyncClient, AsyncNewEpisodeHandle
from turnstile.exporters.slime import rows_of
from turnstile.models import Limits, Sampling, new_id
from turnstile.rollout import RolloutOptions, TaskLike, task_ref

_SAMPLING = tuple(Sampling.model_fields)


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
        self._client = client
        self._task = task
        self._options = RolloutOptions(agent, limits=limits, retries=retries, env=env)
        self._accepted = False
        self._fresh_groups: dict[str, str] = {}
        self._numbers = itertools.count()
        self._hooks = RolloutHooks(
            retried=lambda: None,
            regraded=lambda: None,
            refilled=lambda: None,
            fresh_group=lambda closed: self._fresh_groups.setdefault(closed, new_id("group")),
            waiting=lambda _: None,
            accepted=self._note_accepted,
            any_accepted=lambda: self._accepted,
        )

    async def __call__(
        self, args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False
    ) -> list[Any]:
        options = replace(
            self._options,
            sampling={name: value for name, value in sampling_params.items() if name in _SAMPLING},
            # Greedy completions, as evaluations often are, train nothing, but they are what happened.
            include_untrained=evaluation,
            metadata={"index": sample.index, "group_index": sample.group_index, "evaluation": evaluation},
        )
        group_id = new_id("group") if sample.group_index is None else f"group_{sample.group_index}"
        plan = RolloutPlan(task_ref(self._task(sample)), group_id, 0, new_id("rollout"), next(self._numbers))
        rollout = await self._client._rollout(options, plan, self._hooks).run()
        key = args.eval_reward_key if evaluation else args.reward_key
        return rows_of(rollout, sample, evaluation=evaluation, as_components=bool(key))

    def _note_accepted(self) -> None:
        self._accepted = True
