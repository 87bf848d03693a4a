"""Turnstile's tasks and agents as a taskset and an environment of verifiers 0.4.0, for ``vf-eval``.

verifiers finds both in a module of one name on its path:

    from turnstile.exporters.verifiers_env import TurnstileEnv, TurnstileTaskset

    __all__ = ["TurnstileEnv", "TurnstileTaskset"]

The agent, the model and the grader are those of the Turnstile server: verifiers' harness, model and client are not
used. The control key is read from an environment variable, because verifiers writes configurations to disk.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from pydantic import Field
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.env import Env
from verifiers.v1.episode import EnvInfo, Episode
from verifiers.v1.task import Task, TaskData
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Error, TraceTask

from turnstile import errors
from turnstile.client import AsyncClient
from turnstile.exporters.single_rollouts import SingleRollouts
from turnstile.exporters.verifiers import to_trace
from turnstile.sync import Client


class TurnstileTask(Task[TaskData]):  # type: ignore[misc]
    """A task of a server: its id, and its instruction as the prompt."""

    @property
    def key(self) -> str:
        """Its id: the default is a digest of the data, position included."""
        return str(self.data.id)


class TurnstileTasksetConfig(TasksetConfig):  # type: ignore[misc]
    url: str = "http://127.0.0.1:8000"
    """The control API of the server."""
    key_var: str = "TURNSTILE_CONTROL_KEY"
    """The environment variable with its key."""
    where: list[str] = Field(default_factory=list)
    """Which tasks (``client.tasks(where=…)``); empty: all."""


class TurnstileTaskset(Taskset[TurnstileTask, TurnstileTasksetConfig]):  # type: ignore[misc]
    """The tasks of a server, in its order."""

    def load(self) -> Iterable[TurnstileTask]:
        with Client(self.config.url, key=os.environ.get(self.config.key_var)) as client:
            for task in client.tasks(where=self.config.where):
                yield TurnstileTask(TaskData(id=task.id, prompt=task.instruction), self.config.task)


class TurnstileEnvConfig(EnvConfig):  # type: ignore[misc]
    agent: AgentConfig = AgentConfig()
    """verifiers wants a seat; nothing of it is used."""
    launch: str = "tool-loop"
    """The agent that the server launches."""
    retries_of_rollouts: int = 2
    """Further attempts after failures of the infrastructure."""


class TurnstileEnv(Env[TurnstileEnvConfig]):  # type: ignore[misc]
    """One rollout is one episode with one trace. An episode without a reward has no trace, and the reason as its
    error: verifiers would count it as 0."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Holds the client. verifiers' own interception of model calls, and its tunnel, are not needed."""
        where = self.taskset.config
        async with AsyncClient(where.url, key=os.environ.get(where.key_var)) as self._client:
            self._rollouts = SingleRollouts(
                self._client, agent=self.config.launch, retries=self.config.retries_of_rollouts
            )
            yield

    async def run(self, task: Any, agents: Any) -> None:
        """Not called: ``run_episode`` plays no agent of verifiers'."""
        raise NotImplementedError

    async def run_episode(self, task: Any, ctx: Any, *, on_trace: Any = None, on_discard: Any = None) -> Any:
        """verifiers' ``Episode`` of one rollout. The sampling of ``ctx`` pins the episode's."""
        of = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = Episode(env=EnvInfo(id=self.config.env_id), task=of)
        sampling = ctx.sampling.model_dump(exclude_none=True)
        try:
            rollout = await self._rollouts.play(
                {"id": task.data.id}, sampling_params=sampling, include_untrained=True
            )
            ended = rollout.episode
            if ended is not None and rollout.reward is not None:
                forest = await self._client.episode(ended.episode_id).tree()
                trace = to_trace(rollout, forest, task=of)
                if on_trace is not None:
                    on_trace(trace)
                episode.traces.append(trace)
        except errors.TurnstileError as error:
            episode.errors.append(Error(type=type(error).__name__, message=str(error)))
            return episode
        episode.ok = bool(episode.traces)
        if not episode.ok:
            why = rollout.error
            episode.errors.append(
                Error(type=why.type, message=why.message)
                if why is not None
                else Error(type="ungraded", message="nothing grades the task, or its grading failed")
            )
        return episode
