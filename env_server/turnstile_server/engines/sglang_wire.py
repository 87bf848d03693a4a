"""The wire format of SGLang's native ``/generate``: requests to bytes, replies to recorded tokens. Pure.

What must hold: ids and logprobs come from ``meta_info.output_token_logprobs`` alone, agree in number with
``completion_tokens`` and in value with ``output_ids``, and are finite; a reply that names a call
(``meta_info.id``) is the reply to that call. Anything else is an EngineProtocolError; no number is ever filled in.

Source of the format: sglang 0.5.23, ``srt/entrypoints/http_server.py`` (``/generate``, SSE frames, error
bodies) and ``srt/managers/tokenizer_manager.py`` (``meta_info``, cumulative and incremental chunks, aborts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import orjson

from turnstile.models import Float32Array, Int32Array, WeightSpan
from turnstile_server.engines.protocol import EngineChunk, EngineFinish, EngineSampling
from turnstile_server.engines.sglang_values import (
    MESSAGE_CHARS,
    entry_id,
    entry_logprob,
    finite,
    refuse,
    version_name,
)
from turnstile_server.engines.weight_spans import WeightSpans
from turnstile_server.errors import EngineProtocolError, EngineRefused, EngineUnavailable, TurnstileError


def generate_body(
    input_ids: Int32Array,
    sampling: EngineSampling,
    *,
    rid: str,
    stream: bool,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """The JSON body of one call. ``input_ids`` is written directly from the array.

    ``extra``: more top-level fields (``logprob_start_len`` and the like).
    """
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.json_schema is not None:
        parameters["json_schema"] = sampling.json_schema
    body = {
        "rid": rid,
        "input_ids": np.ascontiguousarray(input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": stream,
        **(extra or {}),
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def error_for_status(status: int, body: bytes) -> TurnstileError:
    """The typed error for an answer that is not 200."""
    message = _error_message(body)
    if status in (400, 413, 422):
        return EngineRefused(f"The engine refused the request: {message}", detail={"engine_status": status})
    if status in (401, 403):
        return EngineUnavailable(f"The engine did not accept our credentials ({status}): {message}")
    if status == 429 or status >= 500:
        return EngineUnavailable(f"The engine answered {status}: {message}", detail={"engine_status": status})
    return EngineProtocolError(
        f"The engine answered {status}, which its interface does not define: {message}",
        detail={"engine_status": status},
    )


def _error_message(body: bytes) -> str:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MESSAGE_CHARS].decode("utf-8", "replace").strip() or "(empty body)"
    if isinstance(value, dict):
        inner = value.get("error", value)
        if isinstance(inner, dict):
            inner = inner.get("message", inner.get("detail", inner))
        return str(inner)[:MESSAGE_CHARS]
    return str(value)[:MESSAGE_CHARS]


def parse_json(body: bytes, what: str) -> Any:
    """Raises EngineProtocolError when ``body`` is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        start = body[:120].decode("utf-8", "replace")
        raise EngineProtocolError(f"{what} is not JSON ({error}); it begins with {start!r}.") from error


class SseSplitter:
    """Splits the bytes of an SSE stream into the payloads of its ``data:`` lines.

    SGLang sends one JSON object per ``data:`` line and ends with ``data: [DONE]``. Other SSE fields and
    comments are ignored. ``limit``: most bytes of one unfinished line.
    """

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by ``data``. Raises EngineProtocolError for a line above the limit."""
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._scanned))) >= 0:
            line = bytes(self._buffer[start:end]).rstrip(b"\r")
            start = end + 1
            if line.startswith(b"data:"):
                payloads.append(line[5:].strip())
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                text = line[:120].decode("utf-8", "replace")
                raise EngineProtocolError(f"The engine's stream is not an event stream; it has {text!r}.")
        del self._buffer[:start]
        self._scanned = len(self._buffer)
        if self._scanned > self._limit:
            raise EngineProtocolError(f"One chunk of the engine's stream is larger than {self._limit} bytes.")
        return payloads


class ReplyReader:
    """Turns the payloads of the call ``rid`` into chunks; streamed calls feed many, unstreamed ones feed one.

    The chunk style is read off the counts: with ``completion_tokens`` C, n logprobs in this chunk and s tokens
    seen so far, ``n == C`` is cumulative (the chunk repeats all output) and ``s + n == C`` incremental. Both
    hold only where they mean the same.

    ``version`` names the weights that the server was known to have when the call was sent, None where that is
    not known. A chunk says which weights the server had when it sent the chunk. Its tokens may be older, so they
    have that version only if the chunk before it (for the first chunk: ``version``) named the same.
    """

    def __init__(self, rid: str, version: str | None) -> None:
        self.finished = False
        self._rid = rid
        self._ids: list[int] = []
        self._version = version
        self._weights = WeightSpans()

    def read(self, payload: Any) -> EngineChunk | None:
        """The new tokens in ``payload``; None when it brings neither tokens nor the end.

        Raises EngineProtocolError, and the errors that the engine reports inside a reply: EngineRefused for a
        status of 400, else EngineUnavailable.
        """
        if self.finished:
            refuse("it continued after its finish reason")
        if isinstance(payload, dict) and "error" in payload:
            raise _reported_error(payload["error"])
        meta = meta_of(payload, self._rid)
        reason = meta.get("finish_reason")
        if reason is not None and (not isinstance(reason, dict) or "type" not in reason):
            refuse(f"finish_reason is {reason!r}")
        if reason is not None and reason["type"] == "abort":
            _raise_abort_with_status(reason)
        ids, logprobs = self._new_tokens(payload, meta, reason)
        version = self._version_of(meta, len(ids))
        self._ids.extend(ids)
        self._weights.add(len(ids), version)
        finish = None if reason is None else self._finish(meta, reason)
        self.finished = finish is not None
        if not ids and finish is None:
            return None
        return EngineChunk(np.array(ids, np.int32), finite(logprobs), finish, version)

    def _version_of(self, meta: Mapping[str, Any], count: int) -> str | None:
        """The weights of the ``count`` tokens that follow those seen so far, None where they are not certain."""
        if meta.get("weight_versions") is not None:
            seen = len(self._ids)
            named = {
                span.version
                for span in _listed_spans(meta["weight_versions"])
                if span.end > seen and span.start < seen + count
            }
            return named.pop() if len(named) == 1 else None
        stated = meta.get("weight_version")
        version = None if stated is None else version_name(stated)
        certain = version if version == self._version else None
        self._version = version
        return certain

    def _new_tokens(
        self, payload: Mapping[str, Any], meta: Mapping[str, Any], reason: Mapping[str, Any] | None
    ) -> tuple[list[int], list[float]]:
        seen = len(self._ids)
        entries = meta.get("output_token_logprobs")
        total = meta.get("completion_tokens")
        aborted = reason is not None and reason["type"] == "abort"
        if not entries and aborted and total in (None, 0, seen):
            # A call aborted in the queue (before its first step, or after a pause put it back) has a reduced
            # meta_info, which need not count the tokens of the chunks before.
            entries, total = [], seen
        if total is None:
            refuse("a reply has no completion_tokens")
        if not isinstance(total, int) or isinstance(total, bool) or total < seen:
            refuse(f"completion_tokens is {total!r} after {seen} tokens")
        if not isinstance(entries, list):
            refuse("a reply has no output_token_logprobs")
        count = len(entries)
        if count == total:
            new = entries[seen:]
            if seen and entry_id(entries[seen - 1]) != self._ids[-1]:
                refuse("a cumulative chunk repeats other tokens than were sent before")
        elif seen + count == total:
            new = entries
        else:
            refuse(f"{count} logprobs do not fit completion_tokens {total} after {seen} tokens")
        ids = [entry_id(entry) for entry in new]
        self._check_output_ids(payload.get("output_ids"), ids, total, aborted)
        return ids, [entry_logprob(entry) for entry in new]

    def _check_output_ids(self, output_ids: Any, new: list[int], total: int, aborted: bool) -> None:
        if output_ids is None:
            return
        if not isinstance(output_ids, list):
            refuse("output_ids is not a list")
        everything = [*self._ids, *new] if len(output_ids) == total else new
        # An abort out of the waiting queue repeats the last id only (tokenizer_manager._handle_abort_req).
        expected = everything[-1:] if aborted and len(output_ids) <= 1 < len(everything) else everything
        if aborted and not output_ids:
            return
        if aborted and not expected and output_ids == self._ids[-1:]:
            return
        if output_ids != expected:
            refuse(f"output_ids ({len(output_ids)}) and the ids of output_token_logprobs ({len(expected)}) differ")

    def _finish(self, meta: Mapping[str, Any], reason: Mapping[str, Any]) -> EngineFinish:
        kind = reason["type"]
        if kind not in ("stop", "length", "abort"):
            refuse(f"it has the unknown finish reason {kind!r}")
        matched = reason.get("matched")
        if isinstance(matched, bool) or not isinstance(matched, int | str):
            matched = None
        cached = meta.get("cached_tokens")
        return EngineFinish(
            reason=_FINISH[kind],
            matched=matched,
            weight_spans=self._all_spans(meta, aborted=kind == "abort"),
            cached_tokens=cached if isinstance(cached, int) else None,
        )

    def _all_spans(self, meta: Mapping[str, Any], *, aborted: bool) -> tuple[WeightSpan, ...]:
        """Spans over all tokens: ``weight_versions``, else one span of ``weight_version``.

        An abort in the queue repeats neither for the tokens that were sent before; then the chunks' versions
        count. Any other reply without them: EngineProtocolError, because a token whose weights are unknown
        cannot be trained on.
        """
        count = len(self._ids)
        if count == 0:
            return ()
        listed = meta.get("weight_versions")
        spans = () if listed is None else _listed_spans(listed)
        covered = spans[-1].end if spans else 0
        if aborted and covered != count:
            return self._weights.spans
        if listed is None:
            version = meta.get("weight_version")
            if version is None:
                refuse("a reply has neither weight_versions nor weight_version (SGLang 0.5 or newer is needed)")
            return (WeightSpan(start=0, end=count, version=version_name(version)),)
        if covered != count:
            refuse(f"weight_versions cover {covered} of {count} tokens")
        return spans


_FINISH: Final[dict[str, Literal["stop", "length", "abort"]]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


def _listed_spans(listed: Any) -> tuple[WeightSpan, ...]:
    """``weight_versions``: spans without a gap from position 0."""
    if not isinstance(listed, list):
        refuse("weight_versions is not a list")
    result: list[WeightSpan] = []
    position = 0
    for span in listed:
        if not isinstance(span, dict) or not {"version", "start", "end"} <= span.keys():
            refuse(f"a weight span is {span!r}")
        start, end = span["start"], span["end"]
        if not isinstance(start, int) or not isinstance(end, int) or start != position or end < start:
            refuse(f"weight span [{start!r}, {end!r}) does not continue at {position}")
        if end > start:
            result.append(WeightSpan(start=start, end=end, version=version_name(span["version"])))
        position = end
    return tuple(result)


def meta_of(payload: Any, rid: str) -> Mapping[str, Any]:
    """``meta_info`` of a reply to the call ``rid``. On a connection whose requests and replies are out of step (a
    proxy sent one of them twice) the next reply is that of another call, whole and right for it."""
    if not isinstance(payload, dict):
        refuse(f"a reply is {type(payload).__name__}, not an object")
    meta = payload.get("meta_info")
    if not isinstance(meta, dict):
        refuse("a reply has no meta_info")
    answered = meta.get("id", rid)
    if answered != rid:
        refuse(f"it answers the call {str(answered)[:MESSAGE_CHARS]!r}, not {rid!r}")
    return meta


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


def _raise_abort_with_status(reason: Mapping[str, Any]) -> None:
    status = reason.get("status_code")
    if status is None:
        return
    message = str(reason.get("message"))[:MESSAGE_CHARS]
    if status == 400:
        raise EngineRefused(f"The engine refused the request: {message}", detail={"engine_status": status})
    raise EngineUnavailable(f"The engine gave the call up ({status}): {message}", detail={"engine_status": status})


def _reported_error(error: Any) -> TurnstileError:
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 400
    return error_for_status(status, orjson.dumps({"error": error}))
