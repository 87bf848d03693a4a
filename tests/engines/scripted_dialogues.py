"""A scripted agent and its dialogues, with the clients of OpenAI and Anthropic: the same on any engine.

What the agent sends back is what it got, so the tree of an episode has the same shape whatever is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
from conversation import collect, whole

from turnstile_server.demo.errands import Errand

ERRAND = Errand(2, ("zabu", "mopi"), (("tanu", "1130"), ("kora", "4827")), "kora", "lemi")
SYSTEM = "You are an agent that works in a folder of files."
HELPER = "You are a helper. Answer in one line."
TOOLS = {
    "read_file": ("Reads a file.", ("path",)),
    "write_file": ("Writes a file.", ("path", "content")),
}
TOKENS, FEW = 48, 3
"""Most tokens of a reply, and of one that is to be cut."""
STOPS = ("path", ".")
"""The first is in the policy's tool calls, and the other ends its sentences."""

Message = dict[str, Any]


@dataclass
class Said:
    """A message of a history. ``turn``: the call whose reply it is; None for what the agent wrote."""

    message: Message
    turn: int | None = None


@dataclass
class Dialogue:
    """What a scripted agent did in one episode, call by call."""

    carried: list[tuple[int, ...]] = field(default_factory=list)
    """Of each call, those whose replies it sent back."""
    finishes: list[str] = field(default_factory=list)
    """As the agent was told."""
    most: list[int] = field(default_factory=list)
    """Tokens that each call asked for."""

    def note(self, history: list[Said], finish: str, most: int) -> int:
        self.most.append(most)
        self.carried.append(tuple(said.turn for said in history if said.turn is not None))
        self.finishes.append(finish)
        return len(self.finishes) - 1


def schema(fields: tuple[str, ...]) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in fields}
    return {"type": "object", "properties": properties, "required": list(fields)}


@dataclass
class ChatAgent:
    model: openai.AsyncOpenAI
    dialogue: Dialogue = field(default_factory=Dialogue)

    async def ask(
        self, history: list[Said], *, stream: bool = False, tools: bool = True, tokens: int = TOKENS, **fields: Any
    ) -> Said:
        body: dict[str, Any] = {"model": "m", "messages": [said.message for said in history], **fields}
        body |= {"max_tokens": tokens, "stream": stream}
        if tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {"name": name, "description": about, "parameters": schema(fields)},
                }
                for name, (about, fields) in TOOLS.items()
            ]
        reply = await self.model.chat.completions.create(**body)
        heard = await collect(reply) if stream else whole(reply)
        message: Message = {"role": "assistant", "content": heard["content"]}
        if heard["reasoning"]:
            message["reasoning_content"] = heard["reasoning"]
        if heard["calls"]:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {key: call[key] for key in ("name", "arguments")},
                }
                for call in heard["calls"]
            ]
        return Said(message, self.dialogue.note(history, heard["finish"], tokens))


def user(text: str) -> Said:
    return Said({"role": "user", "content": text})


def results(reply: Said, text: str) -> list[Said]:
    """The result of each call of ``reply``; a reply without calls is answered by the user."""
    calls = reply.message.get("tool_calls", [])
    said = [Said({"role": "tool", "tool_call_id": call["id"], "content": text}) for call in calls]
    return said or [user(text)]


async def play_chat(agent: ChatAgent) -> None:
    """An errand with tools, a sub-agent beside it, edits, a retry, a stop string, a cut, and going on."""
    start = [Said({"role": "system", "content": SYSTEM}), user(ERRAND.instruction)]
    first = await agent.ask(start)
    one = [*start, first, *results(first, "see mopi.txt\n")]
    second = await agent.ask(one, stream=True)
    two = [*one, second, *results(second, "tanu1130\nkora4827\n")]

    helper = [Said({"role": "system", "content": HELPER}), user("Where does zabu.txt point?")]
    helped = await agent.ask(helper, stream=True, tools=False)

    third = await agent.ask(two)
    three = [*two, third, *results(third, "done\n")]
    more = [*helper, helped, user("And mopi.txt?")]
    await agent.ask(more, tools=False)
    again = await agent.ask(more, tools=False)  # the same request once more: a sibling
    await agent.ask([*more, again, user("Thank you.")], tools=False, stream=True)

    edited = [*start, first, *results(first, "see lemi.txt\n"), *two[len(one) :]]
    await agent.ask(edited)
    other = Said({"role": "assistant", "content": "I read it already: see mopi.txt"}, None)
    await agent.ask([*start, other, user("Go on.")], stream=True)
    await agent.ask(two[: len(start)])  # its first request again, long after
    await agent.ask(three, tools=False)

    cut = await agent.ask([*three, user("Tell me everything.")], tokens=FEW)
    await agent.ask([*three, user("Tell me everything."), cut, user("Go on.")], stream=True)
    stopped = await agent.ask([*three, user("Spell it.")], stop=STOPS[0], stream=True)
    await agent.ask([*three, user("Spell it."), stopped, user("Go on.")], stop=STOPS)


@dataclass
class AnthropicAgent:
    model: anthropic.AsyncAnthropic
    dialogue: Dialogue = field(default_factory=Dialogue)

    async def ask(
        self,
        history: list[Said],
        *,
        stream: bool = False,
        tokens: int = TOKENS,
        system: str = SYSTEM,
        **extra: Any,
    ) -> Said:
        body: dict[str, Any] = {"model": "m", "messages": [said.message for said in history], "system": system}
        body |= {"max_tokens": tokens, **extra}
        body["tools"] = [
            {"name": name, "description": about, "input_schema": schema(fields)}
            for name, (about, fields) in TOOLS.items()
        ]
        if stream:
            async with self.model.messages.stream(**body) as events:
                reply = await events.get_final_message()
        else:
            reply = await self.model.messages.create(**body)
        content = [block.model_dump(exclude_none=True) for block in reply.content]
        assert reply.stop_reason is not None
        return Said(
            {"role": "assistant", "content": content}, self.dialogue.note(history, reply.stop_reason, tokens)
        )


def tool_results(reply: Said, text: str) -> list[Said]:
    used = [block for block in reply.message["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": block["id"], "content": text} for block in used]
    return [Said({"role": "user", "content": blocks})] if blocks else [user(text)]


async def play_anthropic(agent: AnthropicAgent) -> None:
    start = [user(ERRAND.instruction)]
    first = await agent.ask(start, stream=True)
    one = [*start, first, *tool_results(first, "see mopi.txt\n")]
    second = await agent.ask(one)
    two = [*one, second, *tool_results(second, "tanu1130\nkora4827\n")]
    await agent.ask([user("Where does zabu.txt point?")], system=HELPER)
    await agent.ask(two, stream=True)
    await agent.ask(two, stream=True)
    await agent.ask([*start, first, *tool_results(first, "see lemi.txt\n"), *two[len(one) :]])
    await agent.ask(two, tokens=FEW)
    await agent.ask(two, stop_sequences=list(STOPS), stream=True)


NEW, EDITED, REPLY, TOOLS_CHANGED = "new_conversation", "history_edited", "reply_edited", "tools_changed"
CHAT_SHAPE = (
    *((None, None), (0, None), (None, NEW), (1, None)),
    *((2, None), (2, None), (5, None)),
    *((0, EDITED), (None, REPLY), (None, None), (None, TOOLS_CHANGED)),
    *((3, None), (11, None), (3, None), (13, None)),
)
ANTHROPIC_SHAPE = (
    *((None, None), (0, None), (None, NEW), (1, None), (1, None)),
    *((0, EDITED), (1, None), (1, None)),
)
SHAPES = (CHAT_SHAPE, ANTHROPIC_SHAPE)
"""Of each turn of a dialogue: the number of its parent, and its break."""
