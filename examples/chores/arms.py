"""What a learner is given of the same rollouts: the recorded tokens, or what others make of the transcript.

    exact       the rows of the gate: ids, mask and log-probabilities as they were sampled
    retokenized the transcript, rendered by the chat template with all thoughts and tokenized again
    stock       the transcript, rendered by the template as it ships: it drops the thoughts of earlier replies
    per_call    the recorded tokens, one row for each model call, with nothing merged

``retokenized`` and ``stock`` have no recorded log-probabilities that fit their tokens: the learner computes them
before the step, as trainers do (verl's ``old_log_prob``, TRL without an importance correction).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from turnstile.exporters.chat import conversation, openai_message
from turnstile.models import Sample, TurnFacts

ARMS: Final = ("exact", "retokenized", "stock", "per_call")
RENDERED: Final = frozenset({"retokenized", "stock"})
_REPLY: Final = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
"""A reply as the template writes it, with the token that ends it."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """An episode's model calls as its agent knows them: messages, no tokens. ``tools``: their schemas."""

    turns: Sequence[TurnFacts]
    tools: Sequence[dict[str, Any]]


def rows_of_arm(
    arm: str, samples: Sequence[Sample], transcript: Transcript, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """The rows that the learner trains in place of ``samples``, those of one rollout. Log-probabilities of
    rendered rows are 0 and must be computed."""
    match arm:
        case "exact":
            return list(samples)
        case "per_call":
            return [row for sample in samples for row in _per_call(sample)]
        case "retokenized" | "stock":
            keep = arm == "retokenized"
            return list(_rendered(samples[0], transcript, tokenizer, keep_thinking=keep))
    raise ValueError(f"there is no arm {arm!r}: take one of {', '.join(ARMS)}")


def runs(mask: npt.NDArray[np.uint8]) -> list[tuple[int, int]]:
    """The half-open spans in which ``mask`` is 1: the replies of a row."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _per_call(sample: Sample) -> Iterator[Sample]:
    for start, end in runs(sample.loss_mask):
        mask = np.zeros(end, np.uint8)
        mask[start:] = 1
        yield sample.model_copy(
            update={
                "input_ids": sample.input_ids[:end],
                "loss_mask": mask,
                "logprobs": np.where(mask, sample.logprobs[:end], 0).astype(np.float32),
            }
        )


def _rendered(
    like: Sample, transcript: Transcript, tokenizer: PreTrainedTokenizerBase, *, keep_thinking: bool
) -> Iterator[Sample]:
    """A row for each conversation, which is trained to its last reply."""
    recorded = {turn.turn_id: turn for turn in transcript.turns}
    gone_on = {turn.parent_id for turn in transcript.turns}
    for last in (turn for turn in transcript.turns if turn.turn_id not in gone_on):
        messages = [*conversation(last, recorded), openai_message(last.reply)]
        text = tokenizer.apply_chat_template(
            messages, tools=list(transcript.tools), tokenize=False, keep_thinking=keep_thinking
        )
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(found["input_ids"], np.int32)
        starts = np.asarray([start for start, _ in found["offset_mapping"]])
        mask = np.zeros(len(ids), np.uint8)
        for reply in _REPLY.finditer(str(text)):
            mask[(starts >= reply.start(1)) & (starts < reply.end(1))] = 1
        yield like.model_copy(
            update={"input_ids": ids, "loss_mask": mask, "logprobs": np.zeros(len(ids), np.float32)}
        )
