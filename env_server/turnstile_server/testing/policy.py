"""Scripted policies: plain functions that stand in for a model.

A policy takes a ``PolicyInput`` (one model call) and returns a ``Step`` (one completion). ``ChatFormat`` reads the
input off the prompt's ids, and writes the step as ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnstile_server.errors import TurnstileError


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """One message of a prompt as the template wrote it, without the tokens that open and close it.

    The calls of a reply, the listed tools and the frames of tool results are part of ``text``.
    """

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """One model call as a policy sees it.

    ``prompt`` is the whole prompt as text, control tokens included. ``turn`` counts the model's earlier turns in
    it. ``tools`` are by name, each ``{"name", "description", "parameters"}`` as the agent sent it.
    """

    prompt: str
    turn: int
    tools: Mapping[str, Mapping[str, Any]]
    messages: tuple[PromptMessage, ...] = ()
    """In order, without the message that the policy is to write."""
    own_role: str = "assistant"
    episode_id: str = ""
    call_id: str = ""
    calls_made: int = 0
    """Tool calls in the model's earlier turns. More reliable than ``turn``, because some agents split a turn in
    two or leave one out."""

    def text_of(self, role: str) -> str:
        """All messages of ``role``."""
        return "\n".join(message.text for message in self.messages if message.role == role)


class ToolUse(BaseModel):
    """One call of a tool by name, with its arguments as JSON values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Step(BaseModel):
    """One completion: ``reasoning``, ``text``, then a call of ``tool`` (or several, ``calls``).

    Each part may be missing; an empty step is the end of the turn alone. Text is written as it is, and tags in it
    are tags, so a malformed call can be written as text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = ""
    tool: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    calls: tuple[ToolUse, ...] = ()
    reasoning: str = ""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.calls and self.tool is not None:
            raise ValueError("a step has `tool` or `calls`, not both")
        return self

    @property
    def tool_uses(self) -> tuple[ToolUse, ...]:
        return self.calls if self.tool is None else (ToolUse(tool=self.tool, arguments=self.arguments),)


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A call that fails with ``error`` after the first ``after`` tokens of ``step``; with None it sends nothing
    more and waits to be aborted."""

    error: TurnstileError | None
    step: Step = field(default_factory=Step)
    after: int = 0


Policy = Callable[[PolicyInput], Step | FailedStep]


class WatchedPolicy:
    """A ``Policy`` that notes the tools that its calls offered."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.offered: set[str] = set()
        """Names, as the model sees them."""

    def __call__(self, call: PolicyInput) -> Step | FailedStep:
        self.offered.update(call.tools)
        return self._policy(call)
