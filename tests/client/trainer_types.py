"""The ``Sample`` classes of slime and miles: from recorded facts, and from miles' own package.

``recorded/slime_samples.json`` holds field names, defaults and statuses of several versions, with the commit that
each is from. The checks are what these trainers assert of a sample before they train on it
(``Sample.validate`` and the conversion to training data).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from turnstile.models import (
    Episode,
    EpisodeStats,
    EpisodeStatus,
    EpisodeTimings,
    Limits,
    Sample,
    SampleSet,
    TaskRef,
    Turn,
    TurnFacts,
    TurnOutline,
    TurnSpan,
)
from turnstile.models import Sampling as SamplingModel
from turnstile.models.messages import Message
from turnstile.rollout import Rollout

RECORDED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("recorded").joinpath("slime_samples.json").read_text(encoding="utf-8")
)


@dataclasses.dataclass(frozen=True)
class Span:
    version: str
    abs_start: int
    abs_end: int


@dataclasses.dataclass
class VersionsOfCall:
    spans: list[Span] = dataclasses.field(default_factory=list)

    @staticmethod
    def from_dicts(data: list[dict[str, Any]]) -> VersionsOfCall:
        return VersionsOfCall([Span(**span) for span in data])


def recorded_type(facts: dict[str, Any]) -> Any:
    """A dataclass with the recorded fields, defaults and statuses."""
    status = Enum("Status", {name.upper(): name for name in facts["statuses"]})
    defaults = {**facts["fields"], "status": status.PENDING}
    types: dict[str, Any] = dict.fromkeys(defaults, Any)
    types["weight_versions"] = list[str] if facts["weight_versions_of"] == "str" else list[VersionsOfCall]
    return dataclasses.make_dataclass(
        "Sample",
        [
            (name, types[name], dataclasses.field(default_factory=lambda value=value: copy.copy(value)))
            for name, value in defaults.items()
        ],
        namespace={"Status": status, "get_reward_value": _reward_value},
    )


def miles_type() -> Any:
    """``Sample`` of the package miles-rl: the module itself, without the package's imports of a whole cluster."""
    path = Path(os.environ["TURNSTILE_MILES"], "miles", "utils", "types.py")
    spec = importlib.util.spec_from_file_location("miles_types", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Sample


def check(row: Any) -> None:
    """What a trainer asserts of one row."""
    assert 0 <= row.response_length <= len(row.tokens)
    assert len(row.loss_mask) == row.response_length
    assert len(row.rollout_log_probs) == row.response_length
    assert set(row.loss_mask) <= {0, 1}
    assert all(type(token) is int for token in row.tokens)
    assert all(type(value) is float for value in row.rollout_log_probs)
    assert all(value == 0.0 for value, mask in zip(row.rollout_log_probs, row.loss_mask, strict=True) if not mask)
    end = 0
    for span in (span for call in row.weight_versions if not isinstance(call, str) for span in call.spans):
        assert span.version
        assert end <= span.abs_start < span.abs_end <= len(row.tokens)
        end = span.abs_end


def _reward_value(self: Any, args: Any) -> Any:
    return self.reward if not args.reward_key else self.reward[args.reward_key]


# Rollouts made by hand ----------------------------------------------------


def sample(rollout_id: str = "r", *, trained: tuple[bool, ...] = (True,), **fields: Any) -> Sample:
    """A row of one turn per entry of ``trained``: three tokens of context, two sampled, weights v0, v1, …"""
    length = 5 * len(trained)
    mask = [0, 0, 0, 1, 1] * len(trained)
    spans = tuple(
        TurnSpan(turn_id=f"turn_{i}", context_start=5 * i, start=5 * i + 3, end=5 * i + 5, trained=flag)
        for i, flag in enumerate(trained)
    )
    kept = [m * trained[i // 5] for i, m in enumerate(mask)]
    row = {
        "sample_id": "smp_1",
        "input_ids": list(range(100, 100 + length)),
        "loss_mask": kept,
        "logprobs": [-0.5 * m for m in kept],
        "weight_version": [i // 5 if m else -1 for i, m in enumerate(mask)],
        "weight_version_names": tuple(str(i) for i in range(len(trained))),
        "turn_spans": spans,
        "kind": "main",
        "episode_id": "ep_1",
        "rollout_id": rollout_id,
        "finish_reason": "stop",
        "status": "completed",
    }
    return Sample.model_validate({**row, **fields})


def rollout(
    reward: float | None,
    rows: int = 1,
    *,
    group: str = "g",
    number: int = 0,
    status: EpisodeStatus = EpisodeStatus.COMPLETED,
    samples: tuple[Sample, ...] | None = None,
    **episode: Any,
) -> Rollout:
    """A rollout with ``rows`` sibling rows."""
    name = f"{group}-{number}"
    made = samples if samples is not None else tuple(sample(name, sample_id=f"smp_{i}") for i in range(rows))
    return Rollout(
        task=TaskRef(id="t"),
        group_id=group,
        index=number,
        rollout_id=name,
        episode=Episode(
            episode_id=f"ep_{name}",
            status=status,
            agent="a",
            task=TaskRef(id="t"),
            rollout_id=name,
            reward=reward,
            sampling=SamplingModel(),
            limits=Limits(),
            timings=EpisodeTimings(created_at=0.0),
            **episode,
        ),
        samples=SampleSet(samples=made, untrained=(), stats=EpisodeStats()),
        error=None,
        attempts=1,
        seconds=1.0,
    )


def group_of(*rewards: float | None, group: str = "g", rows: dict[int, int] | None = None) -> list[Rollout]:
    """One rollout for each reward; ``rows``: how many rows the n-th has, where not one."""
    return [rollout(reward, (rows or {}).get(n, 1), group=group, number=n) for n, reward in enumerate(rewards)]


def turn(said: Message, reply: Message, **more: Any) -> Turn:
    """A turn of ``rollout``'s episode. ``more``: further fields."""
    fields = {
        "turn_id": "turn_1",
        "episode_id": "ep_1",
        "parent_id": None,
        "seq": 0,
        "dialect": "chat",
        "context_ids": [1, 2],
        "completion_ids": [3],
        "logprobs": [-0.5],
        "weight_spans": [{"start": 0, "end": 1, "version": "v7"}],
        "finish_reason": "stop",
        "sampling": {"max_new_tokens": 1},
        "template_hash": "h",
        "tools_key": "k",
        "request_key": "k",
        "new_messages": [said],
        "reply": reply,
        "timings": {"started_at": 0.0},
    }
    return Turn.model_validate(fields | more)


def outline(said: Message, reply: Message, **more: Any) -> TurnOutline:
    """The same, without its tokens."""
    facts = turn(said, reply, **more).model_dump(include=set(TurnFacts.model_fields))
    lengths = {"context_tokens": 2, "completion_tokens": 1, "mean_logprob": -0.5}
    return TurnOutline.model_validate({**facts, **lengths, "start": 2, "untrained_reason": None})
