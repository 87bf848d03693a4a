"""The child's HTTP interface: the subset of SGLang's that Turnstile uses, in the same shapes.

Source of the shapes: sglang 0.5.23 (see ``sglang/generate``). Deliberate differences: input logprobs follow the
call's temperature (``/server_info`` says so), new weights recompute running calls (retract) whatever the pause,
chunks say which weights sampled which tokens, and replies have no ``text``. Owns the calls in flight; the
scheduler owns everything else.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio
import orjson
from aiohttp import web

from turnstile_server.engines.embedded.grammars import BACKEND, Constraint, GrammarRefused, Grammars
from turnstile_server.engines.embedded.model import ModelError
from turnstile_server.engines.embedded.sampling import SamplingParameters
from turnstile_server.engines.embedded.scheduler import ASLEEP, EngineCall, NewTokens, Scheduler
from turnstile_server.engines.embedded.stopping import StopRule
from turnstile_server.engines.embedded.tensors import read_tensors
from turnstile_server.engines.sglang.facts import RESUMES_GRAMMARS, SCALED_INPUT_LOGPROBS
from turnstile_server.engines.weight_spans import WeightSpans
from turnstile_server.threads import LoopCaller, result_of

DEFAULT_NEW_TOKENS: Final = 128


class BadRequest(Exception):
    """Answered with 400 and this sentence."""


class WorkerApp:
    """The HTTP handlers. ``encode(text, add_special_tokens)`` and ``eos_ids`` are the model folder's own."""

    def __init__(
        self,
        *,
        vocab_size: int,
        window: int,
        eos_ids: frozenset[int],
        encode: Callable[[str, bool], list[int]],
        grammars: Grammars,
        incremental: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._eos_ids = eos_ids
        self._encode = encode
        self._grammars = grammars
        self._incremental = incremental
        self._live: set[str] = set()
        self._compiling: dict[str, bool] = {}
        """By rid, the calls that wait for their grammar: whether they were aborted since."""
        self._scheduler: Scheduler | None = None
        self._loop: LoopCaller | None = None

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("no scheduler is attached")
        return self._scheduler

    def attach(self, scheduler: Scheduler) -> None:
        """Names the scheduler that computes calls. Call it in the event loop."""
        self._scheduler, self._loop = scheduler, LoopCaller()

    def post(self, events: list[tuple[EngineCall, NewTokens]]) -> None:
        """Hands events to their calls. Called by the scheduler's thread."""
        if self._loop is None:
            raise RuntimeError("no scheduler is attached")
        self._loop.call(_deliver, events)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/v1/models", self.models),
            web.post("/tokenize", self.tokenize),
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/update_weights_from_disk", self.update_weights),
            web.post("/begin_weight_update", self.accept),
            web.post("/update_weights_from_tensor", self.load_tensors),
            web.post("/end_weight_update", self.accept),
            web.post("/update_weight_version", self.name_weights),
            web.post("/flush_cache", self.flush),
            web.post("/release_memory_occupation", self.sleep),
            web.post("/resume_memory_occupation", self.wake),
        ]

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        name = str(self.scheduler.folder)
        return _json({"model_path": name, "served_model_name": name, "weight_version": self.scheduler.version})

    async def server_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "context_length": self._window,
                "dtype": self.scheduler.compute.dtype_name,
                "device": self.scheduler.compute.device.type,
                "device_name": self.scheduler.compute.device_name,
                "disable_radix_cache": False,
                "grammar_backend": BACKEND if self._grammars.installed() else "none",
                RESUMES_GRAMMARS: True,
                "skip_tokenizer_init": False,
                "incremental_streaming_output": self._incremental,
                SCALED_INPUT_LOGPROBS: True,
            }
        )

    async def models(self, request: web.Request) -> web.Response:
        return _json(
            {"object": "list", "data": [{"id": str(self.scheduler.folder), "max_model_len": self._window}]}
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        texts, special = body.get("prompt"), bool(body.get("add_special_tokens", True))
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return _error("prompt must be a list of strings")
        ids = [self._encode(text, special) for text in texts]
        return _json({"tokens": ids, "count": [len(one) for one in ids], "max_model_len": self._window})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if self.scheduler.asleep:
            return _error(ASLEEP)
        inbox = _Inbox()
        try:
            call = self._read_call(body, inbox.put)
        except BadRequest as error:
            return _error(str(error))
        self._live.add(call.rid)
        answer = _CallOutput(call, self.scheduler, scored=call.score_from is not None)
        try:
            self._compiling[call.rid] = False
            try:
                call.constraint = await self._constraint(body, call)
            except (BadRequest, GrammarRefused) as error:
                return _error(str(error))
            finally:
                aborted = self._compiling.pop(call.rid)
            self.scheduler.submit(call)
            if aborted:
                self.scheduler.abort(call.rid)
            if not body.get("stream"):
                while not answer.finished:
                    answer.add(await inbox.take())
                return _json(answer.payload(incremental=False))
            return await self._stream(request, answer, inbox)
        finally:
            # Also if the caller has gone: then the handler is cancelled or its write fails.
            self._live.discard(call.rid)
            if not answer.finished:
                self.scheduler.abort(call.rid)

    async def _stream(self, request: web.Request, answer: _CallOutput, inbox: _Inbox) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while not answer.finished:
            answer.add(await inbox.take())
            await response.write(b"data: " + orjson.dumps(answer.payload(incremental=self._incremental)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _read_call(self, body: dict[str, Any], emit: Callable[[NewTokens], None]) -> EngineCall:
        rid = body.get("rid") or uuid.uuid4().hex
        if not isinstance(rid, str) or rid in self._live:
            raise BadRequest(f"rid {rid!r} is no string or already in use")
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise BadRequest("input_ids must be a non-empty list of whole numbers")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise BadRequest(f"input_ids has an id outside the vocabulary of {self._vocab_size}")
        parameters = body.get("sampling_params") or {}
        new_tokens = parameters.get("max_new_tokens", DEFAULT_NEW_TOKENS)
        if len(ids) + new_tokens > self._window:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {self._window} tokens: "
                f"{len(ids)} tokens of input and {new_tokens} for the completion."
            )
        score_from = body.get("logprob_start_len", -1)
        ignore_eos = parameters.get("ignore_eos", False)
        stop_ids = frozenset() if ignore_eos else self._eos_ids | set(parameters.get("stop_token_ids") or ())
        strings = parameters.get("stop") or []
        return EngineCall(
            rid=rid,
            prompt=ids,
            sampling=SamplingParameters(
                temperature=float(parameters.get("temperature", 1.0)),
                top_p=float(parameters.get("top_p", 1.0)),
                top_k=int(parameters.get("top_k", -1)),
                min_p=float(parameters.get("min_p", 0.0)),
            ),
            stop=StopRule(
                max_new_tokens=new_tokens,
                stop_ids=stop_ids,
                strings=tuple([strings] if isinstance(strings, str) else strings),
            ),
            emit=emit,
            score_from=score_from if 0 <= score_from < len(ids) else None,
        )

    async def _constraint(self, body: dict[str, Any], call: EngineCall) -> Constraint | None:
        """The call's grammar, behind the tokens of its completion that an earlier call sampled. Raises
        GrammarRefused."""
        parameters = body.get("sampling_params") or {}
        schema, tag = parameters.get("json_schema"), parameters.get("structural_tag")
        if schema is None and tag is None:
            return None
        began = body.get("grammar_from", len(call.prompt))
        if type(began) is not int or not 0 <= began <= len(call.prompt):
            raise BadRequest(f"grammar_from must be a position in the {len(call.prompt)} input_ids")
        return await self._grammars.constraint(
            call.stop.stop_ids, call.prompt[began:], json_schema=schema, structural_tag=tag
        )

    async def abort(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if body.get("abort_all"):
            self._compiling = dict.fromkeys(self._compiling, True)
            self.scheduler.abort(None)
        elif body.get("rid"):
            rid = str(body["rid"])
            if rid in self._compiling:
                self._compiling[rid] = True
            self.scheduler.abort(rid)
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _error(f"unknown mode {mode!r}")
        await result_of(self.scheduler.pause(mode))
        return _json({"message": "Generation paused.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await result_of(self.scheduler.resume())
        return _json({"message": "Generation continued.", "status": "ok"})

    async def update_weights(self, request: web.Request) -> web.Response:
        body = await _body(request)
        folder, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(folder, str):
            return _error("model_path is missing")
        try:
            await result_of(self.scheduler.update_weights(Path(folder), version or self.scheduler.version))
        except ModelError as error:
            return _json({"success": False, "message": f"{folder}: {error}", "num_paused_requests": 0}, status=400)
        return _json({"success": True, "message": "Weights updated.", "num_paused_requests": 0})

    async def accept(self, request: web.Request) -> web.Response:
        """The begin and the end of an update by tensors: each piece is whole here when it was answered."""
        return _json({"success": True, "message": "Nothing is to be done."})

    async def load_tensors(self, request: web.Request) -> web.Response:
        body = await _body(request)
        try:
            tensors = await anyio.to_thread.run_sync(read_tensors, body)
            await result_of(self.scheduler.load_tensors(tensors))
        except ModelError as error:
            return _json({"success": False, "message": f"{error}. These tensors were not loaded."}, status=400)
        return _json({"success": True, "message": "Weights updated."})

    async def name_weights(self, request: web.Request) -> web.Response:
        version = (await _body(request)).get("new_version")
        if not isinstance(version, str):
            return _error("new_version is missing")
        await result_of(self.scheduler.name_weights(version))
        return _json({"success": True, "message": "Weight version updated.", "new_version": version})

    async def sleep(self, request: web.Request) -> web.Response:
        if not await result_of(self.scheduler.sleep()):
            return _error("Memory is not released while calls run or wait.")
        return web.Response()

    async def wake(self, request: web.Request) -> web.Response:
        try:
            await result_of(self.scheduler.wake())
        except ModelError as error:
            return _error(f"{self.scheduler.folder}: {error}")
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        flushed = await result_of(self.scheduler.flush())
        return (
            web.Response() if flushed else web.Response(status=400, text="Flush cache failed: calls are running.")
        )


class _Inbox:
    """Events of one call, on their way from the scheduler to the handler."""

    def __init__(self) -> None:
        self._events: list[NewTokens] = []
        self._arrived = anyio.Event()

    def put(self, event: NewTokens) -> None:
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[NewTokens]:
        """All events that have come, as soon as there is one."""
        await self._arrived.wait()
        events, self._events, self._arrived = self._events, [], anyio.Event()
        return events


class _CallOutput:
    """The output of a call so far, as SGLang's reply."""

    def __init__(self, call: EngineCall, scheduler: Scheduler, *, scored: bool) -> None:
        self._call = call
        self._scheduler = scheduler
        self._scored = scored
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._weights = WeightSpans()
        self._sent = 0
        self._finish: dict[str, object] | None = None

    @property
    def finished(self) -> bool:
        return self._finish is not None

    def add(self, events: list[NewTokens]) -> None:
        for event in events:
            self._ids.extend(event.ids)
            self._logprobs.extend(event.logprobs)
            for version in event.versions:
                self._weights.add(1, version)
            self._finish = event.finish

    def payload(self, *, incremental: bool) -> dict[str, Any]:
        """All output so far, or with ``incremental`` only the output since the last payload."""
        start = self._sent if incremental else 0
        self._sent = len(self._ids)
        ids = self._ids[start:]
        meta: dict[str, Any] = {
            "id": self._call.rid,
            "finish_reason": self._finish,
            "prompt_tokens": len(self._call.prompt),
            "completion_tokens": len(self._ids),
            "cached_tokens": self._call.cached_tokens,
            "num_retractions": self._call.retractions,
            "weight_version": self._scheduler.version,
            "weight_versions": [
                {"version": span.version, "start": span.start, "end": span.end} for span in self._weights.spans
            ],
            "output_token_logprobs": [[lp, i, None] for lp, i in zip(self._logprobs[start:], ids, strict=True)],
        }
        if self._finish is not None and self._scored and self._call.score_from is not None:
            scored = self._call.prompt[self._call.score_from :]
            values = [None, *self._call.input_logprobs]
            meta["input_token_logprobs"] = [[lp, i, None] for lp, i in zip(values, scored, strict=False)]
        return {"output_ids": ids, "meta_info": meta}


def _deliver(events: list[tuple[EngineCall, NewTokens]]) -> None:
    for call, event in events:
        call.emit(event)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        value = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise web.HTTPBadRequest(text="the body is not an object")
    return value


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _error(message: str) -> web.Response:
    return _json({"error": {"message": message}}, status=400)
