"""Scripted policies: plain functions that stand in for a model, and the chat format that they read and write.

A policy takes a ``PolicyInput`` (one model call) and returns a ``Step`` (one completion). ``ChatFormat`` reads the
input off the prompt's ids and writes the step as ids. A message begins where the control token stands that opens
it, so no text in a message can pose as a message. Tools are listed between ``<tools>`` tags and called as JSON
between ``<tool_call>`` tags (Hermes, as in Qwen's templates); other formats are refused. All work is linear in the
prompt, and nothing is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnstile.models import Message, Tool
from turnstile_server.errors import InvalidRequest, StartupError, TurnstileError
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.tags import find_tags
from turnstile_server.rendering.vocabulary import Vocabulary

TOOLS_OPEN = "<tools>\n"
TOOLS_CLOSE = "\n</tools>"
CALL_OPEN = "<tool_call>"
CALL = CALL_OPEN + "\n{call}\n</tool_call>"
INSTEAD = "Leave out --model, which takes a tokenizer and template that work, or take any Qwen3's"
PROBE = Tool(
    name="probe",
    spec={
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    },
)
"""Rendered once, to see whether the tools of a prompt can be read back from it."""


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

    def text_of(self, role: str) -> str:
        """All messages of ``role``."""
        return "\n".join(message.text for message in self.messages if message.role == role)

    @property
    def calls_made(self) -> int:
        """Tool calls in the model's earlier turns. More reliable than ``turn``, because some agents split a turn
        in two or leave one out."""
        return self.text_of(self.own_role).count(CALL_OPEN)


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


class ChatFormat:
    """Reads prompts and writes completions in the format of one chat template.

    ``decode(ids)`` gives text with control tokens. ``encode(text)`` gives the ids of a completion with its closing
    token; it recognises control tokens. ``prompt`` is the ids of any prompt that has a user message and ends where
    the model's turn begins. ``control`` is the id of every control token by its text. ``thinking`` is the pair of
    tags around reasoning, if the model has them. Raises ValueError if no control token opens messages.
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
        """The call whose prompt is ``ids``."""
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

    def write(self, step: Step, call: PolicyInput) -> list[int]:
        """The ids of the completion ``step`` of ``call``; they end the model's turn."""
        parts = [step.text] if step.text else []
        for use in step.tool_uses:
            text = json.dumps({"name": use.tool, "arguments": use.arguments}, ensure_ascii=False)
            if any(token in text for token in self._control):
                text = text.replace("<", "\\u003c")  # the same JSON, without the tokens
            parts.append(CALL.format(call=text))
        return list(self._encode(self._thought(step.reasoning, call.prompt) + "\n".join(parts)))

    def _thought(self, reasoning: str, prompt: str) -> str:
        if self._thinking is None:
            return f"{reasoning}\n\n" if reasoning else ""
        opening, closing = self._thinking
        if prompt.rstrip().endswith(opening):  # the template has opened the thinking already
            return f"{reasoning}\n{closing}\n\n"
        return f"{opening}\n{reasoning}\n{closing}\n\n" if reasoning else ""


def listed_tools(system: str) -> dict[str, Mapping[str, Any]]:
    """The tools that a system message lists by name, one JSON object per line. The last list counts, because the
    template writes it after the caller's text."""
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


def chat_format(vocabulary: Vocabulary, renderer: Renderer) -> ChatFormat:
    """The chat format of a model folder. Raises StartupError if its template shows tools, or calls, in a form that
    a scripted policy cannot read or write."""
    if renderer.report.call_format != "hermes":
        raise StartupError(
            "a scripted policy writes tool calls as JSON between <tool_call> tags; the chat template of "
            f"{vocabulary.path} has another form. {INSTEAD}"
        )
    chat = _format(vocabulary, renderer)
    try:
        shown = chat.read(renderer.render([Message(role="user", content="x")], [PROBE]).ids.tolist()).tools
    except InvalidRequest as error:
        raise StartupError(f"the chat template of {vocabulary.path} shows no tools: {error.message}") from error
    if shown != {PROBE.name: PROBE.spec["function"]}:
        raise StartupError(
            "a scripted policy reads the tools as JSON, one a line, between <tools> tags; the chat template of "
            f"{vocabulary.path} shows them in another form. {INSTEAD}"
        )
    return chat


def _format(vocabulary: Vocabulary, renderer: Renderer) -> ChatFormat:
    think = find_tags(vocabulary, None).think
    try:
        return ChatFormat(
            renderer.decode,
            lambda text: renderer.encode_completion(text).tolist(),
            prompt=renderer.render([Message(role="user", content="x")], []).ids.tolist(),
            control={token.text: token.id for token in vocabulary.control},
            thinking=think,
        )
    except ValueError as error:
        raise StartupError(f"{vocabulary.path}: {error}") from error
