"""The recorded run's rows: each sampled token is trained once, or listed with the reason."""

from __future__ import annotations

import numpy as np
import pytest

from turnstile.exporters.trained_rows import main_last, response_start, trained_rows, version_spans
from turnstile.rollout import Rollout

pytestmark = pytest.mark.trainers


def test_every_sampled_token_of_the_run_is_trained_once_or_listed(rollouts: list[Rollout]) -> None:
    assert len(rollouts) == 32
    assert max(len(trained_rows(rollout)) for rollout in rollouts) > 1
    for rollout in rollouts:
        assert rollout.samples is not None
        spans = {span.turn_id: span.end - span.start for row in rollout.samples.samples for span in row.turn_spans}
        trained = sum(int(row.loss_mask.sum()) for row in rollout.samples.samples)
        listed = sum(entry.tokens for entry in rollout.samples.untrained if entry.turn_id in spans)
        assert trained + listed == sum(spans.values()), rollout.rollout_id


def test_nothing_before_a_rows_response_is_trained_and_its_first_token_is(rollouts: list[Rollout]) -> None:
    for row in [row for rollout in rollouts for row in trained_rows(rollout)]:
        start = response_start(row)
        assert not row.loss_mask[:start].any()
        assert row.loss_mask[start] == 1
        runs = list(version_spans(row, start, len(row.input_ids)))
        sampled = np.flatnonzero(row.weight_version >= 0)
        assert sum(last - first for _, first, last in runs) == int((sampled >= start).sum())


def test_the_main_conversation_comes_last_and_no_row_is_lost(rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        rows = trained_rows(rollout)
        ordered = main_last(rows)
        assert {row.sample_id for row in ordered} == {row.sample_id for row in rows}
        if any(row.kind == "main" for row in rows):
            assert ordered[-1].kind == "main"
