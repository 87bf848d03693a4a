"""The rules by which a session changes: admission, refusals, budgets, delivery. No server, no engine."""

from __future__ import annotations

from typing import Any

import pytest
from stepped_clock import loop_clock

from capture.turns import make_turn
from turnstile.models import Message, Sampling
from turnstile_server.capture import CallMatch, EarlierCall
from turnstile_server.errors import (
    BudgetExhausted,
    EngineUnavailable,
    Gone,
    InvalidRequest,
    TooManyCalls,
    TooManyRefusals,
    TurnstileError,
)
from turnstile_server.gate.call import CommittedTurn, ModelCall
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.episode_limits import CallLimits
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.http.exchange import CallerGone

pytestmark = pytest.mark.anyio

WRONG = InvalidRequest("wrong")


class Played:
    """A session, and the errors with which it stopped its agent."""

    def __init__(self, **limits: int) -> None:
        bounds: dict[str, Any] = {
            "max_turns": 4,
            "max_completion_tokens": 10,
            "max_sampled_tokens": 20,
            "max_record_bytes": 1000,
            "max_calls": 2,
            "max_refusals": 3,
            **limits,
        }
        self.stopped: list[TurnstileError] = []
        self.session = EpisodeSession("e1", Sampling(), CallLimits(**bounds), self.stopped.append, warm_s=0)

    def call(self, request_key: str = "r") -> ModelCall:
        call = ModelCall("turn_1", request_key, 0.0)
        self.session.admit(call)
        return call

    def refuse(self, error: TurnstileError, call: ModelCall | None = None) -> None:
        self.session.refused(error, call)

    def commit(self, turn_id: str = "turn_1", tokens: int = 3, record_bytes: int = 100) -> CommittedTurn:
        asked = (Message("user", "go"),)
        place = CallMatch(parent=None, new_messages=asked, echo=(), broken=None, request_messages=asked)
        ids = list(range(tokens))
        turn = make_turn(
            place,
            Message("assistant", "ok"),
            seq=self.session.next_seq(),
            turn_id=turn_id,
            tools_key="",
            completion_ids=ids,
        )
        return CommittedTurn(self.session.commit(turn, record_bytes))


async def test_refusals_in_a_row_stop_the_agent_and_a_turn_begins_the_row_again() -> None:
    played = Played()
    played.refuse(WRONG)
    played.refuse(WRONG)
    played.commit()
    assert played.session.last_refusal is None
    played.refuse(WRONG)
    played.refuse(WRONG)
    assert played.stopped == []
    played.refuse(WRONG)
    (stop,) = played.stopped
    assert isinstance(stop, TooManyRefusals)
    assert stop.detail == {"last": "invalid_request"}


async def test_what_a_later_attempt_may_cure_is_remembered_and_not_counted() -> None:
    played = Played(max_refusals=1)
    failure = EngineUnavailable("later")
    played.refuse(failure)
    assert played.session.last_refusal is failure
    assert played.stopped == []


async def test_a_spent_budget_stops_the_agent_at_once() -> None:
    played = Played()
    spent = BudgetExhausted("spent")
    played.refuse(spent)
    assert played.stopped == [spent]


async def test_an_abandoned_call_was_refused_nothing() -> None:
    played = Played(max_refusals=1)
    call = played.call()
    assert call.abandon("caller_gone")
    played.refuse(WRONG, call)
    assert played.session.last_refusal is None
    assert played.stopped == []


async def test_a_closed_session_counts_no_refusal_and_keeps_its_first_reason() -> None:
    played = Played(max_refusals=1)
    played.session.close(Gone("first"))
    played.session.close(Gone("second"))
    with pytest.raises(Gone, match="first"):
        played.session.check_open()
    played.refuse(WRONG)
    assert played.stopped == []


async def test_a_bug_is_the_reason_of_a_call_and_is_not_counted() -> None:
    played = Played(max_refusals=1)
    played.session.refused(ZeroDivisionError())
    assert played.stopped == []
    reason = played.session.last_refusal
    assert reason is not None
    assert (reason.type, reason.fault) == ("internal_error", None)


async def test_a_caller_that_went_away_was_refused_nothing() -> None:
    played = Played(max_refusals=1)
    played.session.refused(CallerGone())
    assert (played.stopped, played.session.last_refusal) == ([], None)


async def test_calls_in_flight_are_bounded_and_seen_but_not_changed_from_outside() -> None:
    played = Played()
    first, second = played.call(), played.call()
    with pytest.raises(TooManyCalls):
        played.call()
    assert list(played.session.in_flight.values()) == [first, second]
    with pytest.raises(TypeError):
        played.session.in_flight["x"] = first  # type: ignore[index]
    played.session.release(first)
    assert played.session.last_activity > 0
    played.call()


async def test_an_abandoned_call_does_not_hold_a_turn_of_the_budget() -> None:
    played = Played(max_turns=1)
    first = played.call()
    with pytest.raises(BudgetExhausted):
        played.call()
    first.abandon("replaced")
    played.call()


async def test_records_that_take_their_bytes_end_the_budget() -> None:
    played = Played()
    played.commit(record_bytes=999)
    played.session.release(played.call())
    played.commit("turn_2", record_bytes=1)
    with pytest.raises(BudgetExhausted, match="max_record_bytes_per_episode"):
        played.call()


async def test_replies_that_are_kept_merged_with_those_before_them_take_bytes_too() -> None:
    """Forty calls that repeated 3 MB of the assistant's text took 1 GB, and their records next to nothing."""
    played = Played(max_turns=1_000, max_record_bytes=1_000_000)
    said = [Message("user", "go"), Message("assistant", "x" * 100_000)]
    for index in range(10):
        played.session.release(played.call())
        match = played.session.tree.match(said, [], "")
        said.append(Message("assistant", f"{index}"))
        turn = make_turn(match, said[-1], seq=played.session.next_seq(), tools_key="", completion_ids=[7])
        assert played.session.commit(turn, 10).merged_with_parent == (index > 0)
    with pytest.raises(BudgetExhausted, match="max_record_bytes_per_episode"):
        played.call()


async def test_turns_and_discarded_tokens_count_against_one_budget() -> None:
    played = Played()
    played.commit(tokens=3)
    played.session.discard("caller_gone", 9)
    assert played.session.discarded == {"caller_gone": 9}
    assert played.session.max_new_tokens(None, prompt_tokens=5, context_length=100) == 8
    played.session.discard("caller_gone", 8)
    with pytest.raises(BudgetExhausted):
        played.session.max_new_tokens(None, prompt_tokens=5, context_length=100)


async def test_a_reply_that_was_written_once_stays_written() -> None:
    played = Played()
    node = played.commit().node
    key = node.turn.request_key
    assert played.session.earlier(key) == (EarlierCall.UNDELIVERED, None)
    states = [played.session.deliver(node, written=written) for written in (False, True, False)]
    assert [state and state.state for state in states] == ["lost", "written", None]
    assert played.session.earlier(key) == (EarlierCall.WRITTEN, None)


async def test_what_becomes_of_a_reply_after_the_episodes_end_was_stored_changes_nothing() -> None:
    played = Played()
    node = played.commit().node
    played.session.seal()
    assert [played.session.deliver(node, written=written) for written in (True, False)] == [None, None]
    assert node.delivery == "pending"


async def test_an_earlier_call_is_in_flight_until_its_last_caller_goes() -> None:
    played = Played()
    call = played.call("same")
    assert played.session.earlier("same") == (EarlierCall.IN_FLIGHT_GONE, call)
    call.follow(stream=False)
    call.follow(stream=True)
    assert played.session.earlier("same") == (EarlierCall.IN_FLIGHT, call)
    assert call.streaming_followers == 1
    call.leave(stream=True)
    assert (call.streaming_followers, played.session.earlier("same")) == (0, (EarlierCall.IN_FLIGHT, call))
    call.leave(stream=False)
    assert played.session.earlier("same") == (EarlierCall.IN_FLIGHT_GONE, call)


async def test_an_idempotency_key_repeats_only_its_own_request() -> None:
    session = Played().session
    assert not session.repeats_idempotency_key(None, "a")
    assert not session.repeats_idempotency_key("k", "a")
    assert session.repeats_idempotency_key("k", "a")
    assert not session.repeats_idempotency_key("k", "b")


async def test_an_agent_that_invents_idempotency_keys_is_not_remembered_for_ever() -> None:
    """Only as many keys can matter as there may be turns and calls in flight; the newest are kept."""
    session = Played(max_turns=4, max_calls=2).session
    assert not session.repeats_idempotency_key("first", "a")
    for number in range(5):
        assert not session.repeats_idempotency_key(f"k{number}", "a")
    assert session.repeats_idempotency_key("first", "a")  # used again: the newest now
    for number in range(5, 10):
        assert not session.repeats_idempotency_key(f"k{number}", "a")
    assert session.repeats_idempotency_key("first", "a")
    for number in range(10, 16):
        assert not session.repeats_idempotency_key(f"k{number}", "a")
    assert not session.repeats_idempotency_key("first", "a")


async def time_passes() -> None:
    with loop_clock() as clock:
        await clock.let_pass(10)


async def test_a_session_without_a_call_in_flight_drops_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    first, second = played.call("a"), played.call("b")
    cache = played.session.parse_cache("chat")
    cooled: list[ParseCache] = []

    def note(cache: ParseCache) -> None:
        cooled.append(cache)

    monkeypatch.setattr(ParseCache, "cool", note)
    node = played.commit().node
    tokens = node.tokens()
    played.session.release(first)
    await time_passes()
    assert not cooled, "another call is in flight"
    assert node.tokens() is tokens
    played.session.release(second)
    third = played.call("c")
    await time_passes()
    assert not cooled, "one came before the time was over"
    played.session.release(third)
    await time_passes()
    assert cooled == [cache]
    assert node.tokens() is not tokens
    assert node.tokens().tolist() == tokens.tolist()
