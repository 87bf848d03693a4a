"""``rollouts()`` of both clients: what is started, tried again, waited for, given and ended.

Against doors that play written episodes (``stub_server``) where a failure must come on cue, and against the real
server with agents of the caller's own.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from stub_server import FOR_EVER, INFRASTRUCTURE, Answer, Play, StubServer, running_stub
from test_clients import free_socket

from control_support import Door
from turnstile import (
    AsyncClient,
    Client,
    ClientSettings,
    Conflict,
    InvalidRequest,
    NotFound,
    Rollout,
    RolloutProgress,
    ServerUnavailable,
    SetupFault,
)
from turnstile.models import EpisodeRequest, EpisodeStatus, ErrorInfo, Fault, TaskInfo, TaskRef
from waiting import wait_until

pytestmark = pytest.mark.anyio

QUICK = ClientSettings(
    retries=0, retry_delay_s=0.01, poll_s=0.2, cancel_s=5.0, outage_s=60.0, backoff_s=0.01, backoff_max_s=0.05
)
SHORT_OUTAGE = ClientSettings(retries=0, poll_s=0.2, outage_s=0.2, backoff_s=0.01, backoff_max_s=0.05)

Reader = AsyncIterator[Rollout]
Read = Callable[..., AbstractAsyncContextManager[Reader]]


@asynccontextmanager
async def _read_async(
    urls: Any, tasks: Any, *, key: str | None = None, settings: ClientSettings = QUICK, **options: Any
) -> AsyncIterator[Reader]:
    async with (
        AsyncClient(urls, key=key, settings=settings) as client,
        aclosing(client.rollouts(tasks, **options)) as reader,
    ):
        yield reader


@asynccontextmanager
async def _read_blocking(
    urls: Any, tasks: Any, *, key: str | None = None, settings: ClientSettings = QUICK, **options: Any
) -> AsyncIterator[Reader]:
    """Each step in a thread, so that the loop of the test goes on."""

    async def steps() -> AsyncIterator[Rollout]:
        while (rollout := await anyio.to_thread.run_sync(next, reader, None)) is not None:
            yield rollout

    with Client(urls, key=key, settings=settings) as client:
        reader = client.rollouts(tasks, **options)
        try:
            yield steps()
        finally:
            await anyio.to_thread.run_sync(reader.close)


@pytest.fixture(params=[_read_async, _read_blocking], ids=["async", "blocking"])
def read(request: pytest.FixtureRequest) -> Read:
    made: Read = request.param
    return made


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with running_stub() as door:
        yield door


async def collect(read: Read, stub: StubServer, tasks: Any, **options: Any) -> list[Rollout]:
    async with read(stub.url, tasks, **{"agent": "tool-loop", **options}) as reader:
        return [rollout async for rollout in reader]


# What is started


async def test_every_task_is_rolled_out_n_times_in_a_group_of_its_own(read: Read, stub: StubServer) -> None:
    tasks = [
        "task-1",
        TaskRef(id="task-2"),
        {"instruction": "do it"},
        "Do this, then that.",
        TaskInfo(id="t5", instruction=""),
    ]
    rollouts = await collect(read, stub, tasks, n=3, seed=7)
    groups = {rollout.group_id for rollout in rollouts}
    assert len(rollouts) == 15
    assert len(groups) == 5
    for group in groups:
        ours = [rollout for rollout in rollouts if rollout.group_id == group]
        assert {rollout.index for rollout in ours} == {0, 1, 2}
        assert len({rollout.task.model_dump_json() for rollout in ours}) == 1
    assert len({rollout.rollout_id for rollout in rollouts}) == 15
    assert {(rollout.reward, rollout.failed, rollout.attempts) for rollout in rollouts} == {(1.0, False, 1)}
    assert all(rollout.samples is not None for rollout in rollouts)
    assert sorted(request.seed or 0 for request in stub.created) == list(range(7, 22))
    assert Counter((request.task.id, request.task.instruction) for request in stub.created) == {
        ("task-1", None): 3,
        ("task-2", None): 3,
        (None, "do it"): 3,
        (None, "Do this, then that."): 3,
        ("t5", None): 3,
    }
    assert {(request.agent, request.attempt) for request in stub.created} == {("tool-loop", 0)}


async def test_options_reach_every_episode(read: Read, stub: StubServer) -> None:
    options = {
        "sampling": {"temperature": 0.5},
        "limits": {"max_turns": 3},
        "env": {"A": "b"},
        "metadata": {"split": "train"},
    }
    [rollout] = await collect(read, stub, ["a"], group_id="mine", samples=False, **options)
    [request] = stub.created
    assert request.model_dump(include=set(options), exclude_defaults=True) == options
    assert (request.group_id, rollout.group_id, rollout.samples) == ("mine", "mine", None)


async def test_a_function_tells_the_train_step_of_each_episode(read: Read, stub: StubServer) -> None:
    steps = itertools.count(7)
    options = {"run_id": "mine", "train_step": lambda: next(steps), "max_concurrent": 1}
    await collect(read, stub, ["a", "b"], **options)
    assert [(request.run_id, request.train_step) for request in stub.created] == [("mine", 7), ("mine", 8)]


@pytest.mark.parametrize("blocking", [False, True])
async def test_rollouts_are_given_back_with_the_step_that_took_them(stub: StubServer, *, blocking: bool) -> None:
    rollouts = await collect(_read_async, stub, ["a", "b", "c", "d"], train_step=1)
    assert rollouts[3].episode is not None
    deleted, without = rollouts[3], replace(rollouts[0], episode=None)
    gone = f"POST /episodes/{deleted.episode and deleted.episode.episode_id}/trained"
    stub.answer = lambda call: Answer(404, "not_found") if call == gone else None
    given: dict[str, Any] = {"left_out": [rollouts[2], deleted, without], "version": "v3"}
    if blocking:
        with Client(stub.url, settings=QUICK) as client:
            found = await anyio.to_thread.run_sync(lambda: client.trained(7, iter(rollouts[:2]), **given))
    else:
        async with AsyncClient(stub.url, settings=QUICK) as client:
            found = await client.trained(7, iter(rollouts[:2]), **given)
    assert [each.rollout_id for each in found] == [each.rollout_id for each in (*rollouts[:3], deleted, without)]
    told = [each.episode.trained for each in found[:3] if each.episode is not None and each.episode.trained]
    assert [(each.step, each.used, each.version) for each in told] == [
        (7, True, "v3"),
        (7, True, "v3"),
        (7, False, "v3"),
    ]
    assert (found[3], found[4]) == (deleted, without), "there is nothing that could belong to the step"
    assert [each.samples is not None for each in found[:3]] == [True] * 3


async def test_a_step_that_a_server_refuses_is_an_error(stub: StubServer) -> None:
    rollouts = await collect(_read_async, stub, ["a", "b"])
    stub.answer = lambda call: Answer(409, "conflict") if call.endswith("/trained") else None
    async with AsyncClient(stub.url, settings=QUICK) as client:
        with pytest.raises(Conflict):
            await client.trained(1, rollouts)


async def test_a_group_may_be_named_after_its_task(read: Read, stub: StubServer) -> None:
    rollouts = await collect(read, stub, ["a", "b"], group_id=lambda task: f"of-{task.id}")
    assert {rollout.group_id for rollout in rollouts} == {"of-a", "of-b"}


@pytest.mark.slow
async def test_no_more_than_max_concurrent_run_and_endless_tasks_are_taken_as_there_is_room(
    read: Read, stub: StubServer
) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield f"task-{number}"

    stub.play = lambda _: Play(0.05)
    async with read(stub.url, endless(), agent="tool-loop", max_concurrent=3) as reader:
        await anext(reader)
        # A reader that takes no more: as many again may end, then nothing is started.
        await wait_until(lambda: len(stub.created) == 7 and not stub.open)
        await anyio.sleep(0.2)  # time to start more, which must not be; a busy machine starts none either
        assert len(stub.created) == taken == 7
        for _ in range(6):
            await anext(reader)
    assert stub.most_open == 3


async def test_rollouts_are_given_as_they_end(read: Read, stub: StubServer) -> None:
    stub.play = lambda request: Play(FOR_EVER if request.task.id == "slow" else 0.0)
    async with read(stub.url, ["slow", "quick"], agent="tool-loop") as reader:
        first = await anext(reader)
        stub.let_end()
        assert [first.task.id, (await anext(reader)).task.id] == ["quick", "slow"]
        with pytest.raises(StopAsyncIteration):
            await anext(reader)


async def test_no_tasks_are_no_rollouts(read: Read, stub: StubServer) -> None:
    assert await collect(read, stub, []) == []


async def test_a_blocked_task_iterator_holds_back_neither_what_ended_nor_the_close(stub: StubServer) -> None:
    never = threading.Event()

    def tasks() -> Iterator[str]:
        yield "a"
        never.wait()

    async with _read_blocking(stub.url, tasks(), agent="tool-loop") as reader:
        assert (await anext(reader)).task.id == "a"
    never.set()


async def test_tasks_may_be_an_async_iterable(stub: StubServer) -> None:
    stub.tasks = tuple(TaskInfo(id=f"t{number}", instruction="do it") for number in range(5))
    async with AsyncClient(stub.url, settings=QUICK) as client:
        rollouts = [r async for r in client.rollouts(client.tasks(page_size=2), agent="tool-loop")]
    assert {rollout.task.id for rollout in rollouts} == {"t0", "t1", "t2", "t3", "t4"}
    with Client(stub.url) as blocking, pytest.raises(InvalidRequest, match="AsyncClient"):
        blocking.rollouts(client.tasks(), agent="tool-loop")


# What is tried again, and what is not


async def test_a_failure_of_the_infrastructure_is_tried_again_as_the_same_rollout(
    read: Read, stub: StubServer
) -> None:
    stub.play = lambda request: (
        Play(status=EpisodeStatus.FAILED, reward=None, error=INFRASTRUCTURE) if request.attempt < 2 else Play()
    )
    [rollout] = await collect(read, stub, ["a"], seed=5)
    assert (rollout.attempts, rollout.reward, rollout.error) == (3, 1.0, None)
    assert [request.attempt for request in stub.created] == [0, 1, 2]
    assert {(request.rollout_id, request.group_id, request.seed) for request in stub.created} == {
        (rollout.rollout_id, rollout.group_id, 5)
    }
    assert len({request.idempotency_key for request in stub.created}) == 3


async def test_a_failure_that_stays_is_given_as_failed_and_never_as_reward_0(read: Read, stub: StubServer) -> None:
    stub.play = lambda _: Play(status=EpisodeStatus.COMPLETED, reward=0.0, error=INFRASTRUCTURE)
    [rollout] = await collect(read, stub, ["a"], retries=1)
    assert (rollout.attempts, rollout.failed, rollout.status) == (2, True, "failed")
    assert (rollout.reward, rollout.samples, rollout.fault) == (None, None, Fault.INFRASTRUCTURE)
    assert rollout.as_json()["reward"] is None


async def test_a_set_up_that_cannot_work_ends_the_run_after_three_in_a_row(read: Read, stub: StubServer) -> None:
    """And says why; a rollout that works in between begins the count anew."""
    error = ErrorInfo(type="model_cannot_serve", message="the template refuses", fault=Fault.SETUP)
    broken, fine = Play(status=EpisodeStatus.FAILED, reward=None, error=error), Play()
    stub.play = lambda request: fine if request.task.id == "t2" else broken
    seen: list[Rollout] = []

    async def run() -> None:
        tasks = (f"t{number}" for number in itertools.count())
        async with read(stub.url, tasks, agent="a", max_concurrent=1) as rollouts:
            async for rollout in rollouts:
                seen.append(rollout)

    with pytest.raises(SetupFault, match=r"last 3 rollouts .*the template refuses") as raised:
        await run()
    assert raised.value.type == "model_cannot_serve"
    assert [rollout.task.id for rollout in seen] == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert [rollout.reward for rollout in seen if rollout.fault is Fault.SETUP] == [None] * 5
    assert [rollout.attempts for rollout in seen] == [1] * 6


@pytest.mark.parametrize("fault", [Fault.AGENT, Fault.TASK])
async def test_faults_of_agent_and_task_are_given_not_tried_again(
    read: Read, stub: StubServer, fault: Fault
) -> None:
    error = ErrorInfo(type="its_own", message="it broke", fault=fault)
    stub.play = lambda _: Play(status=EpisodeStatus.FAILED, reward=None, error=error)
    [rollout] = await collect(read, stub, ["a"])
    assert (rollout.attempts, rollout.failed, rollout.reward, rollout.error) == (1, True, None, error)
    assert rollout.samples is not None


async def test_a_rollout_that_ran_into_a_limit_keeps_its_reward(read: Read, stub: StubServer) -> None:
    error = ErrorInfo(type="budget_exhausted", message="its turns are spent")
    stub.play = lambda _: Play(status=EpisodeStatus.TRUNCATED, reward=0.0, error=error)
    [rollout] = await collect(read, stub, ["a"])
    assert (rollout.attempts, rollout.failed, rollout.reward, rollout.error) == (1, False, 0.0, error)


async def test_an_episode_that_somebody_cancelled_has_failed(read: Read, stub: StubServer) -> None:
    stub.play = lambda _: Play(status=EpisodeStatus.CANCELLED, reward=None)
    [rollout] = await collect(read, stub, ["a"])
    assert (rollout.attempts, rollout.failed, rollout.status) == (1, True, "cancelled")
    assert rollout.error is not None


async def test_an_episode_of_a_server_that_was_restarted_is_submitted_again(read: Read, stub: StubServer) -> None:
    restarted = ErrorInfo(type="server_restarted", message="the server stopped while it ran")
    stub.play = lambda r: Play() if r.attempt else Play(status=EpisodeStatus.FAILED, reward=None, error=restarted)
    [rollout] = await collect(read, stub, ["a"])
    assert (rollout.attempts, rollout.reward) == (2, 1.0)


async def test_an_episode_that_its_server_no_longer_has_is_submitted_again(read: Read, stub: StubServer) -> None:
    stub.play = lambda request: Play() if request.attempt else Play(FOR_EVER)
    async with read(stub.url, ["a"], agent="tool-loop") as reader, anyio.create_task_group() as tasks:

        async def forget() -> None:
            await wait_until(lambda: len(stub.created) == 1)
            stub.forget()

        tasks.start_soon(forget)
        rollout = await anext(reader)
    assert (rollout.attempts, rollout.reward) == (2, 1.0)


@pytest.mark.parametrize("call", ["POST /episodes", "GET /episodes/", "/samples"])
@pytest.mark.parametrize(
    "answer", [Answer(503, "journal_unavailable"), Answer(502, "engine_protocol_error"), Answer(502, None)]
)
async def test_a_server_that_fails_for_a_while_is_waited_for(
    read: Read, stub: StubServer, call: str, answer: Answer
) -> None:
    failures = iter([None, *[answer] * 5] if call == "POST /episodes" else [answer] * 5)
    lock = threading.Lock()

    def fail(asked: str) -> Answer | None:
        with lock:
            return next(failures, None) if call in asked else None

    stub.answer = fail
    rollouts = await collect(read, stub, ["a", "b"], max_concurrent=1)
    assert [(rollout.attempts, rollout.reward) for rollout in rollouts] == [(1, 1.0)] * 2
    assert len(stub.created) == 2


@pytest.mark.slow
async def test_a_server_that_stays_away_is_a_failure_of_the_infrastructure(read: Read, stub: StubServer) -> None:
    away = Answer(503, "journal_unavailable")
    stub.answer = lambda asked: away if len(stub.created) == 1 else None
    rollouts = await collect(read, stub, ["a", "b"], settings=SHORT_OUTAGE, max_concurrent=1, retries=0)
    assert {(r.failed, r.reward, r.fault) for r in rollouts} == {(True, None, Fault.INFRASTRUCTURE)}
    assert {r.error.type for r in rollouts if r.error is not None} == {"server_unreachable"}
    assert [rollout.episode for rollout in rollouts] == [None, None]


@pytest.mark.slow
async def test_a_creation_that_may_have_happened_is_repeated_there_and_makes_one_episode(read: Read) -> None:
    """The answer of the creation is lost behind a proxy; another server is free, and is not asked."""
    with running_stub() as first, running_stub() as second:
        # Accepted once before, so that this is an outage and not a wrong address.
        lost = iter([None, Answer(502, None, afterwards=True), Answer(502, None), Answer(502, None)])
        first.answer = lambda asked: next(lost, None) if asked == "POST /episodes" else None
        second.max_open = 1
        second.play = lambda _: Play(0.5)
        async with read([first.url, second.url], ["a", "b", "c"], agent="tool-loop", max_concurrent=1) as reader:
            rollouts = [rollout async for rollout in reader]
    assert [rollout.attempts for rollout in rollouts] == [1, 1, 1]
    assert sorted(request.task.id or "" for request in first.created + second.created) == ["a", "b", "c"]


@pytest.mark.slow
async def test_a_full_server_is_waited_for(read: Read, stub: StubServer) -> None:
    stub.max_open = 2
    stub.play = lambda _: Play(0.4)  # long enough for the six others to be refused meanwhile
    seen: list[RolloutProgress] = []
    rollouts = await collect(
        read, stub, [f"t{n}" for n in range(8)], max_concurrent=8, retries=0, on_progress=seen.append
    )
    assert [(rollout.failed, rollout.attempts) for rollout in rollouts] == [(False, 1)] * 8
    assert stub.most_open == 2
    assert max(progress.waiting for progress in seen) >= 4
    assert seen[-1].waiting == 0


async def test_several_servers_share_the_rollouts(read: Read) -> None:
    with running_stub() as first, running_stub() as second:
        for door in (first, second):
            door.play = lambda _: Play(0.1)
        async with read([first.url, second.url], ["a", "b"], agent="tool-loop", n=4) as reader:
            rollouts = [rollout async for rollout in reader]
    assert len(rollouts) == 8
    assert len(first.created) == len(second.created) == 4


# What ends a run


async def test_what_the_server_refuses_is_raised_after_what_ended_and_the_rest_is_cancelled(
    read: Read, stub: StubServer
) -> None:
    stub.unknown_tasks = {"unknown"}
    stub.play = lambda request: Play(FOR_EVER if request.task.id == "long" else 0.0)
    given = []
    tasks = ["quick", "long", "unknown"]
    async with read(stub.url, tasks, agent="tool-loop", max_concurrent=2) as reader:
        with pytest.raises(NotFound):  # noqa: PT012
            async for rollout in reader:
                given.append(rollout.task.id)
    assert given == ["quick"]
    assert stub.open == []


async def test_an_error_of_the_task_iterator_is_raised_as_it_is(read: Read, stub: StubServer) -> None:
    def tasks() -> Iterator[str]:
        yield "a"
        raise ZeroDivisionError

    stub.play = lambda _: Play(FOR_EVER)
    async with read(stub.url, tasks(), agent="tool-loop") as reader:
        with pytest.raises(ZeroDivisionError):
            await anext(reader)
    assert stub.open == []


@pytest.mark.parametrize("task", [{"id": 7}, 7, None])
async def test_what_is_no_task_is_an_invalid_request(read: Read, stub: StubServer, task: Any) -> None:
    async with read(stub.url, [task], agent="tool-loop") as reader:
        with pytest.raises(InvalidRequest):
            await anext(reader)


async def test_a_server_that_never_answered_is_told_at_once(read: Read) -> None:
    with free_socket() as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with read(url, itertools.repeat("a"), agent="tool-loop") as reader:
            with pytest.raises(ServerUnavailable):
                await anext(reader)


@pytest.mark.parametrize("options", [{"n": 0}, {"max_concurrent": 0}, {"retries": -1}, {"agent": "external"}])
def test_impossible_options_are_refused_before_anything_is_sent(options: dict[str, Any]) -> None:
    for client in (AsyncClient("http://127.0.0.1:9"), Client("http://127.0.0.1:9")):
        with pytest.raises(InvalidRequest):
            client.rollouts(["a"], **{"agent": "tool-loop", **options})


async def test_closing_cancels_the_episodes_that_run(read: Read, stub: StubServer) -> None:
    stub.play = lambda request: Play(0.0 if request.task.id == "t0" else FOR_EVER)
    async with read(stub.url, [f"t{n}" for n in range(6)], agent="tool-loop", max_concurrent=4) as reader:
        assert (await anext(reader)).task.id == "t0"
        await wait_until(lambda: len(stub.created) == 5)
    assert stub.open == []
    assert len(stub.cancelled) == 4


async def test_a_creation_under_way_when_the_loop_is_left_is_cancelled_too(read: Read, stub: StubServer) -> None:
    """Creations are slow here, so that the close comes in the middle of one."""
    creating = threading.Event()

    def slow(asked: str) -> Answer | None:
        if asked == "POST /episodes" and stub.created:
            creating.set()
            threading.Event().wait(0.3)
        return None

    stub.answer = slow
    stub.play = lambda request: Play(0.0 if request.task.id == "a" else FOR_EVER)
    async with read(stub.url, ["a", "b"], agent="tool-loop", max_concurrent=1) as reader:
        await anext(reader)
        await anyio.to_thread.run_sync(creating.wait)
    assert len(stub.created) == 2
    assert stub.open == []


async def test_keep_open_leaves_them(read: Read, stub: StubServer) -> None:
    stub.play = lambda request: Play(0.0 if request.task.id == "a" else FOR_EVER)
    async with read(stub.url, ["a", "b"], agent="tool-loop", keep_open=True) as reader:
        await anext(reader)
        await wait_until(lambda: len(stub.open) == 1)
    assert (len(stub.open), stub.cancelled) == (1, [])


@pytest.mark.slow
async def test_a_loop_that_is_left_by_break_cancels_its_episodes(stub: StubServer) -> None:
    stub.play = lambda request: Play(0.0 if request.task.id == "a" else FOR_EVER)
    async with AsyncClient(stub.url, settings=QUICK) as client:
        async for _ in client.rollouts(["a", "b"], agent="tool-loop"):
            await wait_until(lambda: len(stub.open) == 1)
            break
        gc.collect()
    assert stub.open == []


@pytest.mark.slow
def test_a_blocking_loop_that_is_left_by_break_cancels_its_episodes(stub: StubServer) -> None:
    stub.play = lambda request: Play(0.0 if request.task.id == "a" else FOR_EVER)
    with Client(stub.url, settings=QUICK) as client:
        for _ in client.rollouts(["a", "b"], agent="tool-loop"):
            while not stub.open:
                threading.Event().wait(0.01)
            break
        gc.collect()
        assert stub.open == []
    assert [thread.name for thread in threading.enumerate() if "asyncio-portal" in thread.name] == []


async def test_closing_the_client_ends_loops_that_were_forgotten(stub: StubServer) -> None:
    stub.play = lambda request: Play(0.0 if request.task.id == "a" else FOR_EVER)
    async with AsyncClient(stub.url, settings=QUICK) as client:
        forgotten = client.rollouts(["a", "b"], agent="tool-loop")
        await anext(forgotten)
        await wait_until(lambda: len(stub.open) == 1)
    assert stub.open == []
    await forgotten.aclose()

    with Client(stub.url, settings=QUICK) as blocking:
        left = blocking.rollouts(["a", "b"], agent="tool-loop")
        next(left)
        await wait_until(lambda: len(stub.open) == 1)
        await anyio.to_thread.run_sync(blocking.close)
        assert stub.open == []


@pytest.mark.parametrize("cancel", ["scope", "task"])
async def test_a_cancelled_reader_cancels_its_episodes(stub: StubServer, cancel: str) -> None:
    stub.play = lambda _: Play(FOR_EVER)
    async with AsyncClient(stub.url, settings=QUICK) as client:

        async def work() -> None:
            async for _ in client.rollouts(["a", "b"], agent="tool-loop"):
                pass

        if cancel == "scope":
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                await wait_until(lambda: len(stub.open) == 2)
                tasks.cancel_scope.cancel()
        else:
            task = asyncio.create_task(work())
            await wait_until(lambda: len(stub.open) == 2)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
    assert stub.open == []


# Progress


async def test_progress_adds_up(read: Read, stub: StubServer) -> None:
    def play(request: EpisodeRequest) -> Play:
        if request.task.id == "flaky" and request.attempt == 0:
            return Play(status=EpisodeStatus.FAILED, reward=None, error=INFRASTRUCTURE)
        if request.task.id == "broken":
            error = ErrorInfo(type="task_failed", message="no tests", fault=Fault.TASK)
            return Play(status=EpisodeStatus.FAILED, reward=None, error=error)
        return Play(reward=None if request.task.id == "ungraded" else 0.25)

    stub.play = play
    seen: list[RolloutProgress] = []
    await collect(read, stub, ["flaky", "broken", "ungraded", "fine"], on_progress=seen.append)
    last = seen[-1]
    assert (last.started, last.running, last.done, last.failed, last.retried) == (4, 0, 4, 1, 1)
    assert (last.graded, last.mean_reward) == (2, 0.25)
    assert RolloutProgress().mean_reward is None


async def test_an_error_of_on_progress_is_raised(read: Read, stub: StubServer) -> None:
    def complain(_: RolloutProgress) -> None:
        raise ZeroDivisionError

    async with read(stub.url, ["a"], agent="tool-loop", on_progress=complain) as reader:
        with pytest.raises(ZeroDivisionError):
            await anext(reader)
    assert stub.open == []


# Agents of the caller's own, on the real server


def own_agent(read: Read, run: Callable[[Any], object]) -> Any:
    """``run`` as a function of the kind that the client takes."""

    async def in_thread(handle: Any) -> object:
        return await anyio.to_thread.run_sync(run, handle)

    return in_thread if read is _read_async else run


async def test_an_agent_of_ones_own_is_run_on_each_episode_and_its_samples_come_back(
    read: Read, door: Door
) -> None:
    agent = own_agent(read, lambda handle: door.add_turn(handle.episode_id))
    async with read(door.url, ["Say hello."], key=door.key, agent=agent, n=3, max_concurrent=2) as reader:
        rollouts = [rollout async for rollout in reader]
    assert {(r.status, r.attempts, r.error) for r in rollouts} == {("completed", 1, None)}
    for rollout in rollouts:
        assert rollout.samples is not None
        [row] = rollout.samples.samples
        assert (row.group_id, row.rollout_id) == (rollout.group_id, rollout.rollout_id)
        assert row.loss_mask.sum() > 0


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), StopIteration()])
async def test_an_agent_of_ones_own_that_raises_is_the_callers_fault_and_its_episode_is_cancelled(
    read: Read, door: Door, error: BaseException
) -> None:
    def crash(_: Any) -> None:
        raise error

    agent = own_agent(read, crash)
    async with read(door.url, ["Say hello."], key=door.key, agent=agent) as reader:
        [rollout] = [rollout async for rollout in reader]
    assert (rollout.failed, rollout.fault, rollout.reward) == (True, Fault.CALLER, None)
    assert rollout.error is not None
    assert rollout.error.type == "agent_failed"
    assert rollout.attempts == 1
    assert rollout.episode is not None
    assert rollout.episode.status == "cancelled"


async def test_an_agent_that_exits_its_thread_has_failed_like_any_other(door: Door) -> None:
    async with _read_blocking(door.url, ["Say hello."], key=door.key, agent=lambda _: sys.exit(2)) as reader:
        rollout = await anext(reader)
    assert rollout.fault is Fault.CALLER


@pytest.mark.slow
async def test_an_agent_that_fails_because_its_episode_has_ended_is_not_to_blame(read: Read, door: Door) -> None:
    def overdue(handle: Any) -> None:
        with Client(door.url, key=door.key) as client:
            client.episode(handle.episode_id).wait(timeout=120)
        raise ZeroDivisionError

    async with read(
        door.url, ["Say hello."], key=door.key, agent=own_agent(read, overdue), limits={"wall_s": 0.2}
    ) as reader:
        rollout = await anext(reader)
    assert (rollout.status, rollout.failed) == ("timed_out", False)
    assert rollout.error is not None
    assert rollout.error.type == "time_limit"


async def test_an_agent_of_ones_own_gets_the_urls_and_the_key(read: Read, door: Door) -> None:
    seen: list[Any] = []
    async with read(door.url, ["Say hello."], key=door.key, agent=own_agent(read, seen.append)) as reader:
        await anext(reader)
    assert seen[0].model_url.endswith(f"/e/{seen[0].episode_id}")
    assert seen[0].episode_key


async def test_what_the_real_server_refuses_is_raised(read: Read, door: Door) -> None:
    for options in ({"agent": "no-such-agent"}, {"agent": own_agent(read, print), "limits": {"max_turns": 10**9}}):
        async with read(door.url, ["Say hello."], key=door.key, **options) as reader:
            with pytest.raises((InvalidRequest, NotFound)):
                await anext(reader)


# Agents that the real server launches


@pytest.mark.slow
async def test_agents_that_the_server_launches_are_rolled_out_and_graded(launching_door: Door) -> None:
    """Twice as many as the server takes at once."""
    door = launching_door
    async with AsyncClient(door.url, key=door.key, settings=QUICK) as client:
        tasks = client.tasks()
        rollouts = [r async for r in client.rollouts(tasks, agent="tool-loop", n=2, seed=1)]
        assert [task.id async for task in client.tasks(page_size=1)] == ["sum-1", "sum-2"]
        assert "tool-loop" in {agent.name for agent in (await client.agents())[door.url].agents}
    assert Counter(rollout.task.id for rollout in rollouts) == {"sum-1": 2, "sum-2": 2}
    assert {rollout.failed for rollout in rollouts} == {False}
    assert {rollout.reward for rollout in rollouts} == {0.0}  # graded: this model cannot add
    assert {rollout.attempts for rollout in rollouts} == {1}
    for rollout in rollouts:
        assert rollout.samples is not None
        assert {row.group_id for row in rollout.samples.samples} == {rollout.group_id}
        assert sum(int(row.loss_mask.sum()) for row in rollout.samples.samples) > 0


async def test_leaving_the_loop_ends_what_the_server_launched(launching_door: Door) -> None:
    door = launching_door
    async with AsyncClient(door.url, key=door.key, settings=QUICK) as client:
        async with aclosing(client.rollouts(["sum-1"], agent="tool-loop", n=4)) as reader:
            first = asyncio.ensure_future(anext(reader))

            async def two_run() -> bool:
                assert not first.done()
                return len([e async for e in client.episodes() if not e.status.ended]) >= 2

            await wait_until(two_run)
            first.cancel()
            await asyncio.wait([first])
        assert [e async for e in client.episodes() if not e.status.ended] == []


async def test_a_task_that_the_real_server_does_not_have_is_raised(read: Read, launching_door: Door) -> None:
    door = launching_door
    async with read(door.url, ["sum-7"], key=door.key, agent="tool-loop") as reader:
        with pytest.raises((InvalidRequest, NotFound), match="sum-7"):
            await anext(reader)


# The routes beside it


async def test_finish_gives_the_episode_once_it_is_graded(stub: StubServer) -> None:
    async with AsyncClient(stub.url, settings=QUICK) as client:
        ended = await (await client.create_episode("say hello")).finish()
    assert (ended.status, ended.reward) == ("completed", 0.5)
    with Client(stub.url, settings=QUICK) as blocking:
        ended = await anyio.to_thread.run_sync(blocking.create_episode("say hello").finish)
    assert (ended.status, ended.reward) == ("completed", 0.5)


async def test_a_launched_episode_has_no_key_and_is_waited_for(stub: StubServer) -> None:
    stub.play = lambda _: Play(0.3)
    async with AsyncClient(stub.url, settings=QUICK) as client:
        episode = await client.create_episode(TaskRef(id="a"), agent="tool-loop")
        assert episode.episode_key is None
        assert (await episode.wait(timeout=60)).reward == 1.0


async def test_tasks_walks_all_pages_of_the_first_server_that_answers(stub: StubServer) -> None:
    stub.tasks = tuple(TaskInfo(id=f"t{number}", instruction="do it") for number in range(5))
    with free_socket() as closed:
        urls = [f"http://127.0.0.1:{closed.getsockname()[1]}", stub.url]
        async with AsyncClient(urls, settings=QUICK) as client:
            found = [task async for task in client.tasks(page_size=2)]
        with Client(urls, settings=QUICK) as blocking:
            assert await anyio.to_thread.run_sync(lambda: list(blocking.tasks())) == found
            with pytest.raises(ServerUnavailable):
                await anyio.to_thread.run_sync(lambda: list(blocking.tasks(server=urls[0])))
    assert tuple(found) == stub.tasks


async def test_agents_are_listed_by_server(stub: StubServer) -> None:
    async with AsyncClient(stub.url, settings=QUICK) as client:
        [agent] = (await client.agents())[stub.url].agents
    assert agent.name == "tool-loop"
    with Client(stub.url) as blocking:
        assert (await anyio.to_thread.run_sync(blocking.agents))[stub.url].agents == (agent,)
