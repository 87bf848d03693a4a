"""A stand-in engine: answers SGLang's and vLLM's wires from one plan, and remembers what it sampled. A process.

    python -m exactness.engine MODEL PORT

- SGLang: ``/generate`` with ids, whole or streamed (each event holds all tokens so far), ``/abort_request``,
  ``/tokenize``, ``/model_info``, ``/server_info``, ``/v1/loads``. Forms:
  ``tests/engines/recorded/whole_stop_token``, ``stream_length_cumulative``, ``stream_abort_waiting_cumulative``,
  ``whole_two_weights``, ``tokenize``; and ``tests/engines/scripted_engine.py``.
- vLLM: ``/v1/chat/completions`` and ``/v1/completions``, whole or streamed, with ``return_token_ids`` and logprobs
  whose tokens read ``token_id:N`` (``return_tokens_as_token_ids``), as ``vllm/entrypoints/openai`` of 0.32.0 has
  it: the ids of the prompt at the top of a chat reply, in the choice of a completion, in a stream's first chunk.
  And ``/inference/v1/generate``, whole: ``whole_stop_token`` of ``tests/engines/recorded/vllm.json``.

Chat requests are rendered with the model's own chat template. Parsed text has no line breaks at its ends, which is
the best case for a gateway that renders it again. A request whose client hangs up stops sampling, as both engines
do.

``POST /bench/plan`` begins a run with a plan and forgets the one before; ``GET /bench/calls`` gives the run's
calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from tokenizers import Tokenizer

from exactness.plan import MARKER, Fault, Plan, Sample, Sampler, Step

CONTEXT: Final = 1 << 15
PROBE: Final = "probe"
"""The step of a prompt without a marker: a gateway asks what the engine can do."""


@dataclass
class EngineCall:
    """What became of one request: the truth that gateways are held to."""

    name: str
    """Of the sample; of a refused one, the step's with ``!``."""
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finished: bool = False
    """Sampled to its end token and not hung up on."""
    aborted: bool = False
    """By ``/abort_request``."""


class Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"planned {status}")
        self.status = status


class StandInEngine:
    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

        self._model = model
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._template = AutoTokenizer.from_pretrained(str(model))
        self._sampler = Sampler(self._tokenizer)
        self._updates = 0
        self._begin(Plan({PROBE: Step()}))
        self._running: dict[str, EngineCall] = {}

    def _begin(self, plan: Plan) -> None:
        steps = {PROBE: Step(("bash",), 4, 0), **plan.steps}
        self._plan = Plan(steps, plan.faults, plan.split, plan.compact, plan.seed)
        self._sampled: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self.calls: list[EngineCall] = []

    @property
    def version(self) -> str:
        """It never goes back: a gateway may refuse an engine whose weights do."""
        return f"v{self._updates + 1}"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        about = {"model_path": str(self._model), "served_model_name": "tiny", "weight_version": self.version}
        models = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": CONTEXT}]}
        loads = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]}
        fixed: dict[str, Any] = {"/server_info": {"max_req_input_len": CONTEXT - 6}, "/v1/models": models}
        fixed |= {"/v1/loads": loads, "/health": {}, "/version": {"version": "0.32.0"}}
        for path, value in fixed.items():
            app.router.add_get(path, _fixed(value))
        app.router.add_get("/model_info", lambda _: _json({**about, "weight_version": self.version}))
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/inference/v1/generate", self._tokens_in_tokens_out)
        app.router.add_post("/bench/plan", self._new_plan)
        app.router.add_get("/bench/calls", lambda _: _json([asdict(call) for call in self.calls]))
        return app

    async def _new_plan(self, request: web.Request) -> web.Response:
        self._begin(Plan.from_json(await request.json()))
        return web.json_response({})

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = await request.json()
        texts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
        ids = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return web.json_response({"tokens": ids, "count": [len(each) for each in ids], "max_model_len": CONTEXT})

    async def _abort(self, request: web.Request) -> web.Response:
        call = self._running.get((await request.json()).get("rid", ""))
        if call is not None:
            call.aborted = True
        return web.json_response({})

    # -- sampling ----------------------------------------

    def _open(self, prompt: list[int]) -> tuple[EngineCall, Sample, Fault]:
        """Notes a request and decides its reply. Raises Refused."""
        found = MARKER.findall(self._tokenizer.decode(prompt, skip_special_tokens=False))
        key = found[-1] if found and found[-1] in self._plan.steps else PROBE
        self._asked[key] += 1
        fault = self._plan.faults.get(key, Fault()) if self._asked[key] == 1 else Fault()
        if fault.status is not None:
            self.calls.append(EngineCall(f"{key}!", prompt))
            raise Refused(fault.status)
        sample = self._sampler.sample(self._plan, key, self._sampled[key])
        self._sampled[key] += 1
        call = EngineCall(sample.name, prompt)
        if key != PROBE:
            self.calls.append(call)
        return call, sample, fault

    async def _tokens(self, call: EngineCall, sample: Sample, fault: Fault) -> AsyncIterator[int]:
        """Samples: yields the number of tokens so far. What was sampled before a hang-up stays noted."""
        for place, (token, logprob) in enumerate(zip(sample.ids, sample.logprobs, strict=True)):
            if fault.pace_s:
                await asyncio.sleep(fault.pace_s)
            if call.aborted:
                return
            if fault.update_after == place:
                self._updates += 1
            call.ids.append(token)
            call.logprobs.append(logprob)
            call.versions.append(self.version)
            yield place + 1
        call.finished = True

    async def _all(self, call: EngineCall, sample: Sample, fault: Fault) -> None:
        async for _ in self._tokens(call, sample, fault):
            pass

    # -- SGLang ----------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        rid = asked.get("rid") or ""
        try:
            call, sample, fault = self._open(list(asked["input_ids"]))
        except Refused as refused:
            return web.json_response({"error": {"message": str(refused)}}, status=refused.status)
        self._running[rid] = call
        try:
            if not asked.get("stream"):
                await self._all(call, sample, fault)
                return web.json_response(self._generated(rid, call, sample))
            response = await _stream(request)
            async for _ in self._tokens(call, sample, fault):
                await _event(response, self._generated(rid, call, sample))
            if call.aborted:
                await _event(response, self._generated(rid, call, sample))
            await response.write(b"data: [DONE]\n\n")
            return response
        except (asyncio.CancelledError, ConnectionResetError):
            call.finished = False
            raise
        finally:
            self._running.pop(rid, None)

    def _generated(self, rid: str, call: EngineCall, sample: Sample) -> dict[str, Any]:
        count = len(call.ids)
        finish: dict[str, Any] | None = None
        if count == len(sample.ids):
            finish = {"type": "stop", "matched": call.ids[-1]}
        elif call.aborted:
            finish = {"type": "abort", "message": "Abort in running"}
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(call.prompt),
            "weight_version": self.version,
            "completion_tokens": count,
            "cached_tokens": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [
                [lp, token, None] for lp, token in zip(call.logprobs, call.ids, strict=True)
            ],
        }
        if finish is not None:  # only the last event says which tokens have which version
            meta["weight_versions"] = _spans(call.versions)
        return {"text": "".join(sample.pieces[:count]), "output_ids": list(call.ids), "meta_info": meta}

    # -- vLLM ----------------------------------------

    def _rendered(self, asked: dict[str, Any]) -> list[int]:
        messages = [_for_template(message) for message in asked["messages"]]
        text = self._template.apply_chat_template(
            messages, tools=asked.get("tools") or None, add_generation_prompt=True, tokenize=False
        )
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        try:
            call, sample, fault = self._open(self._rendered(asked))
        except Refused as refused:
            return _error(refused)
        head = {"id": f"chatcmpl-{len(self.calls)}", "created": int(time.time()), "model": "tiny"}
        prompt = {"prompt_token_ids": call.prompt} if asked.get("return_token_ids") else {}
        calls = [
            {"id": f"call_{sample.name}_{at}", "type": "function", "function": {"name": name, "arguments": given}}
            for at, (name, given) in enumerate(sample.calls)
        ]
        finish = "tool_calls" if calls else "stop"
        if not asked.get("stream"):
            await self._all(call, sample, fault)
            message: dict[str, Any] = {"role": "assistant", "content": sample.content, "tool_calls": calls}
            message["reasoning"] = sample.thought or None
            choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": None}
            choice |= self._extras(asked, call, sample, 0, chat=True)
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(call), **prompt}
            return web.json_response(whole)
        head["object"] = "chat.completion.chunk"
        response = await _stream(request)
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await _event(response, {**head, "choices": [first], **prompt})
        text = ""
        body = sample.content
        try:
            async for count in self._tokens(call, sample, fault):
                before, text = text, text + sample.pieces[count - 1]
                last = count == len(sample.ids)
                delta: dict[str, Any] = _delta(before, text, sample.thought, body)
                if last and calls:
                    delta["tool_calls"] = [{"index": at, **one} for at, one in enumerate(calls)]
                choice = {"index": 0, "delta": delta, "finish_reason": finish if last else None}
                choice |= self._extras(asked, call, sample, count - 1, chat=True)
                await _event(response, {**head, "choices": [choice]})
            if (asked.get("stream_options") or {}).get("include_usage"):
                await _event(response, {**head, "choices": [], "usage": _usage(call)})
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionResetError):
            call.finished = False
            raise
        return response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        prompt = asked["prompt"]
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        try:
            call, sample, fault = self._open(list(prompt))
        except Refused as refused:
            return _error(refused)
        head = {"id": f"cmpl-{len(self.calls)}", "created": int(time.time()), "model": "tiny"}
        head["object"] = "text_completion"
        told = {"prompt_token_ids": call.prompt} if asked.get("return_token_ids") else {}
        if not asked.get("stream"):
            await self._all(call, sample, fault)
            choice = {"index": 0, "text": "".join(sample.pieces), "finish_reason": "stop", **told}
            choice |= self._extras(asked, call, sample, 0, chat=False)
            return web.json_response({**head, "choices": [choice], "usage": _usage(call)})
        response = await _stream(request)
        async for count in self._tokens(call, sample, fault):
            choice = {"index": 0, "text": sample.pieces[count - 1]}
            choice |= {
                "finish_reason": "stop" if count == len(sample.ids) else None,
                **(told if count == 1 else {}),
            }
            choice |= self._extras(asked, call, sample, count - 1, chat=False)
            await _event(response, {**head, "choices": [choice]})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _tokens_in_tokens_out(self, request: web.Request) -> web.Response:
        """Whole replies only. ``token`` beside ``token_id``: verifiers refuses an entry without it, which 0.32.0
        as recorded (``tests/engines/recorded/vllm.json``) does not give."""
        asked = await request.json()
        try:
            call, sample, fault = self._open(list(asked["token_ids"]))
        except Refused as refused:
            return _error(refused)
        await self._all(call, sample, fault)
        content = [
            {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(call.ids, call.logprobs, strict=True)
        ]
        choice = {"index": 0, "finish_reason": "stop", "stop_reason": call.ids[-1], "token_ids": call.ids}
        choice |= {"weight_versions": _spans(call.versions), "logprobs": {"content": content}}
        whole = {"request_id": f"generate-{len(self.calls)}", "model": "tiny", "usage": _usage(call)}
        return web.json_response({**whole, "prompt_token_ids": None, "output_mode": "tokens", "choices": [choice]})

    def _extras(
        self, asked: dict[str, Any], call: EngineCall, sample: Sample, start: int, *, chat: bool
    ) -> dict[str, Any]:
        """Ids and logprobs of the tokens from ``start``, where the request asks for them."""
        found: dict[str, Any] = {}
        ids, logprobs, pieces = call.ids[start:], call.logprobs[start:], sample.pieces[start:]
        if asked.get("return_token_ids"):
            found["token_ids"] = list(ids)
        as_ids = asked.get("return_tokens_as_token_ids")
        names = [f"token_id:{token}" if as_ids else piece for token, piece in zip(ids, pieces, strict=False)]
        if not chat and asked.get("logprobs") is not None:
            found["logprobs"] = {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": None}
        elif chat and asked.get("logprobs"):
            content = [
                {"token": name, "logprob": lp, "bytes": list(name.encode()), "top_logprobs": []}
                for name, lp in zip(names, logprobs, strict=True)
            ]
            found["logprobs"] = {"content": content}
        return found


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM gives it to a chat template: text in one string, arguments as objects."""
    made = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content)
    made["content"] = content or ""
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought:
        made["reasoning_content"] = thought
    calls = []
    for call in message.get("tool_calls") or []:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        calls.append({**call, "function": function})
    made.pop("tool_calls", None)
    return {**made, "tool_calls": calls} if calls else made


def _delta(before: str, text: str, thought: str, body: str) -> dict[str, str]:
    """The part of a chunk's text that belongs to the reasoning, or to the content."""
    head = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    spans = {
        "reasoning": (len("<think>\n"), len("<think>\n") + len(thought)),
        "content": (len(head), len(head) + len(body)),
    }
    if not thought:
        del spans["reasoning"]
    found = {name: text[max(len(before), low) : min(len(text), high)] for name, (low, high) in spans.items()}
    return {name: part for name, part in found.items() if part}


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": place, "end": place})
        spans[-1]["end"] = place + 1
    return spans


def _usage(call: EngineCall) -> dict[str, int]:
    prompt, sampled = len(call.prompt), len(call.ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _error(refused: Refused) -> web.Response:
    error = {"message": str(refused), "type": "InternalServerError", "param": None, "code": refused.status}
    return web.json_response({"error": error}, status=refused.status)


async def _stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def _event(response: web.StreamResponse, value: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


async def _json(value: Any) -> web.Response:
    return web.json_response(value)


def _fixed(value: Any) -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(value)

    return answer


def main() -> None:
    app = StandInEngine(Path(sys.argv[1])).app()
    web.run_app(
        app, host="127.0.0.1", port=int(sys.argv[2]), print=None, access_log=None, handler_cancellation=True
    )


if __name__ == "__main__":
    main()
