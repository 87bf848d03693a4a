"""The audit by weight version: what is compared, what is counted and what is reported apart, and what may explain
a distance. With a stand-in for the engine whose scores are known exactly; real engines are in
``tests/engines/test_audit_on_engines.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

import anyio
import numpy as np
import pytest

from capture.play import FACTS, Play, reply
from capture.turns import make_turn
from turnstile.models import AuditReport, Float32Array, Int32Array, Turn, VersionAudit, WeightSpan
from turnstile_server.capture.keys import tools_key
from turnstile_server.engines.protocol import Engine, EngineCapabilities, EngineState
from turnstile_server.episodes.audit_explanations import explain
from turnstile_server.episodes.auditor import Auditor

pytestmark = pytest.mark.anyio

OFF = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], np.float32)
"""How far the engine's score of each of a turn's ten tokens is from what was recorded."""


class KnownScores(Engine):
    """Serves ``served`` (one entry per question after its state, the last one for ever) and scores the recorded
    logprobs plus ``OFF``."""

    def __init__(self, turn: Turn, *served: str | None, details: Mapping[str, str] | None = None) -> None:
        context = np.full(len(turn.context_ids), np.nan, np.float32)
        self._scores = np.concatenate([context, turn.logprobs + OFF])
        self._served = list(served)
        self._details = details or {}
        self.asked: list[tuple[int, int, float]] = []

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(4096, 1000, "known", details=self._details)

    def generate(self, *args: object, **options: object) -> Never:
        raise NotImplementedError

    async def abort(self, rid: str) -> None: ...

    async def state(self) -> EngineState:
        version = self._served.pop(0) if len(self._served) > 1 else self._served[0]
        return EngineState(ok=True, weight_version=version, paused=False)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        self.asked.append((start, len(input_ids), temperature))
        return self._scores[start : len(input_ids)]


def played(*spans: tuple[int, int, str, bool], **fields: Any) -> tuple[Play, Turn]:
    """An episode of one turn: two tokens of context, ten sampled ones with these weight spans."""
    play = Play()
    match = play.match("user:u")
    turn = make_turn(
        match,
        reply("a"),
        seq=0,
        tools_key=tools_key((), "t"),
        context_ids=[5, 6],
        completion_ids=list(range(10, 20)),
        **fields,
    )
    weights = tuple(WeightSpan(start=s, end=e, version=v, stale_kv=stale) for s, e, v, stale in spans)
    turn = turn.model_copy(update={"weight_spans": weights})
    play.tree.add(turn)
    return play, turn


async def audited(play: Play, engine: Engine, tolerance: float = 0.35) -> AuditReport:
    return await Auditor(engine, tolerance).audit(play.tree, FACTS, anyio.CapacityLimiter(1))


async def test_only_the_tokens_of_the_served_version_are_compared() -> None:
    play, turn = played((0, 2, "v1", False), (2, 4, "v2", False), (4, 10, "v3", False), temperature=0.7)
    engine = KnownScores(turn, "v2")
    report = await audited(play, engine)
    assert engine.asked == [(4, 6, 0.7)]  # nothing after the span is scored, nothing before it
    [found] = report.turns
    assert (found.tokens, found.unscored, found.other_weights, found.skipped) == (10, 8, 8, None)
    assert found.max_abs_delta == pytest.approx(0.3)
    assert report.passed
    by_version = {version.version: version for version in report.versions}
    assert list(by_version) == ["v1", "v2", "v3"]
    assert [by_version[name].tokens for name in by_version] == [2, 2, 6]
    assert [by_version[name].compared for name in by_version] == [0, 2, 0]
    assert (
        by_version["v1"].max_abs_delta is by_version["v1"].mean_abs_delta is by_version["v1"].p99_abs_delta is None
    )
    assert by_version["v2"].mean_abs_delta == pytest.approx(0.25)
    assert by_version["v2"].p99_abs_delta == pytest.approx(0.3)


async def test_stale_tokens_are_compared_apart_and_fail_nothing() -> None:
    play, turn = played((0, 3, "v2", False), (3, 6, "v2", True), (6, 10, "v1", False))
    report = await audited(play, KnownScores(turn, "v2"))
    [found] = report.turns
    assert (found.stale, found.unscored, found.other_weights) == (3, 4, 4)
    assert (found.max_abs_delta, found.stale_max_abs_delta) == (pytest.approx(0.2), pytest.approx(0.5))
    assert report.max_abs_delta == pytest.approx(0.2)
    assert report.passed
    second = report.versions[0]
    assert (second.version, second.compared, second.stale_tokens) == ("v2", 3, 3)
    assert second.stale_max_abs_delta == pytest.approx(0.5)
    [sentence] = report.explanations
    assert "3 tokens were sampled on an attention cache of older weights" in sentence


async def test_a_turn_without_a_token_of_the_served_version_is_skipped_and_counted() -> None:
    play, turn = played((0, 10, "v1", False))
    engine = KnownScores(turn, "v2")
    report = await audited(play, engine)
    [found] = report.turns
    assert (found.skipped, found.unscored, found.other_weights) == ("other_weights", 10, 10)
    assert not engine.asked
    assert report.max_abs_delta is None


async def test_weights_that_change_while_a_turn_is_scored_are_compared_with_nothing() -> None:
    play, turn = played((0, 10, "v1", False))
    report = await audited(play, KnownScores(turn, "v1", "v2"), tolerance=1e-6)
    [found] = report.turns
    assert (found.skipped, found.unscored, found.max_abs_delta) == ("weights_changed", 10, None)
    assert report.versions[0].compared == 0
    assert report.passed


async def test_a_turn_of_an_adapter_is_not_compared_with_the_base_model() -> None:
    _, turn = played((0, 10, "v1", False))
    with_adapter = turn.model_copy(update={"sampling": turn.sampling.model_copy(update={"adapter": "math"})})
    other = Play()
    other.tree.add(with_adapter)
    report = await audited(other, KnownScores(turn, "v1"))
    assert report.turns[0].skipped == "adapter"


async def test_the_report_has_the_settings_of_the_engine_and_what_they_explain() -> None:
    play, turn = played((0, 10, "v1", False))
    details = {"dtype": "bfloat16", "speculative_algorithm": "EAGLE", "disable_radix_cache": "True"}
    report = await audited(play, KnownScores(turn, "v1", details=details))
    assert not report.passed
    assert report.engine == details
    dtype, speculative = report.explanations
    assert dtype.startswith("dtype is bfloat16, not float32")
    assert "0.04 nats on average" in dtype
    assert speculative.startswith("speculative_algorithm is EAGLE")


async def test_within_the_tolerance_nothing_is_explained() -> None:
    play, turn = played((0, 10, "v1", False))
    report = await audited(play, KnownScores(turn, "v1", details={"dtype": "bfloat16"}), tolerance=1.0)
    assert report.passed
    assert report.explanations == ()


@pytest.mark.parametrize(
    ("details", "word"),
    [
        ({"dtype": "torch.bfloat16"}, "dtype"),
        ({"dtype": "float32", "kv_cache_dtype": "fp8_e5m2"}, "attention cache is rounded"),
        ({"quantization": "fp8"}, "weights are rounded"),
        ({"speculative_config": "{'method': 'ngram'}"}, "speculative decoding"),
        ({"disable_radix_cache": "False"}, "No setting"),
        ({"prefix_caching": "true"}, "No setting"),
        (
            {
                "dtype": "float32",
                "kv_cache_dtype": "auto",
                "quantization": "None",
                "enable_prefix_caching": "False",
            },
            "No setting",
        ),
        ({}, "No setting"),
    ],
)
async def test_each_setting_that_explains_a_distance_is_named(details: dict[str, str], word: str) -> None:
    # A prefix cache explains some 1e-6 nats, and not the 0.9 of this turn.
    play, turn = played((0, 10, "v1", False))
    report = await audited(play, KnownScores(turn, "v1", details=details))
    [sentence] = explain(report.versions, details, 0.35)
    assert word in sentence


@pytest.mark.parametrize("details", [{"disable_radix_cache": "False"}, {"enable_prefix_caching": "True"}])
def test_a_prefix_cache_explains_a_small_distance(details: dict[str, str]) -> None:
    found = VersionAudit(version="v1", tokens=9, compared=9, max_abs_delta=5e-4)
    [sentence] = explain([found], details, 1e-4)
    assert "prefix cache is on" in sentence
