"""The loop itself: the model calls tools, the agent runs them, until one of them has had enough.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

from .chat import Message, Model
from .ending import LIMIT, Ended, say
from .mcp_tools import Tools


def converse(model: Model, tools: Tools, messages: list[Message], max_turns: int) -> None:
    """Offers the model the tools and runs what it calls, one call after another, until it answers without a call,
    or calls `submit`. Where a simulated user answers `submit`, an answer without a call is what the model says to
    the user, and it goes on until the conversation is over. A line per turn. Raises Ended."""
    offered = tools.offered()
    for turn in range(1, max_turns + 1):
        reply = model.ask(messages, offered)
        messages.append(reply)
        calls = [call for call in reply.get("tool_calls", ()) if call["type"] == "function"]
        names = [call["function"]["name"] for call in calls]
        say(turn=turn, characters=len(reply.get("content") or ""), calls=names)
        handed_in = False
        for call in calls:
            text, done = tools.call(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            handed_in = handed_in or (done and call["function"]["name"] == "submit")
        if not calls and tools.has_user and (said := tools.say_to_user(reply.get("content") or "")) is not None:
            messages.append({"role": "user", "content": said})
        elif handed_in or not calls:
            return
    raise Ended(LIMIT, f"{max_turns} turns were had")
