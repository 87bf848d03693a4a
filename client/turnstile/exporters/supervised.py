"""Rollouts as data for supervised fine-tuning and preference losses: tokens as they were sampled, or chats.

Tokens are exact: nothing is rendered or tokenized again, and a token is trained where a trainer of the policy
would train it. A chat is rendered by the trainer's own template, so its tokens may be others; it is the way for
another model than the one that sampled, and for a hosted one, which has no tokens here.

The columns are those of TRL 1.16 (``SFTTrainer``, ``DPOTrainer``); collators of transformers take ``input_ids``
and ``labels``, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnstile.exporters.chat import conversation, openai_message
from turnstile.exporters.trained_rows import response_start, trained_rows
from turnstile.groups import by_group
from turnstile.models import BreakReason, EpisodeStatus, Sample, TurnFacts
from turnstile.rollout import Rollout

IGNORED = -100
"""The label of a token that is not trained (torch's ``cross_entropy``)."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Which rollouts are imitated. ``min_reward``: their least reward. ``max_tokens``: no row is longer.
    ``broken``: also those with a call that did not continue what the model had been fed (that of a sub-agent
    begins, and is none). ``completed``: only those
    whose agent ended by itself."""

    min_reward: float = 1.0
    max_tokens: int | None = None
    broken: bool = False
    completed: bool = True

    def takes(self, rollout: Rollout) -> bool:
        """False without a reward: nobody said that it is right."""
        if rollout.reward is None or rollout.reward < self.min_reward:
            return False
        if self.completed and rollout.status is not EpisodeStatus.COMPLETED:
            return False
        breaks = rollout.samples.stats.breaks if rollout.samples is not None else {}
        return self.broken or not breaks.keys() - {BreakReason.NEW_CONVERSATION}

    def fits(self, row: Sample) -> bool:
        return self.max_tokens is None or len(row.input_ids) <= self.max_tokens


def to_token_rows(rollouts: Iterable[Rollout], accept: Accept = Accept()) -> Iterator[dict[str, Any]]:
    """``{"input_ids", "labels"}`` of each row of the accepted rollouts: lists of one length, −100 where the token
    was not sampled or is trained in another row."""
    for rollout in filter(accept.takes, rollouts):
        for row in filter(accept.fits, trained_rows(rollout)):
            labels = np.where(row.loss_mask.astype(bool), row.input_ids, IGNORED)
            yield {"input_ids": row.input_ids.tolist(), "labels": labels.tolist()}


def to_chat_rows(turns: Sequence[TurnFacts], tools: Sequence[Mapping[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """``{"prompt", "completion"}`` of each model call of an episode (``client.episode(id).turns()``), in OpenAI's
    messages: each reply is trained once, whatever calls come after it.

    ``tools``: their schemas, for the template; a recording has their hash alone. A reply that was cut is left out.
    Choose the episodes with ``Accept.takes``.
    """
    recorded = {turn.turn_id: turn for turn in turns}
    for turn in turns:
        if turn.finish_reason == "stop":
            said = [*conversation(turn, recorded), openai_message(turn.reply)]
            for call in (call for message in said for call in message.get("tool_calls", ())):
                call["function"]["arguments"] = _arguments(call["function"]["arguments"])
            row: dict[str, Any] = {"prompt": said[:-1], "completion": said[-1:]}
            yield {**row, "tools": [dict(tool) for tool in tools]} if tools else row


def pairs(rollouts: Iterable[Rollout], *, margin: float = 0.0, most: int = 1) -> Iterator[tuple[Rollout, Rollout]]:
    """``(better, worse)`` rollouts of one group, at most ``most`` of each, those that differ most first. Their
    rewards differ by more than ``margin``; each rollout is in one pair. Ungraded ones are in none."""
    for group in by_group(rollouts).values():
        graded = [(rollout.reward, rollout) for rollout in group if rollout.reward is not None]
        ranked = sorted(graded, key=lambda each: each[0], reverse=True)
        for index in range(min(most, len(ranked) // 2)):
            (high, better), (low, worse) = ranked[index], ranked[-1 - index]
            if high - low > margin:
                yield better, worse


def _arguments(text: str) -> dict[str, Any] | str:
    """As an object, which templates write as JSON; many write a text as JSON of a text. What is none stays."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


@dataclass(frozen=True, slots=True)
class PreferenceRows:
    """``rows``: ``{"prompt_ids", "chosen_ids", "rejected_ids"}``. The pairs that have none, by why: a preference
    loss has no mask, so it would train what tools wrote (``several_replies``); their prompts are not the same
    tokens (``other_prompt``); nothing was sampled (``nothing_sampled``)."""

    rows: list[dict[str, list[int]]]
    several_replies: int
    other_prompt: int
    nothing_sampled: int


def to_preference_rows(found: Iterable[tuple[Rollout, Rollout]]) -> PreferenceRows:
    """The pairs whose main conversations are one reply each, to the same prompt, as tokens."""
    rows: list[dict[str, list[int]]] = []
    several = other = nothing = 0
    for pair in found:
        mains = [next((row for row in trained_rows(rollout) if row.kind == "main"), None) for rollout in pair]
        chosen, rejected = mains
        if chosen is None or rejected is None:
            nothing += 1
            continue
        replies = [_one_reply(row) for row in (chosen, rejected)]
        if None in replies:
            several += 1
            continue
        (prompt, better), (other_prompt, worse) = [reply for reply in replies if reply is not None]
        if prompt != other_prompt:
            other += 1
            continue
        rows.append({"prompt_ids": prompt, "chosen_ids": better, "rejected_ids": worse})
    return PreferenceRows(rows, several, other, nothing)


def _one_reply(row: Sample) -> tuple[list[int], list[int]] | None:
    """The prompt and the reply; None where the row goes on after its first reply."""
    start, last = response_start(row), int(np.flatnonzero(row.loss_mask)[-1]) + 1
    if not row.loss_mask[start:last].all():
        return None
    return row.input_ids[:start].tolist(), row.input_ids[start:last].tolist()
