"""Which turn brought a conversation about: the one whose words it begins with, or the one that headers name.

No wording of any agent occurs here: what is compared is whose text stands in whose messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from turnstile.models import Cause, Role, Turn
from turnstile_server.capture.quote_index import QuoteIndex


def start(turn: Turn) -> tuple[float, int]:
    """The order in which calls came. A call leaves before its turn is there, so what it causes may be committed
    first."""
    return (turn.timings.started_at, turn.seq)


class Causes:
    """Of one episode's turns. ``auxiliary``: ids of those that were asked for aside."""

    def __init__(self, turns: Iterable[Turn], auxiliary: Collection[str]) -> None:
        self._turns = sorted(turns, key=start)
        self._places = {turn.turn_id: place for place, turn in enumerate(self._turns)}
        self._quotations = QuoteIndex(self._turns)
        self._auxiliary = auxiliary

    def of(self, turn: Turn) -> Cause | None:
        """The earlier turn whose words the conversation begins with: a reply that it quotes (``summary``), or an
        argument of a call (``call``); the longest quotation counts, then the latest turn. Else the latest turn of
        the thread that the agent's headers name as its parent (``thread``)."""
        told = _contents(turn, "user", "system", "developer")
        summaries = self._quotations.replies(told)
        # Replies that come back as such are history, unless they were given to another question.
        said = self._quotations.replies([*told, *_contents(turn, "assistant")])
        summaries |= {turn_id: length for turn_id, length in said.items() if turn_id in self._auxiliary}
        arguments = self._quotations.arguments(_contents(turn, "user"))
        found = [*self._before(turn, summaries, "summary"), *self._before(turn, arguments, "call")]
        if not found:
            return self._of_thread(turn)
        _, place, by = max(found)
        return Cause.model_validate({"turn_id": self._turns[place].turn_id, "by": by})

    def summary_asked_otherwise(self, turn: Turn) -> Cause | None:
        """For a root that renders known inputs again: the latest reply that it quotes to the model, if that was
        asked for with other tools. (With the same tools it may be a complaint about the reply.)"""
        quoted = self._quotations.replies(_contents(turn, "user", "system", "developer"))
        places = [place for _, place, _ in self._before(turn, quoted, "summary")]
        other = [place for place in places if self._turns[place].tools_key != turn.tools_key]
        return Cause(turn_id=self._turns[max(other)].turn_id, by="summary") if other else None

    def _of_thread(self, turn: Turn) -> Cause | None:
        parent = turn.thread.parent if turn.thread is not None else None
        if parent is None:
            return None
        for earlier in reversed(self._turns[: self._places[turn.turn_id]]):
            if earlier.thread is not None and earlier.thread.name == parent:
                return Cause(turn_id=earlier.turn_id, by="thread")
        return None

    def _before(self, turn: Turn, quoted: Mapping[str, int], by: str) -> list[tuple[int, int, str]]:
        """(length, place, ``by``) of the turns that began before this one."""
        own = self._places[turn.turn_id]
        places = ((length, self._places[turn_id]) for turn_id, length in quoted.items())
        return [(length, place, by) for length, place in places if place < own]


def _contents(turn: Turn, *roles: Role) -> list[str]:
    return [message.content for message in turn.new_messages if message.role in roles]
