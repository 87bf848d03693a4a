"""Windows of a path are what is exported of it, whatever is cut out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.forests import forests
from capture.play import FACTS, Play
from turnstile_server.capture import TokenTree, export_samples
from turnstile_server.capture.token_path import PathWindow, TokenPath, Training, path_ids


def joined(parts: list[PathWindow]) -> PathWindow:
    names = ("ids", "loss_mask", "logprobs", "versions", "turns")
    return PathWindow(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@settings(deadline=None)
@given(forests(), st.integers(1, 9))
def test_windows_add_up_to_the_exported_sample(tree: TokenTree, size: int) -> None:
    exported = export_samples(tree, FACTS, include_untrained=True)
    reasons = {entry.turn_id: entry.reason for entry in exported.untrained}
    rows = {row.sample_id: row for row in exported.samples}
    training = Training.of(tree)
    for node in tree:
        path = TokenPath(node, training)
        found = joined([path.window(start, size) for start in range(0, path.total + size, size)])
        assert found.ids.tolist() == node.tokens().tolist() == path_ids(node).tolist()
        for index, turn in enumerate(path.turns):
            assert set(found.turns[turn.context_start : turn.end].tolist()) == {index}
            assert set(found.loss_mask[turn.start : turn.end].tolist()) == {int(turn.trained)}
            assert turn.trained_tokens == int(found.loss_mask[turn.start : turn.end].sum())
            assert turn.trained == (turn.untrained_reason is None)
            assert (turn.trained_in is None) == (turn.turn_id in reasons)
            assert turn.trained or turn.untrained_reason == reasons.get(turn.turn_id, "other_sample")
            sampled = tree[turn.turn_id].turn
            shown = found.logprobs[turn.start : turn.end]
            assert np.isnan(shown).all() if sampled.sampling.given else shown.tolist() == sampled.logprobs.tolist()
        if path.sample_id is None:
            assert node.children
            continue
        row = rows.pop(path.sample_id)
        assert found.loss_mask.tolist() == row.loss_mask.tolist()
        assert path.version_names == row.weight_version_names
        assert found.versions.tolist() == row.weight_version.tolist()
        places = [(turn.turn_id, turn.context_start, turn.start, turn.end, turn.trained) for turn in path.turns]
        assert places == [(s.turn_id, s.context_start, s.start, s.end, s.trained) for s in row.turn_spans]
    assert rows == {}, "every sample ends at a turn"


def test_a_shared_prefix_is_trained_in_one_sample_and_shown_so() -> None:
    play = Play()
    first = play.turn("user:u1", "a1")
    left = play.turn("user:u1 assistant:a1 user:x", "b")
    right = play.turn("user:u1 assistant:a1 user:y", "c")
    training = Training.of(play.tree)
    shown = {
        node.turn.turn_id: [(turn.trained, turn.untrained_reason) for turn in TokenPath(node, training).turns]
        for node in (first, left, right)
    }
    assert shown == {
        first.turn.turn_id: [(True, None)],
        left.turn.turn_id: [(True, None), (True, None)],
        right.turn.turn_id: [(False, "other_sample"), (True, None)],
    }


def test_turns_that_a_fork_began_with_are_inherited() -> None:
    play, fork = Play(), TokenTree()
    first = play.turn("user:u1", "a1")
    fork.graft([first.turn])
    path = TokenPath(fork[first.turn.turn_id], Training.of(fork))
    assert [(turn.trained, turn.untrained_reason) for turn in path.turns] == [(False, "inherited")]
    assert path.sample_id is None
