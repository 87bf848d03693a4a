"""A sample: one root-to-leaf path of an episode's token tree, in the shape a trainer consumes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from turnstile.models.arrays import Floats, Indices, Mask, TokenIds
from turnstile.models.base import SCHEMA_VERSION, Model
from turnstile.models.episode import EpisodeStats
from turnstile.models.experts import Experts
from turnstile.models.turn import FinishReason

SampleKind = Literal["main", "subagent", "compaction", "retry", "auxiliary"]
SampleStatus = Literal["completed", "truncated", "aborted", "failed"]


class Cause(Model):
    """The turn that caused a conversation.

    ``by`` says how that is known. ``summary``: the conversation begins with that turn's reply (a compaction).
    ``call``: it begins with an argument of one of that turn's calls (a sub-agent). ``thread``: the agent's own
    headers name the turn's conversation as the parent of this one; the turn is its latest before this one.
    """

    turn_id: str
    by: Literal["call", "summary", "thread"]


class TurnSpan(Model):
    """The position of one turn in a sample: context ``[context_start, start)``, completion ``[start, end)``.

    ``trained``: the loss mask is 1 here (each completion is trained in at most one sample), but for ids that the
    tokenizer has no token for (``Turn.without_token``).
    """

    turn_id: str
    context_start: int
    start: int
    end: int
    trained: bool


def turn_rewards_of(rewards: Iterable[float | None]) -> tuple[float | None, ...]:
    """The ``turn_rewards`` of a row, from those of its turns in order."""
    found = tuple(rewards)
    return found if any(reward is not None for reward in found) else ()


class Sample(Model):
    """One row for a trainer. All arrays have length T.

    ``input_ids`` int32, ``loss_mask`` uint8 (1 = sampled by the policy and trainable here), ``logprobs``
    float32 (0.0 where the mask is 0), ``weight_version`` int32 (index into ``weight_version_names``, −1 where
    the token was not sampled by the policy). As JSON (also in JSONL files) ``weight_version`` has the
    names themselves, and null in place of −1.
    """

    schema_version: int = SCHEMA_VERSION
    sample_id: str
    input_ids: TokenIds
    loss_mask: Mask
    logprobs: Floats
    weight_version: Indices
    weight_version_names: tuple[str, ...]
    routed_experts: Experts = None
    """uint8 or uint16 [T - 1, layers, top_k]: the experts that each token went through but the last, which no call
    fed. None where they were not recorded for every token."""
    turn_spans: tuple[TurnSpan, ...]
    kind: SampleKind
    caused_by: Cause | None = None
    """The turn that caused the row's conversation; None for the main one, and if it is not known."""
    episode_id: str
    group_id: str | None = None
    rollout_id: str
    attempt: int = 0
    reward: float | None = None
    turn_rewards: tuple[FiniteFloat | None, ...] = ()
    """One for each of ``turn_spans``, None for a turn without one; empty where no turn of the row has one."""
    finish_reason: FinishReason
    status: SampleStatus
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = {len(self.input_ids), len(self.loss_mask), len(self.logprobs), len(self.weight_version)}
        if len(lengths) != 1:
            raise ValueError(f"arrays of a sample differ in length: {sorted(lengths)}")
        if self.turn_rewards and len(self.turn_rewards) != len(self.turn_spans):
            raise ValueError(f"{len(self.turn_rewards)} turn rewards for {len(self.turn_spans)} turns")
        if self.routed_experts is not None and len(self.routed_experts) != len(self.input_ids) - 1:
            raise ValueError(
                f"{len(self.routed_experts)} rows of experts for {len(self.input_ids)} tokens: one less is right"
            )
        return self


class Untrained(Model):
    """Sampled tokens of a turn that no sample trains, and why.

    ``id_without_token``: those of ``Turn.without_token``, whatever becomes of the rest of the turn. With any other
    reason it is all the rest of the completion.
    """

    turn_id: str
    tokens: int
    reason: str


class SampleSet(Model):
    """Everything ``GET /episodes/{id}/samples`` gives: the rows, the accounted rest, the statistics."""

    schema_version: int = SCHEMA_VERSION
    samples: tuple[Sample, ...]
    untrained: tuple[Untrained, ...]
    stats: EpisodeStats
