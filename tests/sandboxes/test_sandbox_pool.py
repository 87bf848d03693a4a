"""The pool's rules, with a provider in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest
from pool_support import NO_AGENTS, MemoryProvider, spec

from turnstile_server.errors import SandboxUnavailable, TaskFailed
from turnstile_server.sandboxes import pool as pool_module
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def pooled(provider: MemoryProvider, **fields: object) -> AsyncIterator[SandboxPool]:
    pool = SandboxPool(provider, SandboxSettings.model_validate({"wait_s": 30, **fields}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_RETRY_S", 0.01)
        async with BackgroundTasks() as tasks:
            await pool.start(NO_AGENTS, tasks)
            try:
                yield pool
            finally:
                provider.may_create.set()
                provider.may_destroy.set()
                await pool.close()


async def test_never_more_than_max_open_exist_and_those_who_wait_are_served_in_order() -> None:
    provider = MemoryProvider()
    served: list[int] = []
    async with pooled(provider, max_open=3) as pool, anyio.create_task_group() as group:

        async def use(number: int) -> None:
            sandbox = await pool.create(spec(str(number % 2)))
            served.append(number)
            for _ in range(30):
                await anyio.lowlevel.checkpoint()
            await sandbox.destroy()

        for number in range(20):
            group.start_soon(use, number)
            await anyio.lowlevel.checkpoint()
    assert provider.most == 3
    assert served == sorted(served)
    assert not provider.open


async def test_a_sandbox_that_is_being_removed_takes_room_until_it_is_gone() -> None:
    provider = MemoryProvider()
    async with pooled(provider, max_open=1) as pool, anyio.create_task_group() as group:
        first = await pool.create(spec())
        provider.may_destroy.clear()
        group.start_soon(first.destroy)
        await wait_until(lambda: provider.made[0].destroyed)
        waiting = asyncio.create_task(pool.create(spec()))
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert len(provider.made) == 1
        provider.may_destroy.set()
        await waiting
    assert provider.most == 1


async def test_who_finds_no_room_in_time_is_refused_by_a_sentence_that_names_the_settings() -> None:
    async with pooled(MemoryProvider(), max_open=1, wait_s=0.02) as pool:
        await pool.create(spec())
        with pytest.raises(SandboxUnavailable, match=r"sandboxes\.max_open.*sandboxes\.wait_s"):
            await pool.create(spec())


@pytest.mark.parametrize("error", [SandboxUnavailable("no engine"), TaskFailed("no image")])
async def test_a_failed_creation_gives_its_room_back(error: Exception) -> None:
    provider = MemoryProvider()
    async with pooled(provider, max_open=1, warm=1) as pool:
        provider.fail = error
        for _ in range(3):
            with pytest.raises(type(error)):
                await pool.create(spec())
        assert pool.taken == 0
        assert provider.attempts == 3, "a spec that never worked is not kept warm"


async def test_cancelled_calls_give_their_room_or_their_place_back() -> None:
    provider = MemoryProvider()
    async with pooled(provider, max_open=1) as pool:
        provider.may_create.clear()
        making = asyncio.create_task(pool.create(spec()))
        await wait_until(lambda: provider.attempts == 1)
        waiting = asyncio.create_task(pool.create(spec()))
        last = asyncio.create_task(pool.create(spec()))
        await anyio.lowlevel.checkpoint()
        waiting.cancel()
        making.cancel()
        await asyncio.gather(waiting, making, return_exceptions=True)
        provider.may_create.set()
        await last
        assert pool.taken == 1


async def test_a_destroy_that_is_cancelled_goes_on_and_twice_is_once() -> None:
    provider = MemoryProvider()
    async with pooled(provider, max_open=1) as pool:
        sandbox = await pool.create(spec())
        provider.may_destroy.clear()
        destroying = asyncio.create_task(sandbox.destroy())
        again = asyncio.create_task(sandbox.destroy())
        await wait_until(lambda: provider.made[0].destroyed)
        destroying.cancel()
        await asyncio.gather(destroying, return_exceptions=True)
        assert not again.done()
        provider.may_destroy.set()
        await again
        assert pool.taken == 0
        assert not provider.open


async def test_the_latest_specs_have_warm_sandboxes_and_older_ones_lose_theirs() -> None:
    provider = MemoryProvider()
    async with pooled(provider, warm=2) as pool:
        for image in "abc":
            await (await pool.create(spec(image))).destroy()
        await wait_until(lambda: sorted(s.spec.image or "" for s in provider.open) == ["b", "b", "c", "c"])
        warm = set(provider.open)
        sandbox = await pool.create(spec("b"))
        assert sandbox.sandbox_id in {each.sandbox_id for each in warm}
        await wait_until(lambda: pool.warm == 4)
        assert pool.taken == 5


async def test_a_warm_sandbox_that_died_is_replaced_and_never_handed_out() -> None:
    provider = MemoryProvider()
    async with pooled(provider, warm=2) as pool:
        await (await pool.create(spec())).destroy()
        await wait_until(lambda: pool.warm == 2)
        dead = list(provider.open)
        for sandbox in dead:
            sandbox.alive = False
        lent = await pool.create(spec())
        assert lent.sandbox_id not in {each.sandbox_id for each in dead}
        await wait_until(lambda: pool.warm == 2 and not any(each in provider.open for each in dead))
        assert pool.taken == 3


async def test_warm_sandboxes_give_way_to_a_call_that_needs_the_room() -> None:
    provider = MemoryProvider()
    async with pooled(provider, max_open=3, warm=2) as pool:
        held = await pool.create(spec("a"))
        await wait_until(lambda: pool.warm == 2)
        others: list[Sandbox] = [await pool.create(spec("b")) for _ in range(2)]
        assert pool.warm == 0
        assert provider.most == 3
        for sandbox in [held, *others]:
            await sandbox.destroy()
        await wait_until(lambda: pool.warm == 3)


@pytest.mark.parametrize("error", [SandboxUnavailable("the engine is gone"), KeyError("a bug")])
async def test_a_refill_that_fails_is_tried_again_ever_more_rarely_until_it_works(error: Exception) -> None:
    provider = MemoryProvider()
    async with pooled(provider, warm=1) as pool:
        sandbox = await pool.create(spec())
        await wait_until(lambda: pool.warm == 1)
        provider.fail = error
        provider.made[-1].alive = False
        with pytest.raises(type(error)):
            await pool.create(spec())
        await wait_until(lambda: provider.attempts >= 6)
        await wait_until(lambda: pool.taken == 1)  # between two tries
        provider.fail = None
        await wait_until(lambda: pool.warm == 1)
        await sandbox.destroy()


async def test_closing_destroys_warm_and_lent_sandboxes_and_refuses_who_waits() -> None:
    provider = MemoryProvider()
    async with pooled(provider, max_open=3, warm=1) as pool:
        await pool.create(spec())
        await wait_until(lambda: pool.warm == 1)
        await pool.create(spec("b"))
        await pool.create(spec("b"))
        waiting = asyncio.create_task(pool.create(spec("c")))
        await wait_until(lambda: len(provider.open) == 3)
        await pool.close()
        with pytest.raises(SandboxUnavailable, match="closing"):
            await waiting
        assert not provider.open
        assert provider.closed
        assert pool.taken == 0


async def test_a_sandbox_that_was_being_made_at_close_is_destroyed() -> None:
    provider = MemoryProvider()
    async with pooled(provider) as pool:
        provider.may_create.clear()
        making = asyncio.create_task(pool.create(spec()))
        await wait_until(lambda: provider.attempts == 1)
        await pool.close()
        provider.may_create.set()
        with pytest.raises(SandboxUnavailable, match="closing"):
            await making
        assert provider.made
        assert not provider.open


async def test_a_sandbox_tells_how_long_it_was_waited_for_and_whether_it_was_warm() -> None:
    provider = MemoryProvider()
    async with pooled(provider, max_open=1, warm=1) as pool:
        first = await pool.create(spec())
        waiting = asyncio.create_task(pool.create(spec()))
        await anyio.sleep(first.origin.waited_s + 0.02)  # the second waits longer than the first
        await first.destroy()
        second = await waiting
        assert (first.origin.warm, second.origin.waited_s > first.origin.waited_s) == (False, True)
        await second.destroy()
        await wait_until(lambda: pool.warm == 1)
        assert (await pool.create(spec())).origin.warm


async def test_the_images_of_the_latest_sandboxes_are_told_the_last_one_first() -> None:
    provider = MemoryProvider()
    async with pooled(provider) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool_module, "_KEPT_IMAGES", 2)
            for image in ("a", "b", "a", "c"):
                await (await pool.create(replace(spec(), image=image))).destroy()
            assert pool.images == ("c", "a")
            await (await pool.create(replace(spec(), image=None))).destroy()
            assert pool.images == ("c", "a"), "the backend's own image is nobody's"
