"""The retry table: what to do with a call that repeats an earlier one.

A call repeats another when their request keys are equal: same parent, new messages, tools and asked sampling. It
is *marked* when the client says that it retries: by a retry header above 0, or by the idempotency key of the
earlier call. An interrupted turn is never the earlier call, because it has no whole reply to give again.
"""

from __future__ import annotations

from enum import Enum, auto


class EarlierCall(Enum):
    """State of the latest earlier identical call."""

    NONE = auto()
    IN_FLIGHT = auto()
    """Being generated, its caller still connected."""
    IN_FLIGHT_GONE = auto()
    """Being generated, its caller gone."""
    UNDELIVERED = auto()
    """Committed, but the caller was gone before the terminal bytes."""
    WRITTEN = auto()
    """Committed and written to the caller."""


class Action(Enum):
    GENERATE = auto()
    """An ordinary call: the next child, or a sibling of the earlier one."""
    JOIN = auto()
    """Wait for the earlier call and give its reply."""
    REPLACE = auto()
    """Abort the earlier call (its tokens are discarded) and generate."""
    REPLAY = auto()
    """Give the committed reply again."""


_TABLE = {
    (EarlierCall.NONE, True): Action.GENERATE,
    (EarlierCall.NONE, False): Action.GENERATE,
    (EarlierCall.IN_FLIGHT, True): Action.JOIN,
    (EarlierCall.IN_FLIGHT, False): Action.GENERATE,
    (EarlierCall.IN_FLIGHT_GONE, True): Action.REPLACE,
    (EarlierCall.IN_FLIGHT_GONE, False): Action.REPLACE,
    (EarlierCall.UNDELIVERED, True): Action.REPLAY,
    (EarlierCall.UNDELIVERED, False): Action.REPLAY,
    (EarlierCall.WRITTEN, True): Action.REPLAY,
    (EarlierCall.WRITTEN, False): Action.GENERATE,
}


def decide(earlier: EarlierCall, *, marked: bool) -> Action:
    """The action for a call, given its latest identical call; ``docs/matching.md`` prints this table."""
    return _TABLE[earlier, marked]
