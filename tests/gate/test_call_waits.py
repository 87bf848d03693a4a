"""Waiting for a call: what ends a wait, and that nothing of a wait is left behind."""

from __future__ import annotations

import anyio
import pytest
from stepped_clock import loop_clock

from turnstile_server.errors import EngineUnavailable
from turnstile_server.gate.call import ModelCall
from turnstile_server.rendering.protocol import TextDelta
from waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

LONG = 60.0


def new_call() -> ModelCall:
    return ModelCall("turn_1", "key", 0.0)


async def test_a_wait_ends_with_the_next_delta_and_with_the_outcome() -> None:
    call, seen = new_call(), list[int]()

    async def follow() -> None:
        assert await call.spoke(LONG)
        while not call.done:
            assert await call.changed(len(seen), LONG)
            seen.extend(range(len(seen), len(call.deltas)))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(call.wait_until_done)
            tasks.start_soon(follow)
            await anyio.wait_all_tasks_blocked()
            for text in ("a", "b", "c"):
                call.emit([TextDelta(text)])
                await anyio.wait_all_tasks_blocked()
            call.fail(EngineUnavailable("gone"))
    assert seen == [0, 1, 2]
    with pytest.raises(EngineUnavailable):
        await call.outcome()


async def test_a_wait_that_is_over_already_returns_at_once() -> None:
    call = new_call()
    call.emit([TextDelta("a")])
    assert await call.spoke(0)
    assert await call.changed(0, 0)
    assert not await call.changed(1, 0)


async def test_changes_that_are_not_waited_for_do_not_prolong_a_wait() -> None:
    call = new_call()
    call.emit([TextDelta("a")])
    outcomes: list[bool] = []

    async def wait() -> None:
        outcomes.append(await call.changed(1, LONG))

    with loop_clock() as clock:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            while not outcomes:
                call.emit([])
                await clock.let_pass(1)
    assert outcomes == [False]


async def test_a_wait_that_timed_out_or_was_cancelled_leaves_nothing() -> None:
    call = new_call()
    assert not await call.spoke(0.001)
    with anyio.move_on_after(0.001) as scope:
        await call.changed(0, LONG)
    assert scope.cancelled_caught
    assert call._waiters == []
    call.emit([TextDelta("a")])
    assert await call.changed(0, LONG)


async def test_a_cancelled_scope_interrupts_every_wait_that_begins_in_it() -> None:
    """Level-triggered: a caller that goes on waiting after it was cancelled is cancelled again."""
    call, interrupted = new_call(), 0
    with anyio.fail_after(PATIENCE_S), anyio.CancelScope() as scope:
        scope.cancel()
        for _ in range(3):
            try:
                await call.wait_until_done()
            except anyio.get_cancelled_exc_class():
                interrupted += 1
        await anyio.sleep_forever()
    assert interrupted == 3
    assert call._waiters == []
