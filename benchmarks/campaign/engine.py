"""An engine that keeps the truth: what it was fed and what it sampled, on disk before the first byte leaves.

    python -m campaign.engine MODEL PORT LOG SEED

It speaks what Turnstile uses of SGLang's interface. There is no model: a reply is a text with a mark of its own
(``[n:…]``), sometimes with thinking, a tool call or random ids, and each token has a random logprob, so that no
two generations are alike. One line of the log is one generation, written and synced before it is answered:

    {"mark", "rid", "episode", "fed", "fed_sha", "receipts", "ids", "logprobs", "text", "finish", "version"}

``fed_sha`` is the SHA-256 of the prompt's ids as little-endian int32. ``receipts`` are the ``(got MARK SHA)`` that
an agent wrote into the end of its prompt: so an agent's own log outlives its sandbox. A change of weights in the
middle of a reply is a line ``{"mark", "from", "version"}``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import sys
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

CONTEXT = 1 << 18
RECEIPT = re.compile(r"\(got ([0-9a-f]{12}) ([0-9a-f]{8})\)")
RECEIPT_TOKENS = 400
"""So many ids at the end of a prompt are read for receipts."""
WORDS = ("the", "gate", "keeps", "every", "token", "that", "is", "sampled", "and", "nothing", "else", "here")
CHUNK_TOKENS = (1, 12)
PAUSES_S = (0.0, 0.0, 0.002, 0.01, 0.03)
SLOW_PAUSE_S, SLOW_SHARE = 0.25, 0.05


@dataclass
class Generation:
    """What one call samples; decided, and on disk, before it is answered."""

    rid: str
    mark: str
    ids: list[int]
    logprobs: list[float]
    finish: dict[str, Any]
    spans: list[tuple[int, str]]
    """(start, version)"""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class TruthfulEngine:
    def __init__(self, model: Path, log: Path, seed: int) -> None:
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._ordinary = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
        self._stop = self._ordinary
        self._log = log.open("ab", buffering=0)
        self._log.write(b"\n")  # the engine before this one may have died in the middle of a line
        self._random = random.Random(seed)
        self._version = "w0"
        self._live: dict[str, Generation] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    def routes(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        about = self._answer
        app.router.add_get("/health", about(lambda: {}))
        app.router.add_get("/model_info", about(self._model_info))
        app.router.add_get("/server_info", about(lambda: {"max_req_input_len": CONTEXT - 6}))
        app.router.add_get("/v1/models", about(lambda: {"data": [{"id": "truth", "max_model_len": CONTEXT}]}))
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        return app

    @staticmethod
    def _answer(value: Any) -> Any:
        async def handler(_: web.Request) -> web.Response:
            return web.json_response(value())

        return handler

    def _model_info(self) -> dict[str, str]:
        return {"model_path": str(self._model), "served_model_name": "truth", "weight_version": self._version}

    async def _tokenize(self, request: web.Request) -> web.Response:
        texts = (await request.json())["prompt"]
        ids = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return web.json_response({"tokens": ids})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        for generation in [each for key, each in self._live.items() if key.startswith(rid)]:
            generation.aborted.set()
        return web.json_response({})

    async def _pause(self, _: web.Request) -> web.Response:
        self._resumed.clear()
        return web.json_response({})

    async def _continue(self, _: web.Request) -> web.Response:
        self._resumed.set()
        return web.json_response({})

    async def _update_weights(self, request: web.Request) -> web.Response:
        self._version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self._resumed.wait()
        generation = self._sampled(body, request.headers.get("X-SMG-Routing-Key", ""))
        self._live[generation.rid] = generation
        try:
            if body["stream"]:
                return await self._streamed(request, generation)
            return await self._unstreamed(generation)
        finally:
            self._live.pop(generation.rid, None)

    async def _streamed(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        incremental = self._random.random() < 0.5
        sent = 0
        async for upto, reason in self._steps(generation):
            start = sent if incremental else 0
            payload = self._payload(generation, start, upto, reason)
            await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")
            sent = upto
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _unstreamed(self, generation: Generation) -> web.Response:
        steps = [step async for step in self._steps(generation)]
        return web.json_response(self._payload(generation, 0, *steps[-1]))

    async def _steps(self, generation: Generation) -> AsyncIterator[tuple[int, dict[str, Any] | None]]:
        """(tokens so far, finish reason) at every step; the last one has a reason."""
        upto = 0
        pause_s = SLOW_PAUSE_S if self._random.random() < SLOW_SHARE else self._random.choice(PAUSES_S)
        while True:
            if pause_s:
                await asyncio.sleep(pause_s)
            await self._resumed.wait()
            if generation.aborted.is_set():
                yield upto, {"type": "abort", "message": "asked for"}
                return
            if generation.spans[-1][1] != self._version:
                generation.spans.append((upto, self._version))
                self._write({"mark": generation.mark, "from": upto, "version": self._version})
            upto = min(len(generation.ids), upto + self._random.randint(*CHUNK_TOKENS))
            if upto == len(generation.ids):
                yield upto, generation.finish
                return
            yield upto, None

    @staticmethod
    def _payload(generation: Generation, start: int, upto: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        ids = generation.ids[start:upto]
        pairs = zip(generation.logprobs[start:upto], ids, strict=True)
        ends = [*(at for at, _ in generation.spans[1:]), upto]
        spans = [
            {"version": version, "start": at, "end": end}
            for (at, version), end in zip(generation.spans, ends, strict=True)
            if end > at
        ]
        meta = {
            "id": generation.rid,
            "finish_reason": reason,
            "completion_tokens": upto,
            "cached_tokens": 0,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "weight_version": generation.spans[-1][1],
            "weight_versions": spans,
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _sampled(self, body: dict[str, Any], episode: str) -> Generation:
        fed, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        mark = os.urandom(6).hex()
        text, ids = self._reply(mark)
        finish: dict[str, Any] = {"type": "stop", "matched": self._stop}
        if len(ids) > wanted:
            ids, finish = ids[:wanted], {"type": "length", "length": wanted}
        logprobs = [-self._random.expovariate(1.0) - 1e-6 for _ in ids]
        tail = self._tokenizer.decode(fed[-RECEIPT_TOKENS:], skip_special_tokens=False)
        self._write(
            {
                "mark": mark,
                "rid": body["rid"],
                "episode": episode,
                "fed": len(fed),
                "fed_sha": hashlib.sha256(array("i", fed).tobytes()).hexdigest(),
                "receipts": RECEIPT.findall(tail),
                "ids": ids,
                "logprobs": logprobs,
                "text": text if finish["type"] == "stop" else None,
                "finish": finish["type"],
                "version": self._version,
            }
        )
        return Generation(body["rid"], mark, ids, logprobs, finish, [(0, self._version)])

    def _reply(self, mark: str) -> tuple[str | None, list[int]]:
        """(text that the agent must see, None where the ids are random; all ids)"""
        chance = self._random
        said = f"[n:{mark}] " + " ".join(chance.choices(WORDS, k=chance.randint(2, 25)))
        whole, kind = said, chance.random()
        if kind < 0.2:
            whole = f"<think>\n{' '.join(chance.choices(WORDS, k=6))}\n</think>\n\n{said}"
        elif kind < 0.5:
            call = json.dumps({"name": "note", "arguments": {"text": f"{mark} {chance.choice(WORDS)}"}})
            whole = f"{said}\n<tool_call>\n{call}\n</tool_call>"
        ids: list[int] = self._tokenizer.encode(whole, add_special_tokens=False).ids
        if kind > 0.9:
            ids += [chance.randrange(self._ordinary) for _ in range(chance.randint(1, 30))]
            return None, [*ids, self._stop]
        return said, [*ids, self._stop]

    def _write(self, line: dict[str, Any]) -> None:
        self._log.write(json.dumps(line).encode() + b"\n")
        os.fdatasync(self._log.fileno())


async def serve(model: Path, port: int, log: Path, seed: int) -> None:
    runner = web.AppRunner(TruthfulEngine(model, log, seed).routes(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
