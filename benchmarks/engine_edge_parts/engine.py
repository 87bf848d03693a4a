"""A mock of SGLang whose first token has a known time: it runs in the benchmark's own process, on its clock.

A call waits ``WAIT_S`` (and a random part of it more, so that calls do not come in step), then gets ``TOKENS``
tokens, one event each ``GAP_S``. The first one's text is ``marker``, which nothing else in a reply is. The episode
of a call is in SGLang's routing header, so that an agent finds the time of its own call.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web
from tokenizers import Tokenizer

WAIT_S: Final = 0.02
GAP_S: Final = 0.03
TOKENS: Final = 30
CONTEXT: Final = 1 << 15
ROUTING_HEADER: Final = "X-SMG-Routing-Key"


class TimedEngine:
    """``first_token``: when the first token of an episode's latest call was written (``time.perf_counter``)."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.marker = "import"
        self._ids = self._tokenizer.encode(self.marker, add_special_tokens=False).ids[:1]
        if self._tokenizer.decode(self._ids) != self.marker:
            raise SystemExit(f"{self.marker!r} is not one token of {model}: the first token cannot be recognised")
        self._ids += self._tokenizer.encode(" and then" * TOKENS, add_special_tokens=False).ids[: TOKENS - 1]
        self.wire_marker = f"[-0.5,{self._ids[0]},"
        """The first token in the engine's own answer."""
        self.first_token: dict[str, float] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, port: int) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post("/generate", self._generate), web.post("/tokenize", self._tokenize)])
        about = {"model_path": str(self._model), "served_model_name": "tiny", "weight_version": "1"}
        for path, value in {
            "/model_info": about,
            "/server_info": {"max_req_input_len": CONTEXT - 6},
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": CONTEXT}]},
        }.items():
            app.add_routes([web.get(path, _fixed(value))])
        app.add_routes([web.post("/abort_request", _fixed({}))])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _tokenize(self, request: web.Request) -> web.Response:
        texts = (await request.json())["prompt"]
        ids = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return web.json_response({"tokens": ids})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        await asyncio.sleep(WAIT_S * (1 + random.random()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for count in range(1, len(self._ids) + 1):
            event = b"data: " + orjson.dumps(self._event(body["rid"], count)) + b"\n\n"
            if count == 1:
                self.first_token[request.headers[ROUTING_HEADER]] = time.perf_counter()
            await response.write(event)
            await asyncio.sleep(GAP_S)
        with suppress(ConnectionResetError):  # the gate had all tokens, and need not wait for this
            await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, rid: str, count: int) -> dict[str, Any]:
        ids = self._ids[:count]
        done = count == len(self._ids)
        meta = {
            "id": rid,
            "finish_reason": {"type": "length", "length": count} if done else None,
            "prompt_tokens": 1,
            "completion_tokens": count,
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "1",
        }
        return {"output_ids": ids, "meta_info": meta}


def _fixed(value: dict[str, Any]) -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(value)

    return answer
