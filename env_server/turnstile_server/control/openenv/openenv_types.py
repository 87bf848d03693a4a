"""Action, observation and state of this environment.

All data is in declared fields; ``metadata``, which clients before 0.5 drop, names the episode and its task too.
Fields that do not apply are left out on the wire: the published tool client tells observations apart by the fields
they have (``tools``: a ListToolsObservation, ``tool_name``: a CallToolObservation).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat, model_validator

from turnstile.models import Episode, EpisodeRequest, ErrorInfo, TaskRef, why_of
from turnstile.models.base import MAX_INT32, MAX_SECONDS, JsonObject, JsonObjects
from turnstile_server.control.openenv.openenv_wire import (
    OpenEnvAction,
    OpenEnvObservation,
    OpenEnvState,
    OpenEnvTool,
    OpenEnvToolError,
)

_FIELDS = {
    "list_tools": frozenset[str](),
    "call_tool": frozenset({"tool_name", "arguments"}),
    "generate": frozenset({"messages", "prompt", "tools", "offer_tools", "max_tokens", "stop"})
    | frozenset({"call_id", "completion_ids", "logprobs", "text", "weight_version"}),
    "wait": frozenset[str](),
    "finish": frozenset[str](),
}
_TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
_COMPLETES = ("completion_ids", "logprobs", "text")
_ASKS = frozenset({"messages", "prompt", "tools", "offer_tools", "max_tokens", "stop"})
_OF_A_COMPLETION = frozenset({"call_id", "weight_version"})
_ALWAYS = frozenset({"type", "timeout_s", "metadata"})


class TurnstileAction(OpenEnvAction):
    """The action that ``step`` takes. ``type`` says which of the other fields apply."""

    type: Literal["list_tools", "call_tool", "generate", "wait", "finish"]
    timeout_s: float | None = Field(
        None,
        gt=0,
        le=MAX_SECONDS,
        description="`call_tool`, `generate`: stopped after this (none: their own limits). `wait`, `finish`: how "
        "long to wait.",
    )
    tool_name: str | None = Field(None, description="`call_tool`: which tool.")
    arguments: JsonObject = Field(default_factory=dict, description="`call_tool`: its arguments.")
    messages: JsonObjects | None = Field(
        None, description="`generate`: the conversation so far, as in Chat Completions."
    )
    prompt: str | None = Field(None, description="`generate`: in place of `messages`, one user message.")
    tools: JsonObjects | None = Field(None, description="`generate`: tools, as in Chat Completions.")
    offer_tools: bool = Field(False, description="`generate`: offer the episode's own tools to the model.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="`generate`: most tokens to sample.")
    stop: str | list[str] | None = Field(None, description="`generate`: stop strings.")
    completion_ids: list[_TokenId] | None = Field(
        None, description="`generate`, engine `trainer`: completes the agent's pending call, with `logprobs`."
    )
    logprobs: list[FiniteFloat] | None = Field(None, description="`generate`: one for each of `completion_ids`.")
    text: str | None = Field(None, description="`generate`: completes it with a text, which is not trained.")
    call_id: str | None = Field(None, description="`generate`: which pending call; none: the oldest.")
    weight_version: str | None = Field(None, description="`generate`: the weights that sampled `completion_ids`.")

    @model_validator(mode="after")
    def _fields_of_its_type(self) -> TurnstileAction:
        given = {name for name in self.model_fields_set if getattr(self, name)}
        strange = given - _FIELDS[self.type] - _ALWAYS
        if strange:
            raise ValueError(f"{self.type} takes no {', '.join(sorted(strange))}")
        if self.type == "call_tool" and not self.tool_name:
            raise ValueError("call_tool needs tool_name")
        if self.completes:
            if given & _ASKS:
                raise ValueError(
                    f"generate completes a call or makes one: no {', '.join(sorted(given & _ASKS))} here"
                )
        elif self.type == "generate" and (self.messages is None) == (self.prompt is None):
            raise ValueError("generate needs messages, or prompt, and not both")
        elif given & _OF_A_COMPLETION:
            raise ValueError(f"only a completion takes {', '.join(sorted(given & _OF_A_COMPLETION))}")
        return self

    @property
    def completes(self) -> bool:
        """``generate`` answers a pending call of the agent instead of making one."""
        return any(getattr(self, name) is not None for name in _COMPLETES)


class TurnstileObservation(OpenEnvObservation):
    """The observation from ``reset`` and ``step``; ``reward`` and ``done`` are beside it on the wire."""

    episode_id: str | None = Field(None, description="The episode; none before `reset`.")
    status: str | None = Field(None, description="The episode's status.")
    step: int = Field(0, description="Number of the step this answers; 0 answers `reset`.")
    instruction: str | None = Field(None, description="`reset`: what the agent is asked.")
    model_url: str | None = Field(None, description="`reset`: where an external agent calls the model.")
    tool_url: str | None = Field(None, description="`reset`: the episode's MCP server.")
    episode_key: str | None = Field(None, description="`reset`, external agents: opens both.")
    tools: list[OpenEnvTool] | None = Field(None, description="`list_tools`.")
    tool_name: str | None = Field(None, description="`call_tool`: the tool that was called.")
    result: Any = Field(None, description="`call_tool`: the tool's text, also when the tool failed.")
    structured: dict[str, Any] | None = Field(
        None, description="`call_tool`: the result as the tool's output schema describes it, where it has one."
    )
    is_error: bool = Field(False, description="`call_tool`: the tool failed; `result` says why.")
    error: OpenEnvToolError | None = Field(None, description="The tool or model call could not be made.")
    message: dict[str, Any] | None = Field(None, description="`generate`: the reply, as in Chat Completions.")
    finish_reason: str | None = Field(None, description="`generate`: stop, length or tool_calls.")
    usage: dict[str, Any] | None = Field(None, description="`generate`: tokens.")
    pending: dict[str, Any] | None = Field(
        None,
        description="Engine `trainer`: the agent's oldest model call that waits (call_id, input_ids, "
        "max_new_tokens, sampling, stop_token_ids, stop); `generate` with completion_ids and logprobs, or text, "
        "completes it.",
    )
    reward_components: dict[str, float] | None = Field(None, description="Of an ended episode.")
    why: str | None = Field(
        None, description="Of an ended episode: one line, why it ended and why its reward is so."
    )
    episode_error: dict[str, Any] | None = Field(
        None, description="Why an ended episode has no result: type, message, fault."
    )


class TurnstileState(OpenEnvState):
    """The episode, which the client may ask for at any time."""

    status: str | None = None
    done: bool = False
    reward: float | None = None
    reward_components: dict[str, float] = Field(default_factory=dict)
    error: dict[str, Any] | None = None
    agent: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    model_url: str | None = None
    tool_url: str | None = None
    turns: int = 0
    sampled_tokens: int = 0


class ResetParameters(EpisodeRequest):
    """``reset(**these)``: the fields of ``POST /episodes``, with the task by ``task_id``, as ``task``, or left to
    the server."""

    model_config = ConfigDict(extra="forbid")

    task: TaskRef = TaskRef()
    task_id: str | None = None
    split: str | None = None
    """Without ``index``: the task is chosen among those of the split."""
    index: Annotated[int, Field(ge=0)] | None = None
    """Position in the split; without one, in the catalogue."""
    detached: bool = False
    """True: the episode goes on when its socket closes."""

    @model_validator(mode="after")
    def _at_most_one_task(self) -> ResetParameters:
        if self.task_id is not None and self._inline:
            raise ValueError("name one task: task_id, or task (an object with an instruction), and not both")
        if self.names_task and (self.split is not None or self.index is not None):
            raise ValueError("name one task: task_id, task, or split and index")
        chosen = self.names_task or self.index is not None or self.seed is not None
        if self.idempotency_key is not None and not chosen:
            raise ValueError("idempotency_key needs a task or a seed: without them every reset takes another task")
        return self

    @property
    def _inline(self) -> bool:
        return bool(self.task.model_dump(exclude_none=True))

    @property
    def names_task(self) -> bool:
        return self.task_id is not None or self._inline

    def request(self, task_id: str | None, seed: int | None) -> EpisodeRequest:
        """The request for ``POST /episodes``, with the task and the seed that were chosen."""
        task = TaskRef(id=task_id) if task_id is not None else self.task
        fields = {name: getattr(self, name) for name in self.model_fields_set & EpisodeRequest.model_fields.keys()}
        return EpisodeRequest.model_validate({**fields, "task": task, "seed": seed})


def serialise(observation: TurnstileObservation) -> dict[str, Any]:
    """The observation as OpenEnv sends one, without the fields that were not set; since 0.5 with its ``metadata``
    inside, and beside it where there is some."""
    shown = observation.model_dump(mode="json", exclude={"reward", "done", "metadata"}, exclude_unset=True)
    sent = {
        "observation": {**shown, "metadata": observation.metadata},
        "reward": observation.reward,
        "done": observation.done,
    }
    return {**sent, "metadata": observation.metadata} if observation.metadata else sent


def outcome(episode: Episode) -> dict[str, Any]:
    """The fields that every observation of an episode has."""
    fields: dict[str, Any] = {
        "episode_id": episode.episode_id,
        "status": episode.status.value,
        "done": episode.status.ended,
        "reward": episode.reward,
        "metadata": {
            name: value
            for name, value in (
                ("episode_id", episode.episode_id),
                ("task_id", episode.task.id),
                ("group_id", episode.group_id),
                ("rollout_id", episode.rollout_id),
            )
            if value is not None
        },
    }
    if episode.status.ended:
        fields["reward_components"] = dict(episode.reward_components)
        fields["why"] = why_of(episode)
        if episode.error is not None:
            fields["episode_error"] = error_of(episode.error)
    return fields


def error_of(error: ErrorInfo) -> dict[str, Any]:
    return error.model_dump(mode="json", exclude_none=True)


def schemas() -> dict[str, Any]:
    """Answer to ``GET /schema``."""
    return {
        "action": TurnstileAction.model_json_schema(),
        "observation": TurnstileObservation.model_json_schema(),
        "state": TurnstileState.model_json_schema(),
        "reset": ResetParameters.model_json_schema(),
    }
