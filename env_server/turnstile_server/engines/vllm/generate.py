"""The wire format of vLLM's ``/inference/v1/generate``: requests to bytes, replies to recorded tokens. Pure.

What must hold: ids and logprobs agree in number with each other and with ``usage``; the prompt that vLLM counted
is as long as the one that was sent; every logprob is finite and is none that vLLM fills in (``MISSING_LOGPROB``);
the weight spans tile the output. Anything else is an EngineProtocolError; no number is ever filled in.

Source of the format: vllm 0.32.0, ``entrypoints/scale_out/token_in_token_out/`` (``protocol.py``, ``serving.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import orjson

from turnstile.models import Float32Array, Int32Array, WeightSpan
from turnstile_server.engines.prompt_json import with_ids
from turnstile_server.engines.protocol import ABOVE_ZERO, EngineChunk, EngineFinish, EngineSampling
from turnstile_server.engines.replies import (
    INT32_MAX,
    MESSAGE_CHARS,
    error_for_status,
    finite,
    refuse,
    version_name,
)
from turnstile_server.errors import EngineUnavailable

ID_PREFIX: Final = "generate-tokens-"
"""vLLM puts this before the ``request_id`` of a call. An abort without it does nothing, and answers 200."""

NEUTRAL: Final = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
}
"""Sampling parameters that no call changes. They are sent all the same: vLLM takes those that a call leaves out
from its defaults (``--override-generation-config``), and the logprobs must be those of the plain policy."""

MISSING_LOGPROB: Final = -9999.0
"""The value that vLLM sends for a logprob that is missing, NaN or -inf."""

_FINISH: Final[dict[str, Literal["stop", "length", "abort"]]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


def generate_body(
    input_ids: Sequence[bytes],
    sampling: EngineSampling,
    *,
    rid: str,
    stream: bool,
    cache_salt: str,
    priority: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """The JSON body of one call, in pieces. ``input_ids``: the ids as JSON, in pieces (``prompt_json``).
    ``extra``: more fields of ``sampling_params``.

    Every field that changes the numbers is written: vLLM ignores unknown ones in silence, and takes those that are
    left out from defaults (``max_tokens`` is then the rest of the context).
    """
    parameters: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),  # 0 is off, as our -1 is
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # that of the sampled token alone
        "skip_special_tokens": False,  # else special tokens are no part of a stop string
        "spaces_between_special_tokens": False,
        **NEUTRAL,
    }
    if sampling.json_schema is not None:
        parameters["structured_outputs"] = {"json": sampling.json_schema}
    elif sampling.structural_tag is not None:
        parameters["structured_outputs"] = {"structural_tag": sampling.structural_tag}
    body: dict[str, Any] = {
        "request_id": rid,
        "sampling_params": {**parameters, **(extra or {})},
        "cache_salt": cache_salt,
        "stream": stream,
    }
    if priority:
        body["priority"] = priority
    if stream:
        body["stream_options"] = {"include_usage": True}
    return with_ids("token_ids", input_ids, body)


class StreamReader:
    """Turns the payloads of the streamed call ``rid`` into chunks.

    vLLM sends each chunk's new tokens, the weight spans with the finish reason, and the counts in a chunk without
    choices after that. The last tokens and the finish are given out when the counts have come and agree.
    ``prompt``: tokens that were sent.
    """

    def __init__(self, rid: str, prompt: int) -> None:
        self._rid = rid
        self._prompt = prompt
        self._count = 0
        self._last: EngineChunk | None = None

    def read(self, payload: Any) -> EngineChunk | None:
        """The new tokens in ``payload``; None when it brings none. Raises EngineProtocolError, and the error that
        vLLM reports in a stream whose status is 200: EngineRefused for a code of 400, else EngineUnavailable."""
        _raise_reported(payload)
        reply = _reply_of(payload, self._rid)
        if reply["choices"] == []:
            return self._counted(reply)
        if self._last is not None:
            refuse("it continued after its finish reason")
        choice = _choice_of(reply)
        ids, logprobs = _tokens_of(choice)
        self._count += len(ids)
        finish = _finish_of(choice, ids, self._count)
        chunk = EngineChunk(np.array(ids, np.int32), finite(logprobs), finish)
        if finish is None:
            return chunk if ids else None
        self._last = chunk
        return None

    def _counted(self, reply: Mapping[str, Any]) -> EngineChunk:
        if self._last is None or self._last.finish is None:
            refuse("its counts came before its finish reason")
        cached = _checked_usage(reply, self._prompt, self._count)
        last, finish = self._last, self._last.finish
        return EngineChunk(last.ids, last.logprobs, _with_cached(finish, cached))


def read_whole(payload: Any, rid: str, prompt: int) -> EngineChunk:
    """The one chunk of an unstreamed call. ``prompt``: tokens that were sent."""
    _raise_reported(payload)
    reply = _reply_of(payload, rid)
    choice = _choice_of(reply)
    ids, logprobs = _tokens_of(choice)
    finish = _finish_of(choice, ids, len(ids))
    if finish is None:
        refuse("it has no finish reason")
    cached = _checked_usage(reply, prompt, len(ids))
    return EngineChunk(np.array(ids, np.int32), finite(logprobs), _with_cached(finish, cached))


def prompt_logprobs(payload: Any, rid: str, input_ids: Int32Array, start: int) -> Float32Array:
    """float32[len - start] from a reply to ``prompt_logprobs: 0``, at temperature 1 whatever was asked."""
    _raise_reported(payload)
    rows = _reply_of(payload, rid).get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(input_ids):
        count = len(rows) if isinstance(rows, list) else None
        refuse(f"it gave {count} prompt logprobs for {len(input_ids)} positions")
    values = []
    for row, token in zip(rows[start:], input_ids[start:].tolist(), strict=True):
        entry = row.get(str(token)) if isinstance(row, dict) else None
        if not isinstance(entry, dict):
            refuse("its prompt logprobs are of other ids than were sent")
        values.append(_logprob(entry.get("logprob")))
    return finite(values)


def named_logprob(payload: Any, rid: str, token: int) -> float:
    """The logprob of ``token`` at the first output position, from a reply to ``logprob_token_ids``."""
    _raise_reported(payload)
    entries = _entries_of(_choice_of(_reply_of(payload, rid)))
    listed = entries[0].get("top_logprobs") if len(entries) == 1 and isinstance(entries[0], dict) else None
    named = [
        entry
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and entry.get("token_id") == token
    ]
    if not named:
        refuse("it lacks the logprob of the id that was asked")
    return _logprob(named[0].get("logprob"))


def _raise_reported(payload: Any) -> None:
    if isinstance(payload, dict) and "error" in payload:
        error = payload["error"]
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 400
        raise error_for_status(status, orjson.dumps({"error": error}))


def _reply_of(payload: Any, rid: str) -> Mapping[str, Any]:
    if not isinstance(payload, dict):
        refuse(f"a reply is {type(payload).__name__}, not an object")
    answered = payload.get("request_id")
    if answered != f"{ID_PREFIX}{rid}":
        refuse(f"it answers the call {str(answered)[:MESSAGE_CHARS]!r}, not {ID_PREFIX}{rid}")
    if not isinstance(payload.get("choices"), list):
        refuse("it has no choices")
    return payload


def _choice_of(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = reply["choices"]
    if len(choices) != 1 or not isinstance(choices[0], dict) or choices[0].get("index") != 0:
        refuse(f"it has {len(choices)} choices, or another one than was asked for")
    choice: Mapping[str, Any] = choices[0]
    return choice


def _entries_of(choice: Mapping[str, Any]) -> list[Any]:
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list):
        refuse("it has no logprobs")
    return entries


def _tokens_of(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """The new ids of a choice and their logprobs."""
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        refuse("it has no token_ids")
    if not ids and choice.get("logprobs") is None:  # a call that ended before its first token
        return [], []
    entries = _entries_of(choice)
    if len(entries) != len(ids):
        refuse(f"it has {len(ids)} token_ids and {len(entries)} logprobs")
    logprobs = []
    for token, entry in zip(ids, entries, strict=True):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= INT32_MAX:
            refuse(f"a sampled id is {token!r}")
        if not isinstance(entry, dict) or entry.get("token_id") != token:
            refuse("its logprobs are of other ids than token_ids")
        logprobs.append(_logprob(entry.get("logprob")))
    return ids, logprobs


def _logprob(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(f"a logprob is {value!r}")
    if value == MISSING_LOGPROB:
        refuse(f"a logprob is {MISSING_LOGPROB}, which vLLM writes for one that is missing, NaN or -inf")
    if value > ABOVE_ZERO:
        refuse(f"a logprob is {value!r}, a probability above 1")
    return float(value)


def _finish_of(choice: Mapping[str, Any], ids: list[int], count: int) -> EngineFinish | None:
    """``ids``: those of this chunk. ``count``: tokens of the whole output."""
    reason = choice.get("finish_reason")
    if reason is None:
        return None
    if reason == "error":
        raise EngineUnavailable("The engine gave the call up (finish reason error); its log says why.")
    if reason not in _FINISH:
        refuse(f"it has the unknown finish reason {reason!r}")
    matched = choice.get("stop_reason")
    if isinstance(matched, bool) or not isinstance(matched, int | str):
        # vLLM names no stop for the model's own end token, which is then the last token.
        matched = ids[-1] if reason == "stop" and ids else None
    return EngineFinish(_FINISH[reason], matched, _spans_of(choice, count))


def _spans_of(choice: Mapping[str, Any], count: int) -> tuple[WeightSpan, ...]:
    listed = choice.get("weight_versions")
    if count == 0:
        return ()
    if not isinstance(listed, list):
        refuse("it has no weight_versions (vLLM 0.32 or newer is needed)")
    spans: list[WeightSpan] = []
    position = 0
    for span in listed:
        if not isinstance(span, dict) or not {"version", "start", "end"} <= span.keys():
            refuse(f"a weight span is {span!r}")
        start, end = span["start"], span["end"]
        if not isinstance(end, int) or start != position or end < position:
            refuse(f"weight span [{start!r}, {end!r}) does not continue at {position}")
        if end > start:
            spans.append(WeightSpan(start=start, end=end, version=version_name(span["version"])))
        position = end
    if position != count:
        refuse(f"weight_versions cover {position} of {count} tokens")
    return tuple(spans)


def _checked_usage(reply: Mapping[str, Any], prompt: int, completion: int) -> int | None:
    """Compares vLLM's counts with ours; returns the prompt tokens that its prefix cache had, None where it does
    not say (it does with ``--enable-prompt-tokens-details``)."""
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        refuse("it has no usage")
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if counts != (prompt, completion) and not (completion == 0 and counts[1] == 0):
        refuse(f"it counts {counts[0]} prompt and {counts[1]} new tokens; {prompt} were sent, {completion} came")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


def _with_cached(finish: EngineFinish, cached: int | None) -> EngineFinish:
    return EngineFinish(finish.reason, finish.matched, finish.weight_spans, cached)
