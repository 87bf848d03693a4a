"""``agentcore-rl-toolkit``'s rollout gateway as a process. Run in the Python that the package is installed in.

    PYTHON -I agentcore_server.py ENGINE_URL MODEL PORT tree|linear

The gateway is a library: this starts it as its slime backend does (``SglangHttpBackend``, ``HfTemplateRenderer``,
``ThreadedGatewayServer``), in one of its two ways to keep a history. Two routes of the benchmark are added,
because its sessions are otherwise reached from Python only: ``GET /bench/sessions/ID`` ends a session and gives
its records, ``DELETE`` drops it. The model's chat template is none that the package knows, so it gets a parser for
tool calls, which is cheaper than the one that it has for the templates that it knows.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import Any

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, ThreadedGatewayServer
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.sglang_http import SglangHttpBackend
from aiohttp import web
from transformers import AutoTokenizer

HOST = "127.0.0.1"
END = "<|im_end|>"
CALL = re.compile(r"\s*<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def tool_calls(body: str, _: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], bool]:
    """(text, calls, ill-formed) of a reply in the tiny model's format."""
    calls = [json.loads(found) for found in CALL.findall(body)]
    return (
        CALL.sub("", body).removesuffix(END),
        [{"name": c["name"], "input": c["arguments"]} for c in calls],
        False,
    )


def gateway(engine_url: str, model: str, history_mode: str) -> RolloutGateway:
    tokenizer = AutoTokenizer.from_pretrained(model)
    renderer = HfTemplateRenderer(tokenizer, tool_parser=tool_calls)
    made = RolloutGateway(
        backend=SglangHttpBackend(engine_url), renderer=renderer, tokenizer=tokenizer, history_mode=history_mode
    )

    async def finish(request: web.Request) -> web.Response:
        records = await made.finish_session(request.match_info["sid"])
        fields = ("token_ids", "loss_mask", "logprobs", "metadata")
        return web.json_response([{name: getattr(record, name) for name in fields} for record in records])

    async def drop(request: web.Request) -> web.Response:
        await made.drop_session(request.match_info["sid"])
        return web.json_response({})

    made.app.router.add_get("/bench/sessions/{sid}", finish)
    made.app.router.add_delete("/bench/sessions/{sid}", drop)
    return made


if __name__ == "__main__":
    url, folder, port, mode = sys.argv[1:]
    ThreadedGatewayServer(gateway(url, folder, mode), host=HOST, port=int(port)).start()
    threading.Event().wait()
