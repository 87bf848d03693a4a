"""What a written policy sees of a call and what it says: prompts read, completions written. Pure.

A prompt is read off its ids: messages begin where the id stands that opens them, so no text in a message can pose
as one. Tools are listed between ``<tools>`` tags and called in the Hermes form (JSON between ``<tool_call>``
tags), as Qwen's templates and the tiny model's have it; a format that has no such tags is not for this module.
All work is linear in the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnstile_server.errors import TurnstileError

TOOLS_OPEN = "<tools>\n"
TOOLS_CLOSE = "\n</tools>"
CALL_OPEN = "<tool_call>"
CALL = CALL_OPEN + "\n{call}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """One message of a prompt as the template wrote it, without its frame: a reply's calls, the listed tools and
    the frames of tool results are part of ``text``."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """One call. ``prompt``: all of it as text, control tokens too. ``turn``: the model's earlier turns in it.
    ``tools``: by name, each ``{"name", "description", "parameters"}`` as the agent sent it."""

    prompt: str
    turn: int
    tools: Mapping[str, Mapping[str, Any]]
    messages: tuple[PromptMessage, ...] = ()
    """In order, without the one that is to be written."""
    own_role: str = "assistant"
    episode_id: str = ""
    call_id: str = ""

    def text_of(self, role: str) -> str:
        """All messages of ``role``."""
        return "\n".join(message.text for message in self.messages if message.role == role)

    @property
    def calls_made(self) -> int:
        """Tool calls in the model's earlier turns. Steadier than ``turn``: some agents split a turn in two, or
        leave one out."""
        return self.text_of(self.own_role).count(CALL_OPEN)


class ToolUse(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Step(BaseModel):
    """One completion: ``reasoning``, ``text``, then a call of ``tool`` (or several, ``calls``). Each may be
    missing; with nothing it is the end of the turn alone.

    Text stands as it is: tags in it are tags, so a malformed call is written as text.
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
    """A call that ends badly: after the first ``after`` tokens of ``step`` it fails with ``error``; with None it
    says no more and waits to be aborted."""

    error: TurnstileError | None
    step: Step = field(default_factory=Step)
    after: int = 0


Policy = Callable[[PolicyInput], Step | FailedStep]


class ChatFormat:
    """``prompt``: the ids of any prompt that has a user's message and ends where the model's turn begins.

    ``decode(ids)`` gives text with control tokens; ``encode(text)`` the ids of a completion, its close included,
    control tokens recognised. ``control``: id by text of every control token. ``thinking``: the tags around
    reasoning, if the model has them. Raises ValueError where messages are opened by no control token.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], Sequence[int]],
        *,
        prompt: Sequence[int],
        control: Mapping[str, int],
        thinking: tuple[str, str] | None = None,
    ) -> None:
        self.decode = decode
        self._encode = encode
        self._control: Collection[str] = tuple(control)
        self._thinking = thinking
        self._close = decode(list(encode(""))[-1:])
        known = frozenset(control.values())
        openers = [token for index, token in enumerate(prompt) if token in known and token in prompt[:index]]
        if not openers:
            raise ValueError("the chat template opens its messages with no control token")
        self._opener = openers[-1]

    def read(self, ids: Sequence[int], *, episode_id: str = "", call_id: str = "") -> PolicyInput:
        starts = [index for index, token in enumerate(ids) if token == self._opener]
        cuts = [0, *starts, len(ids)]
        pieces = [self.decode(ids[start:end]) for start, end in pairwise(cuts) if start < end]
        shown = [self._shown(piece) for piece in pieces[0 if starts[:1] == [0] else 1 :]]
        if not shown:
            return PolicyInput("".join(pieces), 0, {}, episode_id=episode_id, call_id=call_id)
        own = shown.pop()
        return PolicyInput(
            prompt="".join(pieces),
            turn=sum(message.role == own.role for message in shown),
            tools=listed_tools(shown[0].text) if shown else {},
            messages=tuple(shown),
            own_role=own.role,
            episode_id=episode_id,
            call_id=call_id,
        )

    def _shown(self, piece: str) -> PromptMessage:
        head, _, text = piece.removeprefix(self.decode([self._opener])).partition("\n")
        body = text.rstrip("\n")
        return PromptMessage(head.strip(), body.removesuffix(self._close) if body.endswith(self._close) else text)

    def write(self, step: Step, scene: PolicyInput) -> list[int]:
        """The ids of a completion that says ``step`` in ``scene`` and ends the model's turn."""
        parts = [step.text] if step.text else []
        for use in step.tool_uses:
            call = json.dumps({"name": use.tool, "arguments": use.arguments}, ensure_ascii=False)
            if any(token in call for token in self._control):
                call = call.replace("<", "\\u003c")  # the same JSON, without the tokens
            parts.append(CALL.format(call=call))
        return list(self._encode(self._thought(step.reasoning, scene.prompt) + "\n".join(parts)))

    def _thought(self, reasoning: str, prompt: str) -> str:
        if self._thinking is None:
            return f"{reasoning}\n\n" if reasoning else ""
        opening, closing = self._thinking
        if prompt.rstrip().endswith(opening):  # by the template: the turn begins within
            return f"{reasoning}\n{closing}\n\n"
        return f"{opening}\n{reasoning}\n{closing}\n\n" if reasoning else ""


def listed_tools(system: str) -> dict[str, Mapping[str, Any]]:
    """The tools that a system message lists, one JSON object per line; the last list counts, because the template
    writes it after the caller's text."""
    start = system.rfind(TOOLS_OPEN)
    if start < 0:
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for line in system[start + len(TOOLS_OPEN) :].partition(TOOLS_CLOSE)[0].split("\n"):
        try:
            tool = json.loads(line)
        except json.JSONDecodeError:
            continue
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found[function["name"]] = function
    return found
