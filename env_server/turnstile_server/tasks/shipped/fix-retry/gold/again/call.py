"""Calls that are repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from again.policy import delays

T = TypeVar("T")


def call(
    function: Callable[[], T],
    *,
    attempts: int = 3,
    first: float = 0.1,
    factor: float = 2.0,
    ceiling: float = 10.0,
    errors: tuple[type[Exception], ...] = (OSError,),
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `function()` returns, called up to `attempts` times (at least once; ValueError for fewer).

    After one of `errors` it waits, by `sleep`, as `again.policy.delays` says, and tries again; after the last
    attempt that error is raised. Any other error is raised at once.
    """
    if attempts < 1:
        raise ValueError("there is at least one attempt")
    for delay in delays(attempts, first, factor, ceiling):
        try:
            return function()
        except errors:
            sleep(delay)
    return function()
