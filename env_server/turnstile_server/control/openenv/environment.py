"""One episode as an OpenEnv environment.

What must hold: ``release`` cancels the episode that the environment started and owns, on every path; a detached
episode ends by its own limits only. The time limits of a step are its own and those of the tool or the model.
Failures of the agent are observations; mistakes of the trainer are errors. Rewards are the episode's; none is
computed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from turnstile.models import CompletionRequest, Episode, EpisodeCreated, EpisodeStatus, new_id
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.control.openenv.agent_calls import EpisodeToolCalls, ModelCalls, ToolAnswer
from turnstile_server.control.openenv.openenv_parts import OpenEnvParts
from turnstile_server.control.openenv.openenv_types import (
    ResetParameters,
    TurnstileAction,
    TurnstileObservation,
    TurnstileState,
    error_of,
    outcome,
)
from turnstile_server.control.openenv.openenv_wire import OpenEnvTool, OpenEnvToolError, ToolErrorType
from turnstile_server.control.openenv.task_choice import TaskChoice
from turnstile_server.control.openenv.tool_wire import chat_function, observed, openenv_tool
from turnstile_server.errors import Conflict, NotFound, TurnstileError, error_of_type
from turnstile_server.tools.protocol import ToolSpec

_LOG = logging.getLogger(__name__)
_WAITING = (EpisodeStatus.QUEUED, EpisodeStatus.PREPARING)


@dataclass(slots=True)
class SessionSocket:
    """The socket of a session: whether there is one, and whether the session ends with it."""

    attached: bool = False
    closing: bool = False


class TurnstileEnvironment:
    """At most one episode at a time; ``reset`` releases the one before."""

    def __init__(self, parts: OpenEnvParts, choice: TaskChoice, agent_url: str) -> None:
        """``choice``: of tasks, where a reset names none. ``agent_url``: the agent listener's, for this client."""
        self._parts = parts
        self._choice = choice
        self._agent_url = agent_url
        self._model = ModelCalls(parts.gate)
        self._tools = EpisodeToolCalls(parts.directory, parts.toolbox)
        self._created: EpisodeCreated | None = None
        self._seen: Episode | None = None
        self._owned = False
        self._steps = 0
        self._beginning = anyio.Lock()
        self._first_id: str | None = None
        self.session: SessionSocket | None = None
        """Where it belongs to a session that HTTP and a socket share."""

    @property
    def episode_id(self) -> str | None:
        return self._seen.episode_id if self._seen is not None else None

    def open_session(self) -> str:
        """The id of a session for an environment without an episode. Its first episode has the same id, unless a
        reset names another."""
        self._first_id, self.session = new_id("ep"), SessionSocket()
        return self._first_id

    @property
    def owned(self) -> bool:
        """True if the episode ends with this environment."""
        return self._owned

    @property
    def is_open(self) -> bool:
        """True if it has an episode that had not ended when it was last seen."""
        return self._seen is not None and not self._seen.status.ended

    # OpenEnv's interface

    async def reset(self, parameters: Mapping[str, Any]) -> TurnstileObservation:
        """Start an episode with the fields of ``ResetParameters``; without a task, ``TaskChoice`` chooses one.

        For an external agent the answer comes once the episode runs, after ``openenv.wait_s`` at the latest.
        Raises pydantic.ValidationError, the errors of creating an episode, and the error of an episode that ended
        while it was prepared.
        """
        async with self._beginning:  # a session's socket and HTTP may both begin one
            return await self._reset(parameters)

    async def _reset(self, parameters: Mapping[str, Any]) -> TurnstileObservation:
        unset = {name for name in ("seed", "episode_id") if parameters.get(name) is None}
        asked = ResetParameters.model_validate({k: v for k, v in parameters.items() if k not in unset})
        if asked.episode_id is None and self._first_id is not None:
            asked = asked.model_copy(update={"episode_id": self._first_id})
        self._choice.seed(asked.seed)
        if asked.names_task:
            chosen = asked.task_id, asked.seed
        else:
            chosen = self._choice.choose(asked.seed, asked.split, asked.index)
        await self.release()
        self._created, self._seen, self._steps = None, None, 0
        # A created episode must have an owner, so a caller that leaves now is noticed after the creation.
        with anyio.CancelScope(shield=True):
            created, _ = await self._parts.episodes.create(asked.request(*chosen), self._agent_url)
            self._created, self._owned = created, not asked.detached
            self._first_id = None
        episode = self._seen = await self._parts.episodes.get(created.episode_id)
        if created.episode_key is not None:
            wait_s = self._parts.settings.wait_s
            episode = await self._until(lambda found: found.status not in _WAITING, wait_s)
        waiting: dict[str, Any] = {}
        if self._parts.training.open and created.episode_key is None:
            waiting = await self._pending(self._parts.settings.wait_s)
            episode = self._seen
        if episode.status.ended and episode.error is not None:
            detail = {"episode_id": episode.episode_id}
            raise error_of_type(episode.error.type, episode.error.message, detail=detail)
        fields = {
            "instruction": await self._instruction(episode),
            "model_url": created.model_url,
            "tool_url": created.tool_url,
            "episode_key": created.episode_key,
            **waiting,
        }
        return self._observation(**{name: value for name, value in fields.items() if value is not None})

    async def step(self, action: TurnstileAction, timeout_s: float | None = None) -> TurnstileObservation:
        """Run one action. Raises Conflict without an episode to act in, and the errors of the episode service.

        ``call_tool`` begins an episode where there is none: OpenEnv's tool client may leave ``reset`` out.
        """
        if action.type == "list_tools" and self._seen is None:
            return TurnstileObservation(step=0, tools=_shown(self._tools.known()))
        if action.type == "call_tool":
            await self.begin()
        if self._seen is None:
            raise Conflict(f"{action.type} needs an episode: send reset first")
        self._steps += 1
        limit_s = action.timeout_s if action.timeout_s is not None else timeout_s
        match action.type:
            case "list_tools":
                return await self._observed(tools=_shown(self.tools()))
            case "call_tool":
                return await self._call_tool(action, limit_s)
            case "generate" if action.completes:
                return await self._complete(action, limit_s)
            case "generate":
                return await self._generate(action, limit_s)
            case "wait" if self._parts.training.open:
                return self._observation(**await self._pending(self._bounded(limit_s)))
            case "wait":
                before = self._seen.status
                await self._until(lambda episode: episode.status != before, self._bounded(limit_s))
                return self._observation()
            case "finish":
                await self._parts.episodes.finish(self._seen.episode_id)
                await self._until(lambda episode: episode.status.ended, self._bounded(limit_s))
                return self._observation()

    @property
    def state(self) -> TurnstileState:
        """The episode as it was seen last; ``refreshed`` asks for its present state."""
        episode = self._seen
        if episode is None:
            return TurnstileState(episode_id=None, step_count=0)
        created = self._created
        return TurnstileState(
            episode_id=episode.episode_id,
            step_count=self._steps,
            status=episode.status.value,
            done=episode.status.ended,
            reward=episode.reward,
            reward_components=dict(episode.reward_components),
            error=error_of(episode.error) if episode.error is not None else None,
            agent=episode.agent,
            task_id=episode.task.id,
            group_id=episode.group_id,
            rollout_id=episode.rollout_id,
            model_url=created.model_url if created is not None else None,
            tool_url=created.tool_url if created is not None else None,
            turns=episode.stats.turns,
            sampled_tokens=episode.stats.sampled_tokens,
        )

    async def refreshed(self) -> TurnstileState:
        """The episode as it is now."""
        if self._seen is not None:
            self._seen = await self._parts.episodes.get(self._seen.episode_id)
        return self.state

    def tools(self) -> Sequence[ToolSpec]:
        """The episode's tools; without an episode, all tools of the server."""
        if self._created is None or not self.is_open:
            return self._tools.known()
        assert self._seen is not None
        return self._tools.of(self._seen.episode_id, self._key("list_tools"))

    # What JSON-RPC needs besides

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """A step that calls a tool, as the tool answers it. There must be an episode. Raises Conflict where its
        key is not here."""
        assert self._seen is not None
        self._steps += 1
        return await self._tools.call(self._seen.episode_id, self._key("tools/call"), name, arguments)

    async def begin(self, *, detached: bool = False) -> None:
        """Start an episode as ``reset`` without parameters does, unless there is one. Raises what it raises."""
        async with self._beginning:
            if self._seen is not None:
                return
            try:
                await self._reset({})
            except BaseException:
                await self.release()
                self._created, self._seen = None, None
                raise
            if detached:
                self.detach()

    async def attach(self, episode_id: str) -> None:
        """Take an episode that was started elsewhere. Its key is not known, so there are no tools and no
        ``generate``. Raises NotFound."""
        self._seen = await self._parts.episodes.get(episode_id)

    def detach(self) -> None:
        """Give up the ownership of the episode: it goes on without this environment."""
        self._owned = False

    async def close_session(self) -> None:
        """End an open episode. Where an agent did something in it, it is finished and graded (in the background
        after ``openenv.wait_s``); an untouched one is cancelled."""
        assert self._seen is not None
        episode_id, self._owned = self._seen.episode_id, False
        if not self._steps and not (await self.refreshed()).turns:
            self._seen = await self._parts.episodes.cancel(episode_id)
            return
        with anyio.move_on_after(self._parts.settings.wait_s):
            self._seen = await self._parts.episodes.finish(episode_id)

    async def has_ended(self) -> bool:
        """True if its episode has ended or was deleted."""
        if self._seen is None or self._seen.status.ended:
            return True
        try:
            return (await self.refreshed()).done
        except NotFound:
            return True

    async def release(self) -> None:
        """Cancel the episode if it is owned. Runs to its end even if the caller is cancelled; may be repeated."""
        owned, self._owned = self._owned, False
        if not owned or self._created is None:
            return
        episode_id = self._created.episode_id
        with anyio.CancelScope(shield=True):
            try:
                await self._parts.episodes.cancel(episode_id)
            except NotFound:
                return  # deleted meanwhile
            except TurnstileError as error:
                _LOG.error("episode %s could not be cancelled: %s", episode_id, error.message)

    # Steps

    async def _call_tool(self, action: TurnstileAction, limit_s: float | None) -> TurnstileObservation:
        assert self._seen is not None
        name, key = action.tool_name or "", self._key("call_tool")
        answer = _timeout(name, limit_s)
        with anyio.move_on_after(limit_s):
            answer = await self._tools.call(self._seen.episode_id, key, name, action.arguments)
        return await self._observed(tool_name=name, **_told(answer))

    async def _generate(self, action: TurnstileAction, limit_s: float | None) -> TurnstileObservation:
        assert self._seen is not None
        key = self._key("generate")
        fields: dict[str, Any] = {"error": _timeout("generate", limit_s).error}
        with anyio.move_on_after(limit_s):
            try:
                answer = await self._model.chat(self._seen.episode_id, key, self._chat_body(action))
                choice = answer["choices"][0]
                fields = {name: choice[name] for name in ("message", "finish_reason")} | {"usage": answer["usage"]}
            except TurnstileError as refusal:
                message = f"{refusal.type}: {refusal.message}"
                fields = {"error": OpenEnvToolError(error_type=ToolErrorType.EXECUTION_ERROR, message=message)}
        return await self._observed(**fields)

    async def _complete(self, action: TurnstileAction, limit_s: float | None) -> TurnstileObservation:
        """Complete a pending call of the agent; the observation has its next call, or the end of the episode."""
        assert self._seen is not None
        training, episode_id = self._parts.training, self._seen.episode_id
        call_id = action.call_id
        if call_id is None:
            calls = (await training.pending(episode_id)).calls
            if not calls:
                raise Conflict("generate: no model call of the agent waits; wait for one")
            call_id = calls[0].call_id
        fields = {"completion_ids", "logprobs", "text", "weight_version"} & action.model_fields_set
        request = CompletionRequest.model_validate(
            {"call_id": call_id, **{name: getattr(action, name) for name in fields}}
        )
        await training.complete(episode_id, request)
        return self._observation(**await self._pending(self._bounded(limit_s)))

    async def _pending(self, wait_s: float) -> dict[str, Any]:
        """The field ``pending`` of an observation: the oldest waiting call, if one comes within ``wait_s``."""
        assert self._seen is not None
        found = await self._parts.training.pending(self._seen.episode_id, wait_s)
        self._seen = await self._parts.episodes.get(self._seen.episode_id)
        return {"pending": found.calls[0].model_dump(mode="json")} if found.calls else {}

    def _chat_body(self, action: TurnstileAction) -> dict[str, Any]:
        messages = action.messages
        body: dict[str, Any] = {
            "model": "policy",
            "messages": messages if messages is not None else [{"role": "user", "content": action.prompt}],
        }
        offered = list(action.tools or [])
        if action.offer_tools:
            offered += [chat_function(tool) for tool in self.tools()]
        optional = {"tools": offered or None, "max_tokens": action.max_tokens, "stop": action.stop}
        return body | {name: value for name, value in optional.items() if value is not None}

    # Helpers

    async def _until(self, reached: Callable[[Episode], bool], wait_s: float) -> Episode:
        """Wait until ``reached(episode)`` or the episode's end, at most ``wait_s`` seconds."""
        assert self._seen is not None
        deadline = anyio.current_time() + wait_s
        self._seen = await self._parts.episodes.get(self._seen.episode_id)
        while not (self._seen.status.ended or reached(self._seen)):
            left_s = deadline - anyio.current_time()
            if left_s <= 0:
                break
            self._seen = await self._parts.episodes.get(self._seen.episode_id, left_s)
        return self._seen

    def _bounded(self, asked_s: float | None) -> float:
        most = self._parts.control.bounds_of(ControlBounds).max_wait_s
        return min(asked_s, most) if asked_s is not None else self._parts.settings.wait_s

    def _key(self, what: str) -> str:
        if self._created is None:
            raise Conflict(f"{what}: this server did not start the episode over OpenEnv, so its key is not here")
        if self._created.episode_key is None:
            raise Conflict(f"{what}: the episode's own agent acts in it; use wait until it is done")
        return self._created.episode_key

    async def _instruction(self, episode: Episode) -> str | None:
        if episode.instruction is not None:
            return episode.instruction
        if episode.task.instruction is not None or episode.task.id is None or self._parts.tasks is None:
            return episode.task.instruction
        await self._parts.tasks.prefetch(episode.task.id)
        return self._parts.tasks.get(episode.task.id).instruction

    async def _observed(self, **fields: Any) -> TurnstileObservation:
        """An observation of the episode as it is after an action, which may have ended it."""
        assert self._seen is not None
        self._seen = await self._parts.episodes.get(self._seen.episode_id)
        return self._observation(**fields)

    def _observation(self, **fields: Any) -> TurnstileObservation:
        assert self._seen is not None
        given = outcome(self._seen)
        if self._steps and not self._seen.status.ended:
            given["reward"] = self._parts.settings.step_reward
        return TurnstileObservation(step=self._steps, **given, **fields)


def _timeout(what: str, limit_s: float | None) -> ToolAnswer:
    """The answer to a call that ``timeout_s`` stopped."""
    message = f"{what} was stopped after timeout_s = {limit_s}"
    return ToolAnswer(error=OpenEnvToolError(error_type=ToolErrorType.TIMEOUT, message=message))


def _shown(specs: Sequence[ToolSpec]) -> list[OpenEnvTool]:
    return [openenv_tool(spec) for spec in specs]


def _told(answer: ToolAnswer) -> dict[str, Any]:
    """The fields of an observation that tell a tool's answer."""
    if answer.result is None:
        return {"error": answer.error}
    return observed(answer.result)
