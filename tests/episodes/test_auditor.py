"""The audit's checks of the records: an undamaged episode passes, each kind of damage is found by its check. What
an engine with a short input is asked to score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never

import anyio
import numpy as np
import pytest

from capture.play import FACTS, Play
from turnstile.models import Float32Array, Int32Array, SampleSet, Turn
from turnstile_server.engines.protocol import Engine, EngineCapabilities, EngineState
from turnstile_server.episodes.auditor import Auditor, check_invariants

VOCAB = 1000


def recorded() -> tuple[list[Turn], SampleSet]:
    """A branch, a greedy (untrained) turn and a sub-agent."""
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:u2", "a2")
    play.turn("user:u1 assistant:a1 user:u3", "a3", temperature=0.0)
    play.turn("user:other", "b1")
    return [node.turn for node in play.tree], play.export(include_untrained=True)


def failed(turns: list[Turn], exported: SampleSet, vocab_size: int = VOCAB) -> set[str]:
    return {check.name for check in check_invariants(turns, exported, vocab_size) if not check.passed}


def with_first(exported: SampleSet, **changes: object) -> SampleSet:
    first, *rest = exported.samples
    return exported.model_copy(update={"samples": (first.model_copy(update=changes), *rest)})


def test_an_episode_as_it_was_recorded_passes() -> None:
    turns, exported = recorded()
    assert failed(turns, exported) == set()
    assert exported.untrained


Damage = Callable[[SampleSet], SampleSet]
DAMAGE: dict[str, tuple[Damage, set[str]]] = {
    "another id": (
        lambda e: with_first(e, input_ids=e.samples[0].input_ids + np.int32(1)),
        {"token_in_token_out"},
    ),
    "a turn of another path": (
        lambda e: with_first(e, turn_spans=(e.samples[0].turn_spans[-1],)),
        {"token_in_token_out", "every_token_accounted_for", "no_invented_numbers"},
    ),
    "a lost row": (
        lambda e: e.model_copy(update={"samples": e.samples[1:]}),
        {"token_in_token_out", "every_token_accounted_for"},
    ),
    "a row twice": (
        lambda e: e.model_copy(update={"samples": (*e.samples, e.samples[0])}),
        {"every_token_accounted_for"},
    ),
    "a turn that nobody lists": (
        lambda e: e.model_copy(update={"untrained": ()}),
        {"every_token_accounted_for"},
    ),
    "a mask over context": (
        lambda e: with_first(e, loss_mask=np.ones_like(e.samples[0].loss_mask)),
        {"every_token_accounted_for", "no_invented_numbers"},
    ),
    "an invented logprob": (
        lambda e: with_first(e, logprobs=np.zeros_like(e.samples[0].logprobs)),
        {"no_invented_numbers"},
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_kind_of_damage_to_the_rows_is_found_by_its_check(damage: str) -> None:
    turns, exported = recorded()
    change, checks = DAMAGE[damage]
    assert failed(turns, change(exported)) == checks


def test_an_id_outside_the_vocabulary_is_found() -> None:
    assert failed(*recorded(), vocab_size=3) == {"token_in_token_out"}


def test_a_logprob_above_0_is_found() -> None:
    turns, exported = recorded()
    turns[0] = turns[0].model_copy(update={"logprobs": np.abs(turns[0].logprobs)})
    assert failed(turns, exported) == {"no_invented_numbers"}


def test_a_turn_committed_before_the_one_it_continues_is_found() -> None:
    turns, exported = recorded()
    turns[0] = turns[0].model_copy(update={"seq": 99})
    assert failed(turns, exported) == {"token_in_token_out"}


class ShortEngine(Engine):
    """Scores the recorded turn's tokens as recorded, but for its last one, which is ``off``."""

    def __init__(self, turn: Turn, longest: int | None, off: float = 0.0) -> None:
        self._recorded = np.concatenate([np.zeros(len(turn.context_ids), np.float32), turn.logprobs])
        self._recorded[-1] += off
        self._longest = longest

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(4096, VOCAB, "short", longest_scored=self._longest)

    def generate(self, *args: object, **options: object) -> Never:
        raise NotImplementedError

    async def abort(self, rid: str) -> None: ...

    async def state(self) -> EngineState:
        return EngineState(ok=True, weight_version="v0", paused=False)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        assert self._longest is None or len(input_ids) <= self._longest
        return self._recorded[start : len(input_ids)]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("longest", "off", "unscored", "distance", "passed"),
    [
        (None, 0.0, 0, 0.0, True),
        (None, 0.5, 0, 0.5, False),
        (3, 0.5, 0, 0.5, False),
        (2, 0.5, 1, 0.0, True),
        (1, 0.5, 2, None, True),
    ],
)
async def test_what_is_longer_than_an_engine_scores_is_counted_and_the_rest_is_scored(
    longest: int | None, off: float, unscored: int, distance: float | None, passed: bool
) -> None:
    play = Play()
    turn = play.turn("user:u1", "a1").turn
    assert (len(turn.context_ids), len(turn.completion_ids)) == (1, 2)
    report = await Auditor(ShortEngine(turn, longest, off), 0.01).audit(play.tree, FACTS, anyio.CapacityLimiter(1))
    [audit] = report.turns
    assert (audit.tokens, audit.unscored, audit.max_abs_delta) == (2, unscored, distance)
    assert audit.skipped == ("too_long_to_score" if distance is None else None)
    assert report.passed is passed
