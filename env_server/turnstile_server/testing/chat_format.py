"""The chat format that scripted policies read and write: that of any model folder whose template takes tools.

Where messages begin is learned from short conversations that the renderer renders. A message begins where the
control token stands that opens it, so no text in a message can pose as a message. Calls are written as the
template writes them in a history. All work is linear in the prompt, and nothing is sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from typing import Final

import numpy as np

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest, StartupError
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.tags import find_tags
from turnstile_server.rendering.vocabulary import Vocabulary
from turnstile_server.testing.policy import PolicyInput, PromptMessage, Step
from turnstile_server.testing.shown_tools import WAYS, ShownTools

OWN_ROLE: Final = "assistant"
_TAIL = 64
"""Ids in which a prompt may have opened thinking: see ``Renderer.parser``."""
_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
PROBE = Tool(
    "probe", {"type": "function", "function": {"name": "probe", "description": "A tool.", "parameters": _SCHEMA}}
)
"""Rendered once, to see whether the tools of a prompt can be read back from it."""
_ASKS, _SAYS, _MORE = Message("user", "probeasks"), Message(OWN_ROLE, "probesays"), Message("user", "probemore")
_CALL = Message(OWN_ROLE, "", tool_calls=(ToolCall("probe", '{"command": "probecommand"}', "call_0"),))
_RESULT = Message("tool", "proberesult", tool_call_id="call_0")


class ChatFormat:
    """Reads prompts and writes completions in the format of one model folder.

    Raises StartupError where its template opens messages with no control token, or shows tools, or writes calls,
    in no way that can be read back.
    """

    def __init__(self, vocabulary: Vocabulary, renderer: Renderer) -> None:
        self._renderer = renderer
        self._control = {token.id: token.text for token in vocabulary.control}
        self._close = renderer.decode(renderer.encode_completion("")[-1:])
        self._stand_ins: dict[int, str] = {}
        try:
            renderer.check_tools([PROBE])
            self._thinking = find_tags(vocabulary, None, self.decode(self._rendered(_ASKS))).think
            self._learn_messages()
            self._learn_calls()
            self._tools, self._first_only = self._learn_tools()
            self._check()
        except InvalidRequest as error:
            raise StartupError(
                f"a scripted policy cannot play the model of {vocabulary.path}: {error.message}. Leave out "
                "--model, which takes a tokenizer and template that work"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """All ids as text, control tokens included."""
        return self._renderer.decode(ids)

    def _learn_messages(self) -> None:
        """The control tokens that open messages, and the texts that open the user's and the model's own."""
        asked = self._marked(self._rendered(_ASKS))
        said = self._marked(self._rendered(_ASKS, _SAYS, _MORE))
        between = _between(said, _SAYS.content, _MORE.content)
        closing = self._controls(between)
        self._closers = frozenset(closing[:1] if len(closing) > 1 else ())
        users = _common_end(asked.partition(_ASKS.content)[0], between)
        own = _common_start(_between(said, _ASKS.content, _SAYS.content), asked.partition(_ASKS.content)[2])
        user_opener, self._user_opening = self._opening(users)
        own_opener, self._own_opening = self._opening(own)
        self._openers = {user_opener, own_opener}
        self._shared = frozenset({user_opener} if user_opener == own_opener else ())
        """The opener behind which the role stands in words."""
        self._framed = self.decode(self._reply(_SAYS, ())[:-1]).strip() != _SAYS.content
        """The template marks up text, too."""

    def _learn_calls(self) -> None:
        """What opens a tool's result, and whether the model's turn goes on behind it."""
        call = self._reply(_CALL, [PROBE])
        if not self._calls_in(call, (PROBE,), prompt=()):
            raise InvalidRequest("the chat template writes no calls that can be read")
        self._says_before = self._calls_in([*self._ids("I look.\n", close=False), *call], (PROBE,), prompt=()) > 0
        """A call is one behind text, too."""
        text = self._marked(self._rendered(_ASKS, _CALL, _RESULT, tools=[PROBE]))
        controls = self._controls(_between(text, "probecommand", _RESULT.content))
        if not self._openers & set(controls):
            ends = [place for place, index in enumerate(controls) if index in self._closers]
            self._openers |= set(controls[ends[0] + 1 :][:1] if ends else controls[-1:])
        self._goes_on = self._own_opening not in self._literal(text.partition(_RESULT.content)[2])

    def _learn_tools(self) -> tuple[Callable[[str], ShownTools], bool]:
        """How the template shows tools, and whether they stand in the first message alone."""
        shown = [self._shown(piece) for piece in self._pieces(self._rendered(_ASKS, tools=[PROBE]))]
        for first_only in (True, False):
            text = _offering(shown, first_only=first_only)
            for way in WAYS:
                found = way(text).get(PROBE.name, {})
                if "command" in found.get("parameters", {}).get("properties", ()):
                    return way, first_only
        raise InvalidRequest("the chat template shows tools in no way that can be read")

    def _check(self) -> None:
        """A dialogue whose calls were miscounted would never end."""
        for messages, count in (((_ASKS,), 0), ((_ASKS, _CALL, _RESULT), 1)):
            found = self.read(self._rendered(*messages, tools=[PROBE]))
            if (found.turn, found.calls_made) != (count, count):
                raise InvalidRequest("the messages that the chat template writes cannot be told apart")

    def read(self, ids: Sequence[int], *, episode_id: str = "", call_id: str = "") -> PolicyInput:
        """The call whose prompt is ``ids``."""
        pieces = self._pieces(ids)
        shown = [self._shown(piece) for piece in pieces]
        own = [message.role == OWN_ROLE for message in shown]
        tools = self._tools(_offering(shown, first_only=self._first_only))
        turn = sum(mine and not before for mine, before in zip(own, [False, *own], strict=False))
        if self._goes_on:
            turn += sum(message.role == "tool" for message in shown)
        return PolicyInput(
            prompt=self.decode(ids),
            turn=turn - bool(turn),
            tools=tools,
            messages=tuple(shown[:-1] if own[-1:] == [True] and not self._goes_on else shown),
            own_role=OWN_ROLE,
            episode_id=episode_id,
            call_id=call_id,
            calls_made=self._calls_made(pieces, shown, _offered(tools)),
        )

    def _calls_made(
        self, pieces: Sequence[Sequence[int]], shown: Sequence[PromptMessage], tools: Sequence[Tool]
    ) -> int:
        made = 0
        before: Sequence[int] = ()
        own: list[int] = []
        for piece, message in zip([*pieces, ()], [*shown, PromptMessage("", "")], strict=True):
            if own and self._goes_on and message.role == "tool":
                own += piece
                continue
            if own:
                length = self._opening_length(own)
                made += self._calls_in(own[length:], tools, prompt=[*before, *own[:length]])
                before, own = own, []
            if message.role == OWN_ROLE:
                own = [*piece]
            else:
                before = piece
        return made

    def _calls_in(self, ids: Sequence[int], tools: Sequence[Tool], *, prompt: Sequence[int]) -> int:
        parser = self._renderer.parser(tools or [PROBE], prompt_tail=np.array(prompt[-_TAIL:], dtype=np.int32))
        parser.feed(ids)
        return len(parser.finish()[1].message.tool_calls)

    def _opening_length(self, piece: Sequence[int]) -> int:
        """The ids of the opening of the model's own message."""
        ends = range(1, len(piece) + 1)
        return next((end for end in ends if self.decode(piece[:end]).startswith(self._own_opening)), 0)

    def _pieces(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """The ids of each message. What stands before the first opening is one, but for tokens that begin every
        prompt."""
        starts = [index for index, token in enumerate(ids) if token in self._openers]
        if not starts:
            return []
        pieces = [ids[start:end] for start, end in pairwise([0, *starts, len(ids)]) if start < end]
        if pieces and pieces[0][0] not in self._openers and all(token in self._control for token in pieces[0]):
            return pieces[1:]
        return pieces

    def _shown(self, piece: Sequence[int]) -> PromptMessage:
        text = self.decode(piece)
        for role, opening in ((OWN_ROLE, self._own_opening), ("user", self._user_opening)):
            if text.startswith(opening):
                return PromptMessage(role, self._trimmed(text.removeprefix(opening)))
        if piece[0] not in self._openers:
            return PromptMessage("system", self._trimmed(text))
        text = text.removeprefix(self._control[piece[0]])
        named = re.match(r"([a-z]+)\n?", text) if piece[0] in self._shared else None
        if named is None:
            return PromptMessage("tool", self._trimmed(text))
        return PromptMessage(named[1], self._trimmed(text[named.end() :]))

    def _trimmed(self, text: str) -> str:
        body = text.rstrip("\n")
        for close in (self._close, *(self._control[index] for index in self._closers)):
            if body.endswith(close):
                return body.removesuffix(close)
        return text

    def write(self, step: Step, call: PolicyInput) -> list[int]:
        """The ids of the completion ``step`` of ``call``; they end the model's turn."""
        said = self._thought(step.reasoning, call.prompt) + step.text
        by_hand = any(literal in step.text for literal in self._control.values())
        if not step.tool_uses and (by_hand or not self._framed):
            return self._ids(said, close=True)
        calls = tuple(
            ToolCall(use.tool, json.dumps(use.arguments, ensure_ascii=False), f"call_{call.calls_made + index}")
            for index, use in enumerate(step.tool_uses)
        )
        tools = _offered(call.tools)
        if self._framed and not by_hand:
            closed = "" if step.reasoning else self._thought("", call.prompt)
            message = Message(OWN_ROLE, step.text, reasoning=step.reasoning or None, tool_calls=calls)
            return self._ids(closed, close=False) + self._reply(message, tools)
        written = self._reply(Message(OWN_ROLE, "", tool_calls=calls), tools)
        if not self._says_before:
            said = said.removesuffix(step.text)
        elif step.text:
            said += "\n"
        return self._ids(said, close=False) + written

    def _thought(self, reasoning: str, prompt: str) -> str:
        if self._thinking is None:
            return f"{reasoning}\n\n" if reasoning else ""
        opening, closing = self._thinking
        if prompt.rstrip().endswith(opening):  # the template has opened the thinking already
            return f"{reasoning}\n{closing}\n\n"
        return f"{opening}\n{reasoning}\n{closing}\n\n" if reasoning else ""

    def _reply(self, message: Message, tools: Sequence[Tool]) -> list[int]:
        return [int(index) for index in self._renderer.encode_reply(message, tools)]

    def _ids(self, text: str, *, close: bool) -> list[int]:
        return [int(index) for index in self._renderer.encode_completion(text, close=close)]

    def _rendered(self, *messages: Message, tools: Sequence[Tool] = ()) -> list[int]:
        return [int(index) for index in self._renderer.render(messages, tools).ids]

    def _marked(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` with one character for each control token, which no text has."""
        cuts = [place for place, index in enumerate(ids) if index in self._control]
        parts: list[str] = []
        for start, end in pairwise([-1, *cuts, len(ids)]):
            if start >= 0:
                parts.append(self._stand_ins.setdefault(ids[start], chr(0xD800 + len(self._stand_ins))))
            parts.append(self.decode(ids[start + 1 : end]))
        return "".join(parts)

    def _controls(self, marked: str) -> list[int]:
        of = {character: index for index, character in self._stand_ins.items()}
        return [of[character] for character in marked if character in of]

    def _literal(self, marked: str) -> str:
        for index, character in self._stand_ins.items():
            marked = marked.replace(character, self._control[index])
        return marked

    def _opening(self, marked: str) -> tuple[int, str]:
        """The control token that opens a message, and the text from it on. Raises InvalidRequest without one."""
        for index in self._controls(marked):
            if index not in self._closers:
                return index, self._literal(marked[marked.index(self._stand_ins[index]) :])
        raise InvalidRequest("the chat template opens its messages with no control token")


def _offering(messages: Sequence[PromptMessage], *, first_only: bool) -> str:
    """The text in which tools may be shown."""
    if first_only:
        return messages[0].text if messages else ""
    return "\n".join(message.text for message in messages if message.role not in (OWN_ROLE, "tool"))


def _offered(tools: ShownTools) -> list[Tool]:
    return [Tool(name, {"type": "function", "function": dict(tool)}) for name, tool in tools.items()]


def _between(text: str, first: str, last: str) -> str:
    return text.partition(first)[2].partition(last)[0]


def _common_start(first: str, second: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in same)


def _common_end(first: str, second: str) -> str:
    return _common_start(first[::-1], second[::-1])[::-1]
