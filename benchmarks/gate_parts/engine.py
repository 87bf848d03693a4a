"""A mock engine that answers at once, always the same, from bytes made beforehand. Run as a process.

    python -m gate_parts.engine MODEL PORT

It speaks what each server under measurement expects of an engine, with the same 40 tokens:

- SGLang's native ``/generate`` (one event per token, cumulative, when streamed), ``/model_info``,
  ``/server_info``, ``/v1/models``, ``/v1/loads``, ``/tokenize``: for Turnstile and ``agentcore-rl-toolkit``;
- ``/v1/chat/completions`` as vLLM has it, one event per token when streamed; with ``return_token_ids`` also the
  ids of the prompt and of the completion, and logprobs: for ``rllm-model-gateway``; without it for direct calls.
  The prompt has as many ids as the header ``x-bench-tokens`` says.

``POST /bench/pace`` with ``true`` makes streamed replies come as a model's do: the first token after ``WAIT_S``,
the second ``GAP_S`` later, the rest at once; ``GET /bench/first-tokens`` gives the times at which the first tokens
of paced replies were written since it was last asked (``time.perf_counter``), in order.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import uvloop

from gate_parts.conversation import Conversation
from gate_parts.wire import Paced, Piece, ServerConnection, event_response, json_response

CONTEXT = 1 << 18
WAIT_S = 0.005
GAP_S = 0.005
TAIL = 2048
"""Bytes at the end of a body in which its options are: all servers write them after the messages or ids."""


class MockEngine:
    def __init__(self, model: Path) -> None:
        conversation = Conversation(model)
        self._tokenizer = conversation.tokenizer
        self._reply = conversation.reply
        about = {"model_path": str(model), "served_model_name": "tiny", "weight_version": "1"}
        self._fixed = {
            b"/model_info": about,
            b"/server_info": {"max_req_input_len": CONTEXT - 6},
            b"/v1/models": {"data": [{"id": "tiny", "max_model_len": CONTEXT}]},
            b"/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]},
            b"/health": {},
            b"/abort_request": {},
        }
        self._paced = False
        self._first_tokens: list[float] = []
        count = len(self._reply.ids)
        self._generate = json_response(_dumps(self._generated(count)))
        self._generate_stream = event_response([_dumps(self._generated(n + 1)) for n in range(count)])

    def answer(self, head: bytes, body: bytes) -> Sequence[Piece]:
        path = head.split(b" ", 2)[1]
        if path == b"/generate":
            return self._in_pace(self._generate_stream) if _streams(body) else self._generate
        if path == b"/v1/chat/completions":
            asked, stream = b"return_token_ids" in body[-TAIL:], _streams(body)
            usage = b"include_usage" in body[-TAIL:]
            reply = self._chat(_prompt_tokens(head) if asked else None, stream, usage)
            return self._in_pace(reply) if stream else reply
        if path == b"/tokenize":
            texts = json.loads(body)["prompt"]
            ids = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
            return json_response(_dumps({"tokens": ids}))
        if path == b"/bench/pace":
            self._paced = json.loads(body)
            return json_response(b"{}")
        if path == b"/bench/first-tokens":
            stamps, self._first_tokens = self._first_tokens, []
            return json_response(_dumps(stamps))
        return json_response(_dumps(self._fixed[path]))

    def _in_pace(self, events: Sequence[bytes]) -> Sequence[Piece]:
        if not self._paced:
            return events
        first, second, *rest = events
        return [Paced(first, WAIT_S, self._first_tokens.append), Paced(second, GAP_S), *rest]

    def _generated(self, count: int) -> dict[str, Any]:
        ids = list(self._reply.ids[:count])
        finish = {"type": "stop", "matched": ids[-1]} if count == len(self._reply.ids) else None
        meta = {
            "finish_reason": finish,
            "prompt_tokens": 1,
            "completion_tokens": count,
            "cached_tokens": CONTEXT,  # all of the prompt: what loses prompts has episodes take turns
            "output_token_logprobs": [[-0.5, index, None] for index in ids],
            "weight_version": "1",
        }
        return {"text": "".join(self._reply.pieces[:count]), "output_ids": ids, "meta_info": meta}

    @lru_cache(maxsize=32)  # noqa: B019 - one engine per process
    def _chat(self, prompt_tokens: int | None, stream: bool, usage: bool) -> Sequence[bytes]:
        """``prompt_tokens`` None: neither ids nor logprobs were asked for. ``usage``: asked for at a stream's
        end."""
        head: dict[str, Any] = {"id": "chatcmpl-0", "created": 0, "model": "tiny"}
        prompt = (
            {} if prompt_tokens is None else {"prompt_token_ids": [index % 4000 for index in range(prompt_tokens)]}
        )
        call = self._call(self._reply.call_arguments)
        counts = {"prompt_tokens": prompt_tokens or 0, "completion_tokens": len(self._reply.ids)}
        if not stream:
            message = {"role": "assistant", "content": self._reply.content, "tool_calls": [call]}
            choice = {"index": 0, "message": message, **self._recorded(0, len(self._reply.ids), prompt_tokens)}
            whole = {"object": "chat.completion", "choices": [{**choice, "finish_reason": "tool_calls"}]}
            return json_response(_dumps({**head, **whole, "usage": counts, **prompt}))
        events = []
        for at, delta in enumerate(self._deltas()):
            last = at == len(self._reply.ids) - 1
            finish = "tool_calls" if last else None
            choice = {
                "index": 0,
                "delta": delta,
                **self._recorded(at, at + 1, prompt_tokens),
                "finish_reason": finish,
            }
            chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            events.append(_dumps(chunk | prompt if at == 0 else chunk))
        if usage:
            events.append(_dumps({**head, "object": "chat.completion.chunk", "choices": [], "usage": counts}))
        return event_response(events)

    def _deltas(self) -> list[dict[str, Any]]:
        """One per token: the text's own, then the call's arguments in as many pieces as the call has tokens."""
        words = 0
        while "".join(self._reply.pieces[:words]) != self._reply.content:
            words += 1
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": self._reply.pieces[0]}]
        deltas += [{"content": piece} for piece in self._reply.pieces[1:words]]
        left = len(self._reply.ids) - words - 1
        arguments = self._reply.call_arguments
        size = -(-len(arguments) // left)
        deltas.append({"tool_calls": [self._call(arguments[:size])]})
        for at in range(1, left):
            piece = arguments[at * size : (at + 1) * size]
            deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
        return [*deltas, {}]

    def _call(self, arguments: str) -> dict[str, Any]:
        function = {"name": self._reply.call_name, "arguments": arguments}
        return {"index": 0, "id": "call_0", "type": "function", "function": function}

    def _recorded(self, start: int, end: int, prompt_tokens: int | None) -> dict[str, Any]:
        if prompt_tokens is None:
            return {}
        pieces = self._reply.pieces[start:end]
        content = [
            {"token": piece, "logprob": -0.5, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece in pieces
        ]
        return {"logprobs": {"content": content}, "token_ids": list(self._reply.ids[start:end])}


def _streams(body: bytes) -> bool:
    tail = body[-TAIL:]
    return b'"stream":true' in tail or b'"stream": true' in tail


def _prompt_tokens(head: bytes) -> int:
    at = head.lower().find(b"x-bench-tokens:")
    return int(head[at + 15 : head.find(b"\r\n", at)])


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


async def serve(model: Path, port: int) -> None:
    engine = MockEngine(model)
    server = await asyncio.get_running_loop().create_server(
        lambda: ServerConnection(engine.answer), "127.0.0.1", port
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
