"""The wire format of SGLang's native ``/generate``: requests to bytes, replies to recorded tokens. Pure.

What must hold: ids and logprobs come from ``meta_info.output_token_logprobs`` alone, agree in number with
``completion_tokens`` and in value with ``output_ids``, and are finite; a reply that names a call
(``meta_info.id``) is the reply to that call. Anything else is an EngineProtocolError; no number is ever filled in.

Source of the format: sglang 0.5.23, ``srt/entrypoints/http_server.py`` (``/generate``, SSE frames, error
bodies) and ``srt/managers/tokenizer_manager.py`` (``meta_info``, cumulative and incremental chunks, aborts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import orjson

from turnstile.models import WeightSpan
from turnstile_server.engines.call_checks import outside_vocabulary
from turnstile_server.engines.prompt_json import with_ids
from turnstile_server.engines.protocol import EngineChunk, EngineFinish, EngineSampling
from turnstile_server.engines.replies import (
    MESSAGE_CHARS,
    entry_id,
    error_for_status,
    read_entries,
    refuse,
    version_name,
)
from turnstile_server.engines.sglang.calls import LiveCall
from turnstile_server.engines.sglang.experts import ExpertRequest
from turnstile_server.engines.weight_spans import WeightSpans
from turnstile_server.engines.weights import adapter_version
from turnstile_server.errors import EngineRefused, EngineUnavailable, TurnstileError

NEUTRAL: Final = {
    "n": 1,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "logit_bias": None,
}
"""Sampling parameters that no call changes. They are sent all the same: SGLang takes those that a call leaves out
from its ``preferred_sampling_params`` (``tokenizer_manager.py``), and the logprobs must be those of the plain
policy."""


def generate_body(
    input_ids: Sequence[bytes],
    sampling: EngineSampling,
    *,
    rid: str,
    stream: bool,
    prefix_key: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """The JSON body of one call, in pieces. ``input_ids``: the ids as JSON, in pieces (``prompt_json``).

    ``prefix_key``: calls share a cached prefix only under equal ones. ``extra``: more top-level fields
    (``logprob_start_len`` and the like).
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
        **NEUTRAL,
    }
    if sampling.json_schema is not None:
        parameters["json_schema"] = sampling.json_schema
    if sampling.structural_tag is not None:
        parameters["structural_tag"] = sampling.structural_tag
    body: dict[str, Any] = {
        "rid": rid,
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": stream,
        **(extra or {}),
    }
    if sampling.grammar_from is not None:
        body["grammar_from"] = sampling.grammar_from  # our own worker's
    if prefix_key is not None:
        body["extra_key"] = prefix_key
    if sampling.adapter is not None:
        body["lora_path"] = sampling.adapter  # the name under which it was loaded
    return with_ids("input_ids", input_ids, body)


class ReplyReader:
    """Turns the payloads of the call ``rid`` into chunks; streamed calls feed many, unstreamed ones feed one.

    The chunk style is read off the counts: with ``completion_tokens`` C, n logprobs in this chunk and s tokens
    seen so far, ``n == C`` is cumulative (the chunk repeats all output) and ``s + n == C`` incremental. Both
    hold only where they mean the same.

    ``version`` names the weights that the server was known to have when the call was sent, None where that is
    not known. A chunk says which weights the server had when it sent the chunk. Its tokens may be older, by as
    many as waited in the server's queues, so they have that version only if it is ``version`` and no chunk before
    named another one. Of the others only the end says which weights sampled them.

    ``call``: knows which tokens are ``stale_kv``; None: none are. ``adapter``: part of the name of the weights.
    ``experts``: the routing that was asked for. ``vocab_size``: no id may be as large; None: not checked here.
    """

    def __init__(
        self,
        rid: str,
        version: str | None,
        *,
        call: LiveCall | None = None,
        adapter: str | None = None,
        experts: ExpertRequest | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.finished = False
        self._vocab_size = vocab_size
        self._experts = experts
        self._rid = rid
        self._call = call
        self._adapter = adapter
        self._cached_tokens: int | None = None
        self._ids: list[int] = []
        self._version = version
        """The weights that the server had when the call was sent, while no chunk names others."""
        self._weights = WeightSpans()
        self._said: tuple[str, str | None] | None = None
        """The version that the event before stated and the name of its weights; None where the next may be of
        others for another reason."""

    def read(self, payload: Any) -> EngineChunk | None:
        """The new tokens in ``payload``; None when it brings neither tokens nor the end.

        Raises EngineProtocolError, and the errors that the engine reports inside a reply: EngineRefused for a
        status of 400, else EngineUnavailable.
        """
        return next(self.read_all(iter((payload,))), None)

    def read_all(self, payloads: Iterator[Any]) -> Iterator[EngineChunk]:
        """The new tokens in ``payloads``, up to the end, in as few chunks as say the same: tokens of one chunk
        have one version, and are all ``stale_kv`` or none. Raises as ``read`` does, after the chunks of the
        payloads before."""
        ids: list[int] = []
        logprobs: list[float] = []
        about: tuple[str | None, bool] = (None, False)
        finish: EngineFinish | None = None
        failure: TurnstileError | None = None
        try:
            for payload in payloads:
                more, their_logprobs, said, finish = self._piece(payload)
                if ids and more and said != about:
                    yield self._chunk(ids, logprobs, about, None)
                    ids, logprobs = [], []
                if more or not ids:
                    about = said
                ids += more
                logprobs += their_logprobs
                if finish is not None:
                    break
        except TurnstileError as error:
            failure = error
        if ids or finish is not None:
            yield self._chunk(ids, logprobs, about, finish)
        if failure is not None:
            raise failure

    def _chunk(
        self, ids: list[int], logprobs: list[float], about: tuple[str | None, bool], finish: EngineFinish | None
    ) -> EngineChunk:
        return EngineChunk(np.array(ids, np.int32), np.array(logprobs, np.float32), finish, *about)

    def _piece(self, payload: Any) -> tuple[list[int], list[float], tuple[str | None, bool], EngineFinish | None]:
        """The new ids of one payload, their logprobs, what is known of their weights (their name, and whether
        they are ``stale_kv``), and the finish."""
        if (ordinary := self._ordinary(payload)) is not None:
            return *ordinary, None
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
        if ids and self._vocab_size is not None and max(ids) >= self._vocab_size:
            raise outside_vocabulary(max(ids), self._vocab_size)
        cached = meta.get("cached_tokens")
        self._cached_tokens = cached if isinstance(cached, int) else self._cached_tokens
        version = self._version_of(meta, len(ids))
        stale_kv = self._stale_kv(version, len(self._ids))
        self._ids.extend(ids)
        named = None if version is None else adapter_version(version, self._adapter)
        stated = meta.get("weight_version")
        if isinstance(stated, str) and meta.get("weight_versions") is None and not stale_kv:
            self._said = stated, named
        else:
            self._said = None
        self._weights.add(len(ids), named, stale_kv)
        finish = None if reason is None else self._finish(meta, reason)
        self.finished = finish is not None
        return ids, logprobs, (named, stale_kv), finish

    def _ordinary(self, payload: Any) -> tuple[list[int], list[float], tuple[str | None, bool]] | None:
        """As ``_piece``, for an event that only brings more tokens of the weights that the one before named, as
        most events of a stream do: it costs a third of the way for all. None, with nothing changed: any other."""
        said, known = self._said, self._ids
        meta = payload.get("meta_info") if type(payload) is dict else None
        if said is None or not known or self.finished or type(meta) is not dict or "error" in payload:
            return None
        entries, total = meta.get("output_token_logprobs"), meta.get("completion_tokens")
        if (
            type(entries) is not list
            or type(total) is not int
            or total <= (seen := len(known))
            or meta.get("weight_version") != said[0]
            or meta.get("finish_reason") is not None
            or meta.get("weight_versions") is not None
            or meta.get("cached_tokens") != self._cached_tokens
            or meta.get("id", self._rid) != self._rid
            or (self._call is not None and self._call.in_place)
        ):
            return None
        if len(entries) == total and entry_id(entries[seen - 1]) == known[-1]:
            entries = entries[seen:]
        elif len(entries) != total - seen:
            return None
        ids, logprobs = read_entries(entries)
        repeated = payload.get("output_ids")
        if repeated is not None and repeated not in (ids, [*known, *ids]):
            return None
        if self._vocab_size is not None and max(ids) >= self._vocab_size:
            return None
        known += ids
        self._weights.add(len(ids), said[1])
        return ids, logprobs, (said[1], False)

    def _stale_kv(self, version: str | None, start: int) -> bool:
        return self._call is not None and self._call.stale_kv(version, start, self._cached_tokens or 0)

    def _marked(self, span: WeightSpan) -> WeightSpan:
        """A span of the engine's weights as it is recorded: with the adapter, and whether its cache was older."""
        return WeightSpan(
            start=span.start,
            end=span.end,
            version=adapter_version(span.version, self._adapter),
            stale_kv=self._stale_kv(span.version, span.start),
        )

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
        if version != self._version:
            self._version = None
        return self._version

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
        ids, logprobs = read_entries(new)
        self._check_output_ids(payload.get("output_ids"), ids, total, aborted)
        return ids, logprobs

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
        aborted, asked = kind == "abort", self._experts
        return EngineFinish(
            reason=_FINISH[kind],
            matched=matched,
            weight_spans=self._all_spans(meta, aborted=aborted),
            cached_tokens=self._cached_tokens,
            routed_experts=None if asked is None else asked.read(meta, len(self._ids), aborted=aborted),
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
            return (self._marked(WeightSpan(start=0, end=count, version=version_name(version))),)
        if covered != count:
            refuse(f"weight_versions cover {covered} of {count} tokens")
        return tuple(map(self._marked, spans))


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
