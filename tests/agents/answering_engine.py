"""An engine that says what a test wants: SGLang's native interface, answers from a script.

The ids come from the model's real tokenizer and end with the end-of-turn token; the logprobs are made up, so
nothing that scores tokens again can be tested with it. One answer per call, in order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import AutoTokenizer

CHUNK_TOKENS = 4
CONTEXT_LENGTH = 8192


def tool_call(command: str, thought: str = "") -> str:
    """An answer that calls the tool ``bash``, in the format that the tiny model's chat template asks for."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{thought}\n<tool_call>\n{call}\n</tool_call>"


@dataclass
class AnsweringEngine:
    """``completions`` are the ids that were given, ``prompts`` the ids that came, one each per call."""

    url: str
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)


@asynccontextmanager
async def answering_engine(model: Path, answers: Sequence[str]) -> AsyncIterator[AnsweringEngine]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    script = iter(answers)
    engine = AnsweringEngine("")

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = [*tokenizer.encode(next(script), add_special_tokens=False), tokenizer.eos_token_id]
        assert len(ids) <= body["sampling_params"]["max_new_tokens"]
        engine.prompts.append(body["input_ids"])
        engine.completions.append(ids)
        if not body["stream"]:
            return web.json_response(reply(body, ids, tokenizer.eos_token_id))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for end in [*range(CHUNK_TOKENS, len(ids), CHUNK_TOKENS), len(ids)]:
            finish = tokenizer.eos_token_id if end == len(ids) else None
            await response.write(f"data: {json.dumps(reply(body, ids[:end], finish))}\n\n".encode())
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def tokenize(request: web.Request) -> web.Response:
        texts = (await request.json())["prompt"]
        return web.json_response({"tokens": [tokenizer.encode(text, add_special_tokens=False) for text in texts]})

    def fixed(value: dict[str, Any]) -> Any:
        async def handler(_: web.Request) -> web.Response:
            return web.json_response(value)

        return handler

    app = web.Application(client_max_size=64 << 20)
    about = {"model_path": str(model), "served_model_name": "scripted", "weight_version": "scripted-1"}
    app.router.add_get("/model_info", fixed(about))
    app.router.add_get("/server_info", fixed({"max_req_input_len": CONTEXT_LENGTH - 6}))
    app.router.add_get("/v1/models", fixed({"data": [{"id": "scripted", "max_model_len": CONTEXT_LENGTH}]}))
    app.router.add_get("/health", fixed({}))
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/abort_request", fixed({}))
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield engine
    finally:
        await runner.cleanup()


def reply(body: dict[str, Any], ids: list[int], matched: int | None) -> dict[str, Any]:
    """SGLang 0.5.23's reply to ``/generate`` with ``return_logprob``, cumulative where streamed."""
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": body["rid"],
            "finish_reason": None if matched is None else {"type": "stop", "matched": matched},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "scripted-1",
        },
    }
