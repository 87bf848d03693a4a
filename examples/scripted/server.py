"""SGLang's HTTP interface in front of a model, where a script chooses the tokens of some calls.

Invariants: chosen ids come with the log-probabilities that the served weights give them after this prompt, at
the call's temperature, under the version of those weights; no number is made up. A call that the policy leaves
alone, and every other request, reaches the model unchanged, and so does its answer.

The shapes are those of sglang 0.5.23 (``/generate``, chunks that repeat all output). The module owns the scripted
calls in flight.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from scripted.script import Policy
from turnstile_server.engines.embedded.stopping import StopRule
from turnstile_server.testing.chat_format import ChatFormat

MAX_BODY_BYTES = 1 << 30
ABORTED: dict[str, object] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
PASSED_ON = ("Content-Type", "X-SMG-Routing-Key")


@dataclass(slots=True, eq=False)
class ScriptedCall:
    """One call that the script answers."""

    rid: str
    prompt: list[int]
    completion: list[int]
    finish: dict[str, object]
    temperature: float
    stream: bool
    started: float
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """The model's scores of a completion: one logprob per id in nats, and the version of the weights."""

    logprobs: list[float]
    version: str
    cached_tokens: int


class ScriptedModelServer:
    """Answers the calls that the script fits, and forwards all others to the model.

    ``model``: a session to the model's own server. ``window``: its context length in tokens. ``chunk_tokens`` and
    ``chunk_pause_s``: the size of a streamed chunk and the seconds between two.
    """

    def __init__(
        self,
        model: aiohttp.ClientSession,
        chat: ChatFormat,
        policy: Policy,
        *,
        window: int,
        vocab_size: int,
        chunk_tokens: int = 8,
        chunk_pause_s: float = 0.0,
    ) -> None:
        self._model = model
        self._chat = chat
        self._policy = policy
        self._window = window
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._chunk_pause_s = chunk_pause_s
        self._live: dict[str, ScriptedCall] = {}
        self._going = asyncio.Event()
        self._going.set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.resume)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        call = None if body is None else self._scripted(body)
        if call is None:
            return await self.forward(request)
        if call.rid in self._live:
            return _json({"error": {"message": f"rid {call.rid!r} is already in use"}}, status=400)
        self._live[call.rid] = call
        try:
            scored = await self._score(call)
            if isinstance(scored, web.Response):
                return scored
            if call.stream:
                return await self._stream(request, call, scored)
            if call.aborted:
                return _json(self._payload(call, scored, 0, ABORTED))
            return _json(self._payload(call, scored, len(call.completion), call.finish))
        finally:
            del self._live[call.rid]

    def _scripted(self, body: dict[str, Any]) -> ScriptedCall | None:
        """None for a call that the model answers: no play fits, it asks for scores, or the model refuses it."""
        ids = body.get("input_ids")
        parameters = body.get("sampling_params")
        if not isinstance(ids, list) or not ids or not isinstance(parameters, dict):
            return None
        if not all(type(token) is int and 0 <= token < self._vocab_size for token in ids):
            return None
        most = parameters.get("max_new_tokens", 0)
        asks_more = {"logprob_start_len", "token_ids_logprob"} & body.keys() or parameters.get("json_schema")
        if asks_more or not body.get("rid") or not body.get("return_logprob"):
            return None
        if most < 1 or len(ids) + most > self._window:
            return None
        seen = self._chat.read(ids)
        step = self._policy(seen)
        if step is None:
            return None
        completion = self._chat.write(step, seen)
        rule = StopRule(
            max_new_tokens=most,
            stop_ids=frozenset([*(parameters.get("stop_token_ids") or ()), completion[-1]]),
            strings=tuple(parameters.get("stop") or ()),
        )
        for end in range(1, len(completion) + 1):
            finish = rule.check(completion[:end], self._chat.decode)
            if finish is not None:
                temperature = float(parameters.get("temperature", 1.0))
                stream = bool(body.get("stream"))
                return ScriptedCall(
                    body["rid"], ids, completion[:end], finish, temperature, stream, time.monotonic()
                )
        raise AssertionError("the last id of a completion ends it")

    async def _score(self, call: ScriptedCall) -> Scored | web.Response:
        """Have the model score the call. A response replaces the answer: the model's refusal, or an abort."""
        while True:
            version = (await self._ask("GET", "/model_info"))[1]["weight_version"]
            body = {
                "rid": call.rid,
                "input_ids": [*call.prompt, *call.completion],
                "sampling_params": {"temperature": call.temperature, "max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": len(call.prompt) - 1,
                "stream": False,
            }
            status, answer = await self._ask("POST", "/generate", body)
            if status != 200:
                return _json(answer, status=status)
            meta = answer["meta_info"]
            if meta["finish_reason"]["type"] == "abort":
                nothing = Scored([], version, meta["cached_tokens"])
                return _json(self._payload(call, nothing, 0, ABORTED))
            if meta["weight_version"] != version:
                continue  # the weights changed meanwhile, so the scores may be of either version
            entries = meta["input_token_logprobs"][1:]
            if [entry[1] for entry in entries] != call.completion:
                raise web.HTTPInternalServerError(text="the model scored other ids than it was sent")
            return Scored([entry[0] for entry in entries], version, meta["cached_tokens"])

    async def _stream(self, request: web.Request, call: ScriptedCall, scored: Scored) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        total, sent = len(call.completion), 0
        finish: dict[str, object] | None = None
        while finish is None:
            await self._going.wait()
            if call.aborted:
                finish = ABORTED
            else:
                sent = min(sent + self._chunk_tokens, total)
                finish = call.finish if sent == total else None
            payload = self._payload(call, scored, sent, finish)
            await response.write(b"data: " + orjson.dumps(payload) + b"\n\n")
            await asyncio.sleep(self._chunk_pause_s)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _payload(
        self, call: ScriptedCall, scored: Scored, count: int, finish: dict[str, object] | None
    ) -> dict[str, Any]:
        """The payload of a chunk that repeats the first ``count`` tokens of the call."""
        ids = call.completion[:count]
        meta: dict[str, Any] = {
            "id": call.rid,
            "finish_reason": finish,
            "prompt_tokens": len(call.prompt),
            "weight_version": scored.version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(scored.logprobs[:count], ids, strict=True)
            ],
            "output_token_logprobs_length": count,
            "reasoning_tokens": 0,
            "completion_tokens": count,
            "cached_tokens": scored.cached_tokens,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        if finish is not None:
            meta["weight_versions"] = [{"version": scored.version, "start": 0, "end": count}] if count else []
            meta["e2e_latency"] = time.monotonic() - call.started
        return {"text": self._chat.decode(ids), "output_ids": ids, "meta_info": meta}

    async def abort(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request) or {}
        for call in list(self._live.values()):
            call.aborted |= bool(body.get("abort_all")) or call.rid == body.get("rid")
        return await self.forward(request)

    async def pause(self, request: web.Request) -> web.StreamResponse:
        """Hold streams as SGLang does; tokens that were chosen before keep the weights that scored them."""
        mode = (await _body(request) or {}).get("mode", "abort")
        if mode == "abort":
            for call in list(self._live.values()):
                call.aborted = True
        elif mode in ("retract", "in_place"):
            self._going.clear()
        return await self.forward(request)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        response = await self.forward(request)
        self._going.set()
        return response

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """The model's own answer. If the caller disconnects, the call ends at the model too."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        data = await request.read()
        response: web.StreamResponse | None = None
        try:
            async with self._model.request(request.method, request.path_qs, data=data, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                if "Content-Type" in answer.headers:
                    response.headers["Content-Type"] = answer.headers["Content-Type"]
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            if response is not None:
                raise  # the answer stays cut off, so the caller cannot take it for complete
            return _gone(error)

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._model.request(method, path, data=data) as answer:
                return answer.status, orjson.loads(await answer.read())
        except aiohttp.ClientError as error:
            raise web.HTTPServiceUnavailable(text=f"The model's process does not answer: {error}") from error


async def _body(request: web.Request) -> dict[str, Any] | None:
    """None if the body is not a JSON object; the model's own error then says what is wrong."""
    try:
        value = orjson.loads(await request.read())
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _gone(error: Exception) -> web.Response:
    return _json({"error": {"message": f"The model's process does not answer: {error}"}}, status=503)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
