"""An agent that asks its model once and hands in what it says. Standard library only.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… TOOL_URL=… python one_answer.py "What is 6 * 7?"

The smallest agent there is that can be graded: one call of the model door, one `submit` at the tool door. `play`
runs it as a process, for an external episode of a task with an `instruction`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from typing import Any

from local import stopped_at_exit

MCP = "2026-07-28"
META = {"io.modelcontextprotocol/protocolVersion": MCP, "io.modelcontextprotocol/clientCapabilities": {}}


def post(url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    request.add_header("content-type", "application/json")
    request.add_header("accept", "application/json, text/event-stream")
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read().decode()
    said: dict[str, Any] = json.loads(
        text.rpartition("\ndata:")[2] if text.startswith(("event:", "data:")) else text
    )
    return said


def main() -> None:
    question = {"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]}
    said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", question)
    answer = said["choices"][0]["message"]["content"] or ""
    params = {"name": "submit", "arguments": {"answer": answer}, "_meta": META}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {"mcp_protocol_version": MCP, "mcp_method": "tools/call", "mcp_name": "submit"}
    handed_in = post(os.environ["TOOL_URL"], call, **headers)
    if "error" in handed_in:
        raise SystemExit(handed_in["error"]["message"])


async def play(episode: Any) -> None:
    """The agent of a rollout, as `Client.rollouts` and its exporters take one. Raises RuntimeError if it fails."""
    asked = (await episode.status()).task.instruction
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, asked),
        env={
            **os.environ,
            "OPENAI_BASE_URL": f"{episode.model_url}/v1",
            "OPENAI_API_KEY": episode.episode_key,
            "TOOL_URL": episode.tool_url,
        },
        stdin=asyncio.subprocess.DEVNULL,
    )
    async with stopped_at_exit(process):
        if await process.wait() != 0:
            raise RuntimeError(f"the agent exited with {process.returncode}")


if __name__ == "__main__":
    main()
