"""Which turns are trained, by what is known of the delivery of their replies."""

from __future__ import annotations

import pytest

from capture.play import Play
from turnstile.models import Message
from turnstile_server.capture.node import DeliveryState

LOST: list[tuple[DeliveryState, str]] = [("lost", "undelivered"), ("pending", "delivery_unknown")]
SUMMARY = "Up to here the tests were read, the fault was found in the parser and mended there."


@pytest.mark.parametrize(("delivery", "reason"), LOST)
def test_a_reply_that_may_not_have_arrived_and_that_nothing_builds_on_is_untrained(
    delivery: DeliveryState, reason: str
) -> None:
    play = Play()
    play.turn("user:go", "one")
    play.turn("user:go assistant:one user:on", "two", delivery=delivery)
    assert play.rows() == ["<user:go> [one] <user:on> {two}"]
    assert play.untrained() == {"turn_1": reason}
    stats = play.tree.statistics({})
    assert (stats.trained_tokens, stats.untrained) == (2, {reason: 2})


@pytest.mark.parametrize(("delivery", "_reason"), LOST)
def test_a_reply_that_the_next_call_continues_has_arrived(delivery: DeliveryState, _reason: str) -> None:
    play = Play()
    play.turn("user:go", "one", delivery=delivery)
    play.turn("user:go assistant:one user:on", "two")
    assert play.rows() == ["<user:go> [one] <user:on> [two]"]
    assert play.untrained() == {}


@pytest.mark.parametrize(("delivery", "_reason"), LOST)
def test_a_reply_that_is_rendered_again_under_another_system_text_has_arrived(
    delivery: DeliveryState, _reason: str
) -> None:
    play = Play()
    play.turn("system:it_is_one user:go", "one", delivery=delivery)
    play.turn("system:it_is_two user:go assistant:one user:on", "two")
    assert len(play.rows()) == 2
    assert play.untrained() == {}
    assert play.tree.statistics({}) == play.export().stats


@pytest.mark.parametrize(("delivery", "_reason"), LOST)
def test_a_reply_that_a_later_conversation_quotes_has_arrived(delivery: DeliveryState, _reason: str) -> None:
    play = Play()
    play.turn("user:go", "one")
    play.turn("user:go assistant:one user:sum_up", Message("assistant", SUMMARY), delivery=delivery)
    play.turn([Message("user", f"Go on from this: {SUMMARY}")], "two")
    assert play.untrained() == {}
    assert play.tree.statistics({}) == play.export().stats


@pytest.mark.parametrize(("delivery", "reason"), LOST)
def test_a_call_that_repeats_the_request_without_the_reply_says_nothing_of_it(
    delivery: DeliveryState, reason: str
) -> None:
    play = Play()
    play.turn("user:go", "one", delivery=delivery)
    play.turn("user:go", "two")
    assert play.untrained() == {"turn_0": reason}
    assert play.rows() == ["<user:go> [two]"]


def test_of_equal_replies_the_one_that_arrived_is_the_one_that_is_rendered_again() -> None:
    play = Play()
    play.turn("system:it_is_one user:go", "same", delivery="lost")
    play.turn("system:it_is_one user:go", "same")
    play.turn("system:it_is_two user:go assistant:same user:on", "two")
    assert play.untrained() == {"turn_0": "undelivered"}


def test_a_turns_own_reason_and_a_superseding_sibling_win_over_the_delivery() -> None:
    play = Play()
    play.turn("user:go", "one", delivery="lost", finish_reason="abort")
    play.turn("user:stay", "two", delivery="lost")
    play.turn("user:stay", "three")
    play.turn("user:stay assistant:three user:on", "four")
    assert play.untrained() == {"turn_0": "interrupted", "turn_1": "superseded"}


def test_a_delivery_that_becomes_known_later_decides() -> None:
    play = Play()
    node = play.turn("user:go", "one", delivery="pending")
    assert play.untrained() == {"turn_0": "delivery_unknown"}
    node.record_delivery("lost")
    assert play.untrained() == {"turn_0": "undelivered"}
    node.record_delivery("written")
    assert play.untrained() == {}
    assert play.tree.statistics({}).untrained == {}
