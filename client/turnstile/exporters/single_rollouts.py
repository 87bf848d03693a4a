"""Plays one rollout of a task for each call: for trainers that ask for their rollouts one at a time.

The trainer decides how many run at once. A call that is cancelled cancels its episode. The client is not closed
here.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from turnstile._rollout_run import RolloutHooks, RolloutPlan
from turnstile.client import AsyncClient, AsyncNewEpisodeHandle
from turnstile.models import Limits, Sampling, new_id
from turnstile.rollout import Rollout, RolloutOptions, TaskLike, task_ref

_SAMPLING = tuple(Sampling.model_fields)


class SingleRollouts:
    """``agent``, ``limits``, ``retries`` and ``env`` are those of ``AsyncClient.rollouts``."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        agent: str | Callable[[AsyncNewEpisodeHandle], Awaitable[object]],
        limits: Limits | Mapping[str, Any] | None = None,
        retries: int = 2,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._client = client
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

    async def play(
        self,
        task: TaskLike,
        *,
        sampling_params: Mapping[str, Any],
        group_id: str | None = None,
        index: int = 0,
        include_untrained: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """The rollout once it has ended. Of ``sampling_params`` temperature, top_p, top_k and min_p pin the
        episode's sampling; the rest (lengths, stop strings) is meant for a single completion.

        Raises InvalidRequest, NotFound and the like for a task or an agent that the server refuses, and
        ServerUnavailable as long as no episode was accepted: errors of the configuration. Later outages are waited
        for (``ClientSettings.outage_s``); then the rollout has failed.
        """
        options = replace(
            self._options,
            sampling={name: value for name, value in sampling_params.items() if name in _SAMPLING},
            include_untrained=include_untrained,
            metadata=metadata,
        )
        group = group_id or new_id("group")
        plan = RolloutPlan(task_ref(task), group, index, new_id("rollout"), next(self._numbers))
        return await self._client._rollout(options, plan, self._hooks).run()

    def _note_accepted(self) -> None:
        self._accepted = True
