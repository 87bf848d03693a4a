"""A mock engine that solves the benchmark's task in three turns, from prepared replies. Run as a process.

    python -m episodes_parts.engine MODEL PORT [SECONDS]

Each reply takes so many seconds (0). It speaks SGLang's ``/generate``, unstreamed and streamed. Which turn a call
is, it sees from the headers of assistant messages in its prompt. ``POST /hold`` makes the calls that follow wait,
``POST /release`` answers them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

CONTEXT = 4096
HEADER = "<|im_start|>assistant\n"
END = "<|im_end|>"


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TURNS = (
    _call("edit_file", path="answer.py", old="41", new="42"),
    _call("bash", command="cat answer.py"),
    "It is done.",
)
TEST = """
import unittest, answer
class T(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(answer.ANSWER, 42)
"""
TASK: dict[str, Any] = {
    "instruction": "Make ANSWER 42.",
    "base": {"inline": {"answer.py": "ANSWER = 41\n"}},
    "tests": {"files": {"inline": {"test_answer.py": TEST}}, "expected": ["test_answer.T.test_answer"]},
}
"""What the turns solve."""


class Engine:
    def __init__(self, model: Path, reply_s: float = 0.0) -> None:
        self._reply_s = reply_s
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer = tokenizer
        self._header = tokenizer.encode(HEADER, add_special_tokens=False).ids
        end = tokenizer.token_to_id(END)
        self._replies = [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in TURNS]
        self._texts = TURNS
        self._open = asyncio.Event()
        self._open.set()
        self._about = {"model_path": str(model), "served_model_name": "tiny", "weight_version": "1"}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/hold", self.hold)
        app.router.add_post("/release", self.release)
        fixed: dict[str, Any] = {
            "/model_info": self._about,
            "/server_info": {"max_req_input_len": CONTEXT - 6},
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": CONTEXT}]},
        }
        for path, value in fixed.items():
            app.router.add_get(path, self._fixed(value))
        for path in ("/health", "/abort_request"):
            app.router.add_route("*", path, self._fixed({}))
        return app

    @staticmethod
    def _fixed(value: Any) -> Any:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response(value)

        return answer

    async def tokenize(self, request: web.Request) -> web.Response:
        texts = (await request.json())["prompt"]
        return web.json_response(
            {"tokens": [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]}
        )

    async def hold(self, _: web.Request) -> web.Response:
        self._open.clear()
        return web.json_response({})

    async def release(self, _: web.Request) -> web.Response:
        self._open.set()
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self._open.wait()
        await asyncio.sleep(self._reply_s)
        prompt = body["input_ids"]
        width = len(self._header)
        turn = sum(prompt[at : at + width] == self._header for at in range(len(prompt) - width + 1))
        at = min(max(turn, 1), len(self._replies)) - 1
        ids = self._replies[at]
        whole = {
            "text": self._texts[at],
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "output_token_logprobs": [[-0.5, index, None] for index in ids],
                "weight_version": "1",
            },
        }
        if not body.get("stream"):
            return web.json_response(whole)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode())
        return answer


async def serve(model: Path, port: int, reply_s: float = 0.0) -> None:
    runner = web.AppRunner(Engine(model, reply_s).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])))
