"""An ended episode as the turns of an OpenEnv training trace. Pure; imports nothing of openenv.

The fields are those of ``openenv.core.harness.training.TrainingTurn`` (openenv 0.10.0). What must hold:

- Tokens, mask and log-probabilities are those of the exported samples. Nothing is tokenized again.
- Each trained turn is in the trace once, in the path that trains it, although other paths begin with it.
- The turns of one path stand together, in order. TRL compares a turn with its last row only
  (``_chain_to_sequences``, TRL 1.16.0), so each path with something to train becomes at most one row.
- Paths of the main conversation stand last: TRL takes the trace's last turn for the end of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import numpy as np

from turnstile.exporters.chat import conversation, openai_message
from turnstile.models import Sample, SampleSet, TurnFacts, TurnSpan


class TurnFields(TypedDict):
    """The fields of one ``TrainingTurn``: a prompt of p tokens and a completion of m.

    ``per_token_logps``: m natural logarithms, none above 0. ``loss_mask``: p + m, 0 for the prompt and for sampled
    ids that are not trained (``Turn.without_token``). ``request`` and ``response``: as OpenAI's chat completions,
    without the offered tools, which are not recorded with the turn.
    """

    node_id: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any]
    response: dict[str, Any]
    metadata: dict[str, Any]


def training_turns(exported: SampleSet, turns: Iterable[TurnFacts]) -> list[TurnFields]:
    """The trained turns of an episode. ``turns``: its turns, with or without their arrays.

    Raises KeyError for a trained turn that is not among ``turns``: the two are not of one episode.
    """
    recorded = {turn.turn_id: turn for turn in turns}
    paths = sorted(exported.samples, key=lambda sample: sample.kind == "main")
    return [
        _fields(sample, span, branch, recorded)
        for branch, sample in enumerate(paths)
        for span in sample.turn_spans
        if span.trained
    ]


def _fields(sample: Sample, span: TurnSpan, branch: int, recorded: Mapping[str, TurnFacts]) -> TurnFields:
    turn = recorded[span.turn_id]
    completion = slice(span.start, span.end)
    # An engine's float32 may lie a rounding above 0, which the contract refuses.
    logprobs = np.minimum(sample.logprobs[completion], 0.0)
    return TurnFields(
        node_id=span.turn_id,
        prompt_token_ids=sample.input_ids[: span.start].tolist(),
        completion_token_ids=sample.input_ids[completion].tolist(),
        per_token_logps=logprobs.tolist(),
        loss_mask=[0] * span.start + sample.loss_mask[completion].tolist(),
        request=_request(turn, recorded),
        response=_response(turn, span),
        metadata=_metadata(turn, sample, branch),
    )


def _request(turn: TurnFacts, recorded: Mapping[str, TurnFacts]) -> dict[str, Any]:
    """The messages, and the sampling that was used: the agent's own wishes are not followed."""
    used = turn.sampling
    return {
        "messages": conversation(turn, recorded),
        "temperature": used.temperature,
        "top_p": used.top_p,
        "top_k": used.top_k,
        "min_p": used.min_p,
        "max_tokens": used.max_new_tokens,
        **({"stop": list(used.stop)} if used.stop else {}),
    }


def _response(turn: TurnFacts, span: TurnSpan) -> dict[str, Any]:
    ended_by_calls = turn.finish_reason == "stop" and turn.reply.tool_calls
    message, prompt, completion = openai_message(turn.reply), span.start, span.end - span.start
    return {
        "id": turn.turn_id,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if ended_by_calls else turn.finish_reason,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }


def _metadata(turn: TurnFacts, sample: Sample, branch: int) -> dict[str, Any]:
    """``branch``: number of the path within the trace. ``weight_versions``: ``[start, end)`` of the completion and
    the name of the weights that sampled it."""
    return {
        "turn_id": turn.turn_id,
        "seq": turn.seq,
        "episode_id": sample.episode_id,
        "sample_id": sample.sample_id,
        "branch": branch,
        "kind": sample.kind,
        "weight_versions": [
            {"start": span.start, "end": span.end, "version": span.version} for span in turn.weight_spans
        ],
    }
