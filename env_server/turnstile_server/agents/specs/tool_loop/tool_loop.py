"""A tool-calling agent on about one screen: the official `openai` and `mcp` packages and a loop.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… TOOL_URL=… python3 tool_loop.py INSTRUCTION_FILE [--stream]

It offers the model the tools of one MCP server and does what the model calls, one call after another, until the
model answers without a call, calls `submit`, or has had its turns. Where a simulated user answers `submit`, an
answer without a call is what the model says to the user, and it goes on until the conversation is over. The agent
prints one line of JSON per turn, and its exit code says how it ended (see `Ending`).
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx2
import mcp
import openai
from mcp.client.streamable_http import streamable_http_client

SYSTEM = (
    "You solve the user's task with the tools you are given. When you are done, answer without calling a tool."
)
OVER_A_LIMIT = ("context_length_exceeded", "budget_exhausted")


class Ending(enum.IntEnum):
    """Exit codes. 1 and 2 are Python's own: a crash, a wrong command line."""

    FINISHED = 0
    """The model answered without calling a tool, or handed in its answer with `submit` and nobody replied."""
    REFUSED = 3
    """The API refused the call for good: a bad key, an episode that is over, a request it does not serve."""
    API_FAILED = 4
    """The API failed, after the retries that were asked for."""
    LIMIT = 5
    """The turns, the model's context or its budget are used up."""
    TOOLS_FAILED = 6
    """The tool server cannot be reached or does not answer. (A tool that fails is the model's affair.)"""


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201 - standard output is how an agent tells what it does


async def ask(api: openai.AsyncOpenAI, request: dict[str, Any], stream: bool) -> dict[str, Any]:
    """One model call. Returns the reply as the message to append to the history. Raises openai.APIError."""
    if stream:
        async with api.chat.completions.stream(**request) as events:
            async for _ in events:
                pass  # an interactive agent would show the text as it comes
            message = events.current_completion_snapshot.choices[0].message
    else:
        message = (await api.chat.completions.create(**request)).choices[0].message
    reply: dict[str, Any] = {"role": "assistant", "content": message.content}
    if reasoning := (message.model_extra or {}).get("reasoning_content"):
        reply["reasoning_content"] = reasoning
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    if calls:
        functions = [{"name": call.function.name, "arguments": call.function.arguments} for call in calls]
        reply["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return reply


async def use(tools: mcp.Client, function: dict[str, str]) -> tuple[str, bool]:
    """One tool call: what the model is told, and whether it did what was asked and nobody replied to it (as a
    simulated user does to `submit`). Raises mcp.MCPError and httpx2.HTTPError when the tool server does not
    answer."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"Error: the arguments are not JSON: {error}", False
    if not isinstance(arguments, dict):
        return "Error: the arguments are not a JSON object", False
    result = await tools.call_tool(function["name"], arguments)
    text = "\n".join(part.text for part in result.content if part.type == "text")
    replied = (result.structured_content or {}).get("user") is not None
    return (f"Error: {text}" if result.is_error else text), not result.is_error and not replied


async def say_to_user(tools: mcp.Client, text: str) -> str | None:
    """What the simulated user replies; None: the conversation is over, or cannot go on. Raises as ``use``."""
    result = await tools.call_tool("submit", {"answer": text})
    said: str | None = (result.structured_content or {}).get("user")
    return said


async def loop(api: openai.AsyncOpenAI, tools: mcp.Client, options: argparse.Namespace) -> Ending:
    found = (await tools.list_tools()).tools
    results = {tool.name: (tool.output_schema or {}).get("properties", {}) for tool in found}
    has_user = "user" in results.get("submit", {})
    offered = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in found
    ]
    task = options.instruction.read_text("utf-8")
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for turn in range(1, options.max_turns + 1):
        request = {"model": options.model, "messages": messages, "tools": offered}
        reply = await ask(api, request, options.stream)
        messages.append(reply)
        calls = reply.get("tool_calls", [])
        names = [call["function"]["name"] for call in calls]
        say(turn=turn, characters=len(reply["content"] or ""), calls=names)
        handed_in = False
        for call in calls:
            text, done = await use(tools, call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            handed_in = handed_in or (done and call["function"]["name"] == "submit")
        if not calls and has_user and (said := await say_to_user(tools, reply["content"] or "")) is not None:
            messages.append({"role": "user", "content": said})
        elif handed_in or not calls:
            return Ending.FINISHED
    return Ending.LIMIT


def ending_of(error: Exception) -> Ending:
    """How the agent ends after an error of one of its two servers."""
    match error:
        case openai.RateLimitError() | openai.InternalServerError() | openai.APIConnectionError():
            return Ending.API_FAILED
        case openai.APIStatusError():
            return Ending.LIMIT if error.code in OVER_A_LIMIT else Ending.REFUSED
        case openai.APIError():
            return Ending.API_FAILED
        case _:
            return Ending.TOOLS_FAILED


async def play(options: argparse.Namespace) -> Ending:
    key, url = os.environ["OPENAI_API_KEY"], os.environ["TOOL_URL"]
    ending, message = Ending.FINISHED, ""
    try:
        # The tools' key is the model's. A command may be silent for long; the server sends pings meanwhile.
        async with (
            openai.AsyncOpenAI(max_retries=options.retries) as api,
            httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as http,
            mcp.Client(streamable_http_client(url, http_client=http)) as tools,
        ):
            ending = await loop(api, tools, options)
    except* (openai.APIError, mcp.MCPError, httpx2.HTTPError) as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):  # the MCP client's tasks wrap what passes through them
            error = error.exceptions[0]
        assert isinstance(error, Exception)
        ending, message = ending_of(error), str(error)
    say(ending=ending.name.lower(), message=message)
    return ending


def main() -> Ending:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("instruction", type=Path, help="file with the task, in the user's words")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "policy"))
    parser.add_argument("--stream", action="store_true", help="use streamed model calls")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--retries", type=int, default=2, help="of a failed model call, by the openai package")
    return asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
