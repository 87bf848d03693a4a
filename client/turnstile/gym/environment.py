"""One agent at a time as a Gymnasium environment, over the blocking client.

Owns its client and at most one open episode; ``reset`` and ``close`` cancel the previous one. What must hold:
reward, termination and truncation are the episode's own; an episode without a reward is never a silent 0
(``info["graded"]``); ``info`` has neither ids nor clocks unless ``info_ids`` is set, so that equal seeds give
equal results. The environment never samples.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from turnstile import errors
from turnstile._retry import ClientSettings
from turnstile.gym.spaces import ActionKind, Observation, Spaces, completion_of
from turnstile.models import Episode, EpisodeStatus, Fault, PendingCall, TaskRef
from turnstile.models.draw import draw_position, draw_seed
from turnstile.sync import Client, NewEpisodeHandle

_LOG = logging.getLogger(__name__)

Task = TaskRef | Mapping[str, Any] | str
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class EpisodeFailed(errors.TurnstileError):
    """An episode ended before its agent's first model call, so there is no observation."""


class PromptTooLong(errors.InvalidRequest):
    """The agent's first prompt is longer than ``max_prompt_tokens``."""


class AgentEnv(gymnasium.Env[Observation, Any]):
    """``Turnstile/Agent-v0``.

    ``url``, ``key``: the control API of a server with ``--engine trainer``. ``tasks``: ids, inline tasks or
    instructions, of which ``reset`` takes one by the seed; None: all of the server's. ``agent``: one that the
    server launches. ``action``: ``ids`` (with logprobs) or ``text``, which is not trained.
    ``max_prompt_tokens``, ``max_completion_tokens``: bounds of the spaces; the latter bounds the episode's
    completions too. ``sampling``, ``limits``, ``env``, ``metadata``: of every episode. ``weight_version``: of the
    completions; set it (``set_attr`` in a vector) when the policy changes. ``wait_s``: how long the agent may take
    to its first model call, and from one to the next; then Timeout. ``reset_attempts``: episodes begun for one
    ``reset`` when the infrastructure fails. ``info_ids``: ``info`` names the episode and the call.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        key: str | None = None,
        tasks: Sequence[Task] | None = None,
        agent: str = "tool-loop",
        action: ActionKind = "ids",
        max_prompt_tokens: int = 8192,
        max_completion_tokens: int = 512,
        sampling: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        weight_version: str | None = None,
        wait_s: float = 600.0,
        reset_attempts: int = 3,
        info_ids: bool = False,
        settings: ClientSettings | None = None,
        render_mode: str | None = None,
    ) -> None:
        if action not in ("ids", "text"):
            raise errors.InvalidRequest(f"action = {action!r}; an action is ids or text")
        if tasks is not None and not tasks:
            raise errors.InvalidRequest("tasks is empty")
        if reset_attempts < 1:
            raise errors.InvalidRequest(f"reset_attempts must be at least 1, not {reset_attempts}")
        self.weight_version = weight_version
        self.render_mode = render_mode
        self._client = Client(url, key=key, settings=settings)
        self._tasks = None if tasks is None else tuple(tasks)
        self._fields: dict[str, Any] = {
            "agent": agent,
            "sampling": sampling,
            "limits": {"max_completion_tokens": max_completion_tokens, **(limits or {})},
            "env": env,
            "metadata": metadata,
        }
        self._wait_s = wait_s
        self._attempts = reset_attempts
        self._info_ids = info_ids
        self._episode: NewEpisodeHandle | None = None
        self._call: PendingCall | None = None
        try:
            info = next(iter(self._client.engine().values()))
        except BaseException:
            self._client.close()
            raise
        self._spaces = Spaces(info.vocab_size, max_prompt_tokens, max_completion_tokens)
        self.observation_space = self._spaces.observation
        self._action: ActionKind = action
        self.action_space = self._spaces.action(action)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode and waits for its first model call.

        ``seed`` chooses the task, and is the episode's seed. ``options["task"]`` names the task instead.

        Raises EpisodeFailed where no attempt came to a model call, PromptTooLong, Timeout, and the client's errors
        for a task or agent that the server refuses.
        """
        super().reset(seed=seed)
        given = dict(options or {})
        task = given.pop("task", None)
        if given:
            raise errors.InvalidRequest(f"options: no {', '.join(sorted(given))} (there is task)")
        self._cancel()
        if task is None:
            tasks = self._all_tasks()
            task = tasks[draw_position(self.np_random, len(tasks))]
        episode_seed = seed if seed is not None else draw_seed(self.np_random)
        call = self._begin(task, episode_seed)
        if len(call.input_ids) > self._spaces.max_prompt_tokens:
            self._cancel()
            raise PromptTooLong(self._too_long(call))
        self._call = call
        return self._spaces.observed(call), self._info()

    def step(self, action: Any) -> Step:
        """Completes the pending model call and waits for the next one, or for the episode's end.

        Raises InvalidRequest for an action that cannot be a turn: the call goes on waiting, and ``step`` may be
        called again; Timeout after ``wait_s``. After any error but InvalidRequest ``reset`` comes next, unless the
        completion itself found no server: then the same action may be given again.
        """
        if self._episode is None or self._call is None:
            raise gymnasium.error.ResetNeeded("there is no pending model call: call reset first")
        answered = True
        try:
            fields = completion_of(action, self._call, self._action)
            self._episode.complete(self._call.call_id, weight_version=self.weight_version, **fields)
        except (errors.Gone, errors.NotFound):
            answered = False  # the agent gave the call up meanwhile, or the server was restarted
        self._call = None  # answered, also when the next lines raise
        self._call = self._next(self._episode)
        if self._call is None:
            return self._ended(self._episode.status(), answered)
        if len(self._call.input_ids) > self._spaces.max_prompt_tokens:
            said = self._too_long(self._call)
            return self._ended(self._episode.cancel(), answered, prompt_too_long=said)
        return self._spaces.observed(self._call), 0.0, False, False, self._info(answered=answered)

    def close(self) -> None:
        """Cancels the open episode and closes the connections. May be called again."""
        self._cancel()
        self._client.close()

    def _all_tasks(self) -> Sequence[Task]:
        if self._tasks is None:
            self._tasks = tuple(info.id for info in self._client.tasks())
            if not self._tasks:
                raise errors.InvalidRequest("the server has no tasks; give some (tasks=[…])")
        return self._tasks

    def _begin(self, task: Task, seed: int) -> PendingCall:
        """The first model call of a new episode."""
        for attempt in range(self._attempts):
            self._episode = self._client.create_episode(
                task, seed=seed, attempt=attempt, lease=True, **self._fields
            )
            call = self._next(self._episode)
            if call is not None:
                return call
            ended, self._episode = self._episode.status(), None
            if ended.error is None or ended.error.fault is not Fault.INFRASTRUCTURE:
                break
        reason = f"{ended.error.type}: {ended.error.message}" if ended.error is not None else "it has no error"
        raise EpisodeFailed(
            f"{ended.episode_id} ended as {ended.status} before its agent called the model: {reason}",
            type=ended.error.type if ended.error is not None else None,
            detail=ended.error.detail if ended.error is not None else None,
        )

    def _next(self, episode: NewEpisodeHandle) -> PendingCall | None:
        """The oldest waiting call; parallel ones come one after another. None: the episode has ended."""
        found = episode.pending(self._wait_s)
        if found.calls:
            return found.calls[0]
        if found.status.ended:
            return None
        self._cancel()
        raise errors.Timeout(f"{found.episode_id} made no model call for {self._wait_s:g} s (wait_s)")

    def _ended(self, episode: Episode, answered: bool, *, prompt_too_long: str = "") -> Step:
        error = episode.error
        terminated = episode.status is EpisodeStatus.COMPLETED
        info = self._info(answered=answered) | {
            "status": "prompt_too_long" if prompt_too_long else episode.status.value,
            "graded": episode.reward is not None,
            "error": prompt_too_long or (f"{error.type}: {error.message}" if error is not None else ""),
            "fault": error.fault.value if error is not None and error.fault is not None else "",
            "turns": episode.stats.turns,
            "sampled_tokens": episode.stats.sampled_tokens,
            "reward_components": dict(episode.reward_components),
        }
        self._episode, self._call = None, None
        return self._spaces.observed(None), episode.reward or 0.0, terminated, not terminated, info

    def _info(self, *, answered: bool = True) -> dict[str, Any]:
        schema = self._call.json_schema if self._call is not None else None
        info: dict[str, Any] = {"answered": answered, "json_schema": schema or ""}
        if self._info_ids and self._episode is not None:
            info["episode_id"] = self._episode.episode_id
            info["call_id"] = self._call.call_id if self._call is not None else ""
        return info

    def _too_long(self, call: PendingCall) -> str:
        return (
            f"the agent's prompt has {len(call.input_ids)} tokens, more than max_prompt_tokens = "
            f"{self._spaces.max_prompt_tokens}"
        )

    def _cancel(self) -> None:
        """Cancels the open episode, if there is one."""
        episode, self._episode, self._call = self._episode, None, None
        if episode is None:
            return
        try:
            episode.cancel()
        except errors.TurnstileError as error:
            _LOG.warning("%s could not be cancelled: %s", episode.episode_id, error.message)
