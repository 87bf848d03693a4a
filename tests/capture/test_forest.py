"""The forest of an episode holds each token once and loses nothing of the flat samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from capture.forests import forests
from capture.play import FACTS, Play
from turnstile.models import EpisodeStatus, SampleSet, TokenForest
from turnstile.models.samples_encoding import (
    WireError,
    decode_forest,
    decode_samples,
    encode_forest,
    encode_samples,
)
from turnstile_server.capture import EpisodeFacts, TokenTree, export_forest, export_samples

ARRAYS = ("input_ids", "loss_mask", "logprobs", "weight_version")
facts = st.builds(
    EpisodeFacts,
    episode_id=st.just("ep_1"),
    rollout_id=st.just("r_1"),
    status=st.sampled_from(EpisodeStatus),
    group_id=st.none() | st.just("g_1"),
    attempt=st.integers(0, 2),
    reward=st.none() | st.floats(0, 1),
    discarded=st.dictionaries(st.just("engine_error"), st.integers(1, 9)),
    metadata=st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def same(one: SampleSet, other: SampleSet) -> None:
    assert one.model_dump(exclude={"samples"}) == other.model_dump(exclude={"samples"})
    for mine, theirs in zip(one.samples, other.samples, strict=True):
        assert mine.model_dump(exclude=set(ARRAYS)) == theirs.model_dump(exclude=set(ARRAYS))
        for name in ARRAYS:
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype
            assert getattr(mine, name).tobytes() == getattr(theirs, name).tobytes()


@settings(deadline=None)
@given(forests(), facts, st.booleans())
def test_the_forest_gives_back_exactly_the_flat_samples(
    tree: TokenTree, of_episode: EpisodeFacts, include_untrained: bool
) -> None:
    forest = export_forest(tree, of_episode, include_untrained=include_untrained)
    same(forest.to_samples(), export_samples(tree, of_episode, include_untrained=include_untrained))


@pytest.mark.slow
@settings(deadline=None)
@given(forests(), facts, st.booleans())
def test_the_forest_survives_the_wire_bit_for_bit(
    tree: TokenTree, of_episode: EpisodeFacts, include_untrained: bool
) -> None:
    forest = export_forest(tree, of_episode, include_untrained=include_untrained)
    again = decode_forest(encode_forest(forest))
    assert again.model_dump(mode="json") == forest.model_dump(mode="json")
    same(again.to_samples(), forest.to_samples())


@pytest.mark.slow
@settings(deadline=None)
@given(forests(), st.booleans())
def test_each_token_is_there_once_and_each_completion_is_trained_once(
    tree: TokenTree, include_untrained: bool
) -> None:
    forest = export_forest(tree, FACTS, include_untrained=include_untrained)
    flat = export_samples(tree, FACTS, include_untrained=include_untrained)
    on_rows = {span.turn_id for sample in flat.samples for span in sample.turn_spans}
    assert len(forest.turn_ids) == len(set(forest.turn_ids))
    assert set(forest.turn_ids) == on_rows
    turns = [tree[turn_id].turn for turn_id in forest.turn_ids]
    assert len(forest.input_ids) == sum(len(turn.context_ids) + len(turn.completion_ids) for turn in turns)
    assert int(forest.loss_mask.sum()) == sum(int(sample.loss_mask.sum()) for sample in flat.samples)
    assert int(forest.loss_mask.sum()) == forest.stats.trained_tokens


@settings(deadline=None)
@given(forests())
def test_positions_predecessors_and_ancestors_are_those_of_each_sequence(tree: TokenTree) -> None:
    forest = export_forest(tree, FACTS, include_untrained=True)
    node, positions, previous = forest.nodes(), forest.positions(), forest.previous()
    mask = forest.ancestors()[np.ix_(node, node)] & np.tri(len(node), dtype=bool)
    for row in forest.rows:
        tokens = np.concatenate(
            [np.arange(forest.offsets[n], forest.offsets[n + 1]) for n in forest.path(row.node)]
        )
        assert forest.input_ids[tokens].tolist() == tree[forest.turn_ids[row.node]].tokens().tolist()
        assert positions[tokens].tolist() == list(range(len(tokens)))
        assert previous[tokens].tolist() == [-1, *tokens[:-1].tolist()]
        for place, token in enumerate(tokens.tolist()):
            assert np.flatnonzero(mask[token]).tolist() == tokens[: place + 1].tolist()


def test_a_fork_shares_its_stem() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:x", "bx")
    play.turn("user:u1 assistant:a1 user:y", "by")
    forest = export_forest(play.tree, FACTS)
    assert forest.parents.tolist() == [-1, 0, 0]
    assert forest.offsets.tolist() == [0, 3, 6, 9]
    assert forest.completion_starts.tolist() == [1, 4, 7]
    assert forest.trained_in.tolist() == [0, 0, 1]
    assert forest.positions().tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert forest.previous().tolist() == [-1, 0, 1, 2, 3, 4, 2, 6, 7]
    assert forest.ancestors().astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert sum(len(sample.input_ids) for sample in forest.to_samples().samples) == 12


def test_turns_that_no_row_passes_through_are_left_out_unless_asked_for() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1", "a2")
    play.turn("user:u1 assistant:a2 user:u2", "b")
    assert export_forest(play.tree, FACTS).turn_ids == ("turn_1", "turn_2")
    everything = export_forest(play.tree, FACTS, include_untrained=True)
    assert everything.turn_ids == ("turn_0", "turn_1", "turn_2")
    assert [row.kind for row in everything.rows] == ["retry", "main"]


def test_an_episode_without_turns_is_an_empty_forest() -> None:
    forest = decode_forest(encode_forest(export_forest(TokenTree(), FACTS)))
    assert forest.to_samples().samples == ()
    assert (forest.positions().tolist(), forest.previous().tolist(), forest.ancestors().shape) == ([], [], (0, 0))


def forked() -> TokenForest:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:x", "bx")
    return export_forest(play.tree, FACTS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parents": [-1, 1]}, "does not come before its child"),
        ({"parents": [-2, 0]}, "does not come before its child"),
        ({"parents": [-1]}, "nodes differ in length"),
        ({"offsets": [0, 3, 5]}, "do not run"),
        ({"offsets": [0, 7, 6]}, "starts outside its node"),
        ({"completion_starts": [1, 7]}, "starts outside its node"),
        ({"trained_in": [0, 1]}, "trained in a row"),
        ({"loss_mask": [0]}, "tokens differ in length"),
        ({"weight_version": [-1, 0, 0, -1, 1, 0]}, "has no name"),
        ({"rows": [{**forked().rows[0].model_dump(), "node": 2}]}, "ends at a node"),
        ({"loss_mask": [1, 1, 1, 0, 1, 1]}, "the mask is not"),
        ({"loss_mask": [0, 1, 1, 0, 1, 0]}, "the mask is not"),
        ({"trained_in": [0, -1]}, "the mask is not"),
        ({"logprobs": [-0.5, -0.5, -0.5, 0, -0.5, -0.5]}, "not trained has a logprob"),
    ],
)
def test_a_forest_that_does_not_add_up_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TokenForest.model_validate({**forked().model_dump(), **change})


@pytest.mark.slow
@given(tree=forests())
def test_a_given_turn_is_trained_nowhere_and_no_weights_sampled_it(tree: TokenTree) -> None:
    found = export_samples(tree, FACTS, include_untrained=True)
    given_turns = {node.turn.turn_id for node in tree if node.turn.sampling.given}
    reasons = {entry.turn_id: entry.reason for entry in found.untrained}
    assert {reasons[turn_id] for turn_id in given_turns} <= {"given", "interrupted", "superseded"}
    for sample in found.samples:
        for span in sample.turn_spans:
            versions = sample.weight_version[span.start : span.end]
            assert (versions == -1).all() if span.turn_id in given_turns else (versions >= 0).all()


@pytest.mark.slow
@given(tree=forests())
def test_a_completion_is_trained_in_a_row_that_passes_through_it_or_the_forest_is_refused(
    tree: TokenTree,
) -> None:
    forest = export_forest(tree, FACTS, include_untrained=True)
    for node in np.flatnonzero(forest.trained_in >= 0).tolist():
        for number, row in enumerate(forest.rows):
            changed = forest.trained_in.copy()
            changed[node] = number
            fields = {**forest.model_dump(), "trained_in": changed}
            if node in forest.path(row.node):
                TokenForest.model_validate(fields)
            else:
                with pytest.raises(ValidationError, match="does not pass through it"):
                    TokenForest.model_validate(fields)


@given(st.binary(max_size=100))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_forest(data)


def test_a_cut_file_and_a_file_of_samples_are_refused() -> None:
    forest = forked()
    whole = encode_forest(forest)
    for end in range(0, len(whole), 7):
        with pytest.raises(WireError):
            decode_forest(whole[:end])
    with pytest.raises(WireError):
        decode_forest(encode_samples(forest.to_samples()))
    with pytest.raises(WireError):
        decode_samples(whole)
