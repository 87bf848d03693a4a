"""What a trainer gets: who trains a completion, what kind a row is, and where the rest is accounted for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from capture.play import FACTS, Play, reply
from turnstile.models import EpisodeStatus, Message
from turnstile_server.capture import TokenTree, export_samples
from turnstile_server.capture.token_path import Training


def forked() -> Play:
    """<user:u1> [a1] and two ways on."""
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:x", "bx")
    play.turn("user:u1 assistant:a1 user:y", "by")
    return play


def retried(**first: Any) -> Play:
    """[a1], asked for again as [a2], and the agent went on from a2."""
    play = Play()
    play.turn("user:u1", "a1", **first)
    play.turn("user:u1", "a2")
    play.turn("user:u1 assistant:a2 user:u2", "b")
    return play


def test_an_episode_without_turns_has_no_rows() -> None:
    out = export_samples(TokenTree(), FACTS, include_untrained=True)
    assert (out.samples, out.untrained, out.stats.turns, out.stats.trained_share) == ((), (), 0, 1.0)


# Who trains what ----------------------------------------------------


def test_a_shared_completion_is_trained_in_the_earliest_row_only() -> None:
    play = forked()
    assert play.rows() == ["<user:u1> [a1] <user:x> [bx]", "<user:u1> {a1} <user:y> [by]"]
    assert play.untrained() == {}
    assert play.export().stats.branches == 1


def test_where_the_earliest_leaf_is_not_exported_the_next_one_trains_the_shared_part() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:x", "bx", finish_reason="abort")
    play.turn("user:u1 assistant:a1 user:y", "by")
    assert play.rows() == ["<user:u1> [a1] <user:y> [by]"]
    assert play.rows(include_untrained=True) == ["<user:u1> {a1} <user:x> {bx}", "<user:u1> [a1] <user:y> [by]"]
    assert play.untrained() == {"turn_1": "interrupted"}


def test_a_row_that_ends_in_an_untrained_reply_still_trains_what_only_it_holds() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:x", "bx", finish_reason="abort")
    assert play.rows() == ["<user:u1> [a1] <user:x> {bx}"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"finish_reason": "abort"}, "interrupted"),
        ({"constrained": True}, "constrained"),
        ({"temperature": 0.0}, "greedy"),
    ],
)
def test_completions_with_no_honest_logprobs_are_context(how: dict[str, Any], reason: str) -> None:
    play = Play()
    play.turn("user:u1", "a1", **how)
    play.turn("user:u1 assistant:a1 user:u2", "a2")
    assert play.rows() == ["<user:u1> {a1} <user:u2> [a2]"]
    assert play.untrained() == {"turn_0": reason}
    stats = play.export().stats
    assert (stats.sampled_tokens, stats.trained_tokens, stats.untrained) == (4, 2, {reason: 2})
    assert stats.trained_share == 0.5


def test_a_length_stopped_completion_is_trained() -> None:
    play = Play()
    play.turn("user:u1", "a1", finish_reason="length")
    assert play.rows() == ["<user:u1> [a1]"]
    assert play.export().samples[0].status == "truncated"


# Superseded retries ----------------------------------------------------


def test_a_childless_turn_whose_later_twin_goes_on_is_a_superseded_retry() -> None:
    play = retried()
    assert play.rows() == ["<user:u1> [a2] <user:u2> [b]"]
    assert play.kinds() == [("<user:u1> {a1}", "retry"), ("<user:u1> [a2] <user:u2> [b]", "main")]
    assert play.untrained() == {"turn_0": "superseded"}


def test_being_superseded_is_named_before_any_other_reason() -> None:
    assert retried(finish_reason="abort").untrained() == {"turn_0": "superseded"}


def test_twins_that_both_end_there_are_both_trained() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1", "a2")
    assert play.rows() == ["<user:u1> [a1]", "<user:u1> [a2]"]


def test_an_earlier_twin_that_goes_on_supersedes_nothing() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1", "a2")
    play.turn("user:u1 assistant:a1 user:u2", "b")
    assert play.rows() == ["<user:u1> [a2]", "<user:u1> [a1] <user:u2> [b]"]


def test_a_sibling_that_asked_for_something_else_is_no_retry() -> None:
    play = Play()
    play.turn("user:u1", "a1", asked={"temperature": 0.5})
    play.turn("user:u1", "a2")
    play.turn("user:u1 assistant:a2 user:u2", "b")
    assert play.rows() == ["<user:u1> [a1]", "<user:u1> [a2] <user:u2> [b]"]


def test_a_superseded_retry_never_trains_what_lies_before_it() -> None:
    """Even where the way on ends untrained: the row of kind retry would carry the shared part."""
    play = Play()
    play.turn("user:u1", "a1")
    head = "user:u1 assistant:a1 user:u2"
    play.turn(head, "b1")
    play.turn(head, "b2")
    play.turn(f"{head} assistant:b2 user:u3", "c", finish_reason="abort")
    assert play.rows() == ["<user:u1> [a1] <user:u2> [b2] <user:u3> {c}"]
    assert play.untrained() == {"turn_1": "superseded", "turn_3": "interrupted"}


# Rows of edited histories ----------------------------------------------------


def test_an_echoed_reply_that_was_edited_is_context_and_never_trained() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:u2", "a2")
    play.turn("user:u1 assistant:a1 user:u2 assistant:edited user:u3", "a3")
    assert play.rows() == [
        "<user:u1> [a1] <user:u2> [a2]",
        "<user:u1> {a1} <user:u2> <assistant:edited> <user:u3> [a3]",
    ]
    assert play.export().stats.breaks == {"reply_edited": 1}


# Status ----------------------------------------------------

STATUS = [
    (EpisodeStatus.COMPLETED, "stop", "completed"),
    (EpisodeStatus.COMPLETED, "length", "truncated"),
    (EpisodeStatus.COMPLETED, "abort", "aborted"),
    (EpisodeStatus.FAILED, "stop", "failed"),
    (EpisodeStatus.FAILED, "abort", "failed"),
    (EpisodeStatus.CANCELLED, "stop", "aborted"),
    (EpisodeStatus.CANCELLED, "length", "aborted"),
    (EpisodeStatus.TRUNCATED, "stop", "truncated"),
    (EpisodeStatus.TRUNCATED, "abort", "aborted"),
    (EpisodeStatus.TIMED_OUT, "stop", "truncated"),
]


@pytest.mark.parametrize(("episode", "finish", "status"), STATUS)
def test_a_row_has_the_status_of_its_episode_and_its_last_reply(
    episode: EpisodeStatus, finish: str, status: str
) -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:u2", "a2", finish_reason=finish)
    (sample,) = play.export(replace(FACTS, status=episode)).samples
    assert (sample.status, sample.finish_reason) == (status, finish)


# Arrays and facts ----------------------------------------------------


def test_the_arrays_of_a_row_say_the_same_thing() -> None:
    play = Play()
    play.turn("user:u1 user:u2", "a1", logprobs=[-0.25, -0.5], versions=("w2", "w1"))
    play.turn("user:u1 user:u2 assistant:a1 user:x", "bx", logprobs=[-1, -2], versions=("w1",))
    play.turn("user:u1 user:u2 assistant:a1 user:y", "by", logprobs=[-3, -4], versions=("w3",))
    first, second = play.export().samples
    assert first.weight_version_names == ("w2", "w1")
    assert first.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert first.logprobs.tolist() == [0, 0, -0.25, -0.5, 0, -1, -2]
    assert first.weight_version.tolist() == [-1, -1, 0, 1, -1, 1, 1]
    assert [(s.context_start, s.start, s.end, s.trained) for s in first.turn_spans] == [
        (0, 2, 4, True),
        (4, 5, 7, True),
    ]
    # The shared completion: sampled here too (a version), but not trained here (no mask, no logprob).
    assert second.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert second.logprobs.tolist() == [0, 0, 0, 0, 0, -3, -4]
    assert second.weight_version.tolist() == [-1, -1, 0, 1, -1, 2, 2]
    assert second.weight_version_names == ("w2", "w1", "w3")
    assert [span.trained for span in second.turn_spans] == [False, True]
    for sample in (first, second):
        arrays = (sample.input_ids, sample.loss_mask, sample.logprobs, sample.weight_version)
        assert [array.dtype.name for array in arrays] == ["int32", "uint8", "float32", "int32"]


def test_every_row_carries_the_facts_of_its_episode() -> None:
    facts = replace(FACTS, rollout_id="r", group_id="g", attempt=2, reward=0.5, metadata={"k": 1})
    for sample in forked().export(facts).samples:
        assert (sample.rollout_id, sample.group_id, sample.attempt) == ("r", "g", 2)
        assert (sample.reward, sample.metadata) == (0.5, {"k": 1})


def test_ungraded_rows_have_no_reward() -> None:
    assert [sample.reward for sample in forked().export().samples] == [None, None]


def test_statistics_are_those_of_the_forest() -> None:
    play = forked()
    play.turn([Message("user", "u1"), reply(" a1 ", reasoning="r"), Message("user", "z")], "bz")
    play.turn("user:other", "c")
    stats = play.export(replace(FACTS, discarded={"engine_error": 3})).stats
    assert stats.model_dump() == {
        "sampled_tokens": 10,
        "trained_tokens": 10,
        "untrained": {},
        "discarded": {"engine_error": 3},
        "rerendered_tokens": 0,
        "turns": 5,
        "roots": 2,
        "branches": 2,
        "breaks": {"new_conversation": 1},
        "cosmetic": {"text_trimmed": 1, "reasoning_changed": 1},
        "parse": {},
        "weight_versions": {"v0": 10},
        "upstream": {},
    }


def test_ids_without_a_token_are_listed_by_themselves_and_hide_no_other_reason() -> None:
    play = Play()
    trained = play.turn("user:u1", "a1", without_token=[0])
    cut = play.turn("user:u1 assistant:a1 user:u2", "a2", without_token=[1], finish_reason="abort")
    nothing = play.turn("user:u1 assistant:a1 user:u2 assistant:a2 user:u3", "a3", without_token=[0, 1])
    out = play.export()
    assert {(entry.turn_id, entry.tokens, entry.reason) for entry in out.untrained} == {
        (trained.turn_id, 1, "id_without_token"),
        (cut.turn_id, 1, "id_without_token"),
        (cut.turn_id, 1, "interrupted"),
        (nothing.turn_id, 2, "id_without_token"),
    }
    [row] = out.samples
    assert row.loss_mask.sum() == out.stats.trained_tokens == 1
    assert row.logprobs[row.loss_mask == 0].tolist() == [0.0] * (len(row.input_ids) - 1)
    training = Training.of(play.tree)
    assert training.reasons == {cut.turn_id: "interrupted", nothing.turn_id: "id_without_token"}
    assert set(training.trained_in) == {trained.turn_id}


@pytest.mark.parametrize("positions", [[-1], [2], [0, 5]])
def test_an_id_without_a_token_lies_in_the_completion(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="outside the 2 sampled ones"):
        Play().turn("user:u1", "a1", without_token=positions)
