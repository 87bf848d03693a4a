"""The logprobs of given tokens, asked of an SGLang server.

What must hold: a score is of exactly the ids that were sent; a call that ends without an answer is aborted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnstile.models import Float32Array, Int32Array
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.prompt_json import ids_json
from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.replies import entry_id, entry_logprob, finite, refuse
from turnstile_server.engines.server_scores import ask_score, new_score, score_by_position
from turnstile_server.engines.sglang.generate import generate_body, meta_of


class SGLangScorer:
    """Scores ids on one server. ``limit_s``: for one answer. ``abort(rid)`` ends a call that got none.
    ``prefix_key()``: that of calls sent now."""

    def __init__(
        self,
        http: EngineHttp,
        limit_s: float,
        *,
        abort: Callable[[str], Awaitable[None]],
        prefix_key: Callable[[], str],
        headers: Mapping[str, str],
    ) -> None:
        self._http = http
        self._limit_s = limit_s
        self._abort = abort
        self._prefix_key = prefix_key
        self._headers = headers

    async def at_once(
        self, input_ids: Int32Array, start: int, temperature: float, vocab_size: int
    ) -> Float32Array:
        """float32[len - start] from one call, for a server whose input logprobs are at ``temperature``."""
        sampling = EngineSampling(max_new_tokens=0, temperature=temperature)
        meta = await self._call(input_ids, sampling, {"logprob_start_len": start - 1})
        return input_logprobs(meta, input_ids, start, vocab_size)

    async def by_position(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        """float32[len - start] from one call for each position.

        SGLang gives input logprobs at temperature 1 only (0.5.23, layers/logits_processor.py); the logprob of a
        named id at the next position is scaled (layers/sampler.py). The prefix cache makes each of these calls one
        step.
        """

        async def score_next(prompt: Int32Array, token: int) -> float:
            sampling = EngineSampling(max_new_tokens=1, temperature=temperature)
            meta = await self._call(prompt, sampling, {"token_ids_logprob": [token]})
            return chosen_logprob(meta, token)

        return await score_by_position(input_ids, start, score_next)

    async def _call(
        self, input_ids: Int32Array, sampling: EngineSampling, extra: dict[str, Any]
    ) -> Mapping[str, Any]:
        rid = new_score(self._http)
        key = self._prefix_key()
        body = generate_body([ids_json(input_ids)], sampling, rid=rid, stream=False, prefix_key=key, extra=extra)
        settled = False
        try:
            answer = await ask_score(self._http, "/generate", body, self._headers, self._limit_s)
            meta = meta_of(answer, rid)
            settled = True
            return meta
        finally:
            if not settled:
                await self._abort(rid)


def input_logprobs(meta: Mapping[str, Any], input_ids: Int32Array, start: int, vocab_size: int) -> Float32Array:
    """float32[len - start] from a reply to ``logprob_start_len = start - 1`` (whose first entry has none).

    SGLang (0.5.23, logprob_result_processor.py) names the last id of the vocabulary 0 in these entries, where it
    clips what stands for images; the logprob itself is that of the id sent.
    """
    entries = meta.get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(input_ids) - start + 1:
        count = len(entries) if isinstance(entries, list) else None
        refuse(f"it gave {count} input logprobs for {len(input_ids) - start + 1} positions")
    scored = entries[1:]
    sent = input_ids[start:].tolist()
    named = [entry_id(entry) for entry in scored]
    clipped = vocab_size - 1
    if any(name != one and (name, one) != (0, clipped) for name, one in zip(named, sent, strict=True)):
        refuse("input_token_logprobs are of other ids than were sent")
    return finite([entry_logprob(entry) for entry in scored])


def chosen_logprob(meta: Mapping[str, Any], token: int) -> float:
    """The logprob of ``token`` at the first output position, from ``output_token_ids_logprobs``."""
    rows = meta.get("output_token_ids_logprobs")
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], list) or len(rows[0]) != 1:
        refuse("a reply has no output_token_ids_logprobs")
    if entry_id(rows[0][0]) != token:
        refuse("output_token_ids_logprobs are of another id than was asked")
    return entry_logprob(rows[0][0])
