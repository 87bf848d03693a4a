"""The blocking client under threads, forks, interrupts and the end of the interpreter, each in real processes.

Scripts run against a stub server in this process. A script that deadlocks is killed by its time-out; what a script
prints on stderr (a pending task, an ignored exception) fails its test.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from textwrap import dedent

import pytest
from stub_server import FOR_EVER, Play, StubServer, running_stub

from turnstile import Client, ClientSettings, InvalidRequest, ServerUnavailable
from waiting import PATIENCE_S, wait_until_sync

TIMEOUT_S = PATIENCE_S
QUICK = ClientSettings(retries=1, retry_delay_s=0.01, poll_s=0.2, cancel_s=5.0)

HEAD = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it
from turnstile import Client, ClientSettings, TurnstileError
from turnstile.models import TaskRef
settings = ClientSettings(retries=1, retry_delay_s=0.01, poll_s=30.0, cancel_s=5.0)
url = {url!r}
client = Client(url, settings=settings)

def made():
    return client.create_episode("do it", agent="tool-loop").episode_id

def reap(*children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
"""


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with running_stub() as server:
        yield server


def started(stub: StubServer, script: str) -> subprocess.Popen[str]:
    code = HEAD.format(url=stub.url) + dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output_of(process: subprocess.Popen[str]) -> list[str]:
    """The printed lines of a script that ends well, in time and without a word on stderr."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"the script did not end: {process.communicate()}") from None
    assert (process.returncode, stderr) == (0, ""), stderr
    return stdout.splitlines()


def lines_printed(stub: StubServer, script: str) -> list[str]:
    return output_of(started(stub, script))


def polled(call: str) -> bool:
    return call.startswith("GET /episodes/")


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "turnstile-client"]


# Threads


@pytest.mark.slow
def test_many_threads_share_one_client_and_one_loop(stub: StubServer) -> None:
    made: list[str] = []
    with Client(stub.url, settings=QUICK) as client:

        def work() -> None:
            for _ in range(20):
                episode = client.create_episode("do it", agent="tool-loop")
                assert episode.wait(120).episode_id == episode.episode_id
                made.append(episode.episode_id)

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        assert len(client_threads()) <= 1
        for thread in threads:
            thread.join()
    assert len(set(made)) == 320
    assert client_threads() == []


@pytest.mark.thorough
@pytest.mark.slow
def test_several_loops_over_rollouts_share_one_client(stub: StubServer) -> None:
    counts: list[int] = []
    with Client(stub.url, settings=QUICK) as client:

        def work() -> None:
            counts.append(len(list(client.rollouts(["a", "b", "c"], agent="tool-loop", n=4))))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == [12] * 6


@pytest.mark.slow
def test_a_call_that_waits_ends_when_another_thread_closes_the_client(stub: StubServer) -> None:
    stub.play = lambda _: Play(FOR_EVER)
    client = Client(stub.url, settings=QUICK)
    episode = client.create_episode("do it", agent="tool-loop")
    calls = stub.note_calls()
    found: list[BaseException] = []

    def wait() -> None:
        try:
            episode.wait()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until_sync(lambda: any(map(polled, calls)))
    client.close()
    waiting.join(TIMEOUT_S)
    assert len(found) == 1
    assert isinstance(found[0], ServerUnavailable | InvalidRequest)
    with pytest.raises(InvalidRequest, match="closed"):
        client.health()
    client.close()


@pytest.mark.slow
def test_a_client_that_is_dropped_ends_its_thread(stub: StubServer) -> None:
    Client(stub.url, settings=QUICK).health()
    gc.collect()
    wait_until_sync(lambda: client_threads() == [])


@pytest.mark.slow
def test_a_callback_on_the_loop_that_calls_the_client_is_told_so(stub: StubServer) -> None:
    with Client(stub.url, settings=QUICK) as client, pytest.raises(InvalidRequest, match="on_progress"):
        list(client.rollouts(["a"], agent="tool-loop", on_progress=lambda _: client.health()))


@pytest.mark.slow
def test_a_client_may_be_called_where_an_event_loop_runs(stub: StubServer) -> None:
    """As in Jupyter, whose cells run on a loop."""

    async def cell() -> list[float | None]:
        with Client(stub.url, settings=QUICK) as client:
            return [rollout.reward for rollout in client.rollouts(["a", "b"], agent="tool-loop")]

    assert asyncio.run(cell()) == [1.0, 1.0]


# Forks


@pytest.mark.slow
def test_a_client_that_was_used_works_in_a_forked_child_and_still_in_the_parent(stub: StubServer) -> None:
    script = """
    first = made()
    if (child := os.fork()) == 0:
        assert client.episode(first).wait(120).status == "completed"
        second = made()
        with client.create_episode("do it") as episode:
            episode.finish()
        assert len(list(client.rollouts(["a", "b"], agent="tool-loop"))) == 2
        client.close()
        sys.exit(7)
    assert reap(child) == [7]
    print(client.episode(first).status().status, made())
    """
    [line] = lines_printed(stub, script)
    assert line.startswith("completed ep_")
    assert len(stub.created) == 6


@pytest.mark.slow
def test_a_made_client_imports_nothing_more(stub: StubServer) -> None:
    """Else a fork in the middle of a first call finds the lock of an import held, and hangs at that import."""
    script = """
    before = set(sys.modules)
    client.episode(made()).wait(120)
    assert len(list(client.rollouts(["a"], agent="tool-loop"))) == 1
    with Client(url.replace("127.0.0.1", "localhost"), settings=settings) as by_name:
        by_name.health()
    print(sorted(set(sys.modules) - before))
    """
    assert lines_printed(stub, script) == ["[]"]


@pytest.mark.thorough
@pytest.mark.slow
def test_forks_under_load_deadlock_neither_side(stub: StubServer) -> None:
    """Forked in the middle of other threads' calls: a lock that they hold is never released in the child."""
    script = """
    stop = threading.Event()
    def load():
        while not stop.is_set():
            client.health()
    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    children = []
    for number in range(24):
        if (child := os.fork()) == 0:
            made()
            if (grandchild := os.fork()) == 0:
                made()
                os._exit(3)
            os._exit(0 if reap(grandchild) == [3] else 1)
        children.append(child)
        time.sleep(0.005)
    print(set(reap(*children)))
    stop.set()
    for thread in threads:
        thread.join()
    """
    assert lines_printed(stub, script) == ["{0}"]
    assert len(stub.created) == 48


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_client_works_in_the_workers_of_multiprocessing(stub: StubServer, method: str, tmp_path: object) -> None:
    """A fork inherits the client; other methods pickle it, and a handle that has it."""
    with Client(stub.url, settings=QUICK) as client:
        handle = client.create_episode("do it", agent="tool-loop")
        copy = pickle.loads(pickle.dumps(handle))
        assert copy.wait(120).episode_id == handle.episode_id
    script = f"""
    import multiprocessing
    from operator import methodcaller
    client.health()
    handle = client.episode(made())
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        ended = pool.map(methodcaller("wait", 120), [handle] * 6)
    print({{episode.status.value for episode in ended}}, len(client.health()))
    """
    assert lines_printed(stub, script) == ["{'completed'} 1"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_client_works_in_the_workers_of_a_data_loader(stub: StubServer) -> None:
    script = """
    from torch.utils.data import DataLoader, IterableDataset

    class Rollouts(IterableDataset):
        def __iter__(self):
            for rollout in client.rollouts(["a", "b"], agent="tool-loop", n=2):
                yield rollout.reward

    client.health()
    for _ in range(2):
        print(sorted(reward for batch in DataLoader(Rollouts(), num_workers=2) for reward in batch.tolist()))
    """
    assert lines_printed(stub, script) == [str([1.0] * 8)] * 2
    assert stub.open == []


@pytest.mark.slow
def test_a_child_that_exits_leaves_its_parents_rollouts_alone(stub: StubServer) -> None:
    stub.play = lambda request: Play(0.0 if request.task.id == "a" else 1.0)
    script = """
    rollouts = client.rollouts(["a", "b"], agent="tool-loop")
    print(next(rollouts).task.id)
    if (child := os.fork()) == 0:
        try:
            next(rollouts)
        except TurnstileError as error:
            assert "another process" in error.message
        rollouts.close()
        sys.exit(5)
    assert reap(child) == [5]
    print([(rollout.task.id, rollout.status.value) for rollout in rollouts])
    """
    assert lines_printed(stub, script) == ["a", "[('b', 'completed')]"]
    assert stub.cancelled == []


# Interrupts, and the end of the interpreter


@pytest.mark.slow
def test_an_interrupted_call_raises_and_the_client_goes_on(stub: StubServer) -> None:
    stub.play = lambda _: Play(FOR_EVER)
    script = """
    episode = client.create_episode("do it", agent="tool-loop")
    print("waiting", flush=True)
    try:
        episode.wait()
    except KeyboardInterrupt:
        print(episode.cancel().status.value)
    """
    calls = stub.note_calls()
    process = started(stub, script)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    wait_until_sync(lambda: any(map(polled, calls)))
    process.send_signal(signal.SIGINT)
    assert output_of(process) == ["cancelled"]


@pytest.mark.slow
@pytest.mark.parametrize("undo_s", [0.3, 3600.0])
def test_an_interrupt_waits_for_what_a_call_undoes_and_no_longer_than_cancel_s(
    stub: StubServer, undo_s: float
) -> None:
    cancel_s = 2.0 if undo_s > TIMEOUT_S else TIMEOUT_S
    script = f"""
    import asyncio
    undone = []
    async def stubborn(_):
        caller = threading.main_thread().ident
        while sys._current_frames()[caller].f_code.co_name != "call":
            await asyncio.sleep(0.01)  # it has submitted this call, and does not wait for its end yet
        os.kill(os.getpid(), signal.SIGALRM)
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep({undo_s})
            undone.append(True)
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    client = Client(url, settings=ClientSettings(cancel_s={cancel_s}))
    client.health()
    try:
        client._loop().call(stubborn)
    except KeyboardInterrupt:
        print(bool(undone))
    """
    assert lines_printed(stub, script) == [str(undo_s < cancel_s)]


@pytest.mark.slow
def test_a_signal_handler_may_call_the_client_in_the_middle_of_a_call(stub: StubServer) -> None:
    script = """
    handled = []
    def handle(*_):
        handled.append(client.health())
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    while len(handled) < 30:
        client.health()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    print(len(handled) >= 30)
    """
    assert lines_printed(stub, script) == ["True"]


@pytest.mark.slow
def test_an_interrupted_loop_over_rollouts_cancels_its_episodes(stub: StubServer) -> None:
    stub.play = lambda _: Play(FOR_EVER)
    script = """
    with client:
        for rollout in client.rollouts(["a", "b"], agent="tool-loop"):
            pass
    """
    process = started(stub, script)
    wait_until_sync(lambda: len(stub.open) == 2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGINT
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert stub.open == []


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["", "sys.exit()", "gc.collect(); del client", "import asyncio; asyncio.run(nap())"]
)
def test_a_script_that_never_closes_its_client_ends_at_once_and_quietly(stub: StubServer, end: str) -> None:
    """At once: long before the time that it would wait for what it cancels."""
    script = f"""
    import asyncio, gc
    client = Client(url, settings=ClientSettings(cancel_s=3600.0, poll_s=30.0))
    async def nap():
        client.health()
    made()
    {end}
    """
    lines_printed(stub, script)


@pytest.mark.slow
def test_the_end_of_a_script_cancels_the_rollouts_that_it_left(stub: StubServer) -> None:
    stub.play = lambda request: Play(0.0 if request.task.id == "a" else FOR_EVER)
    script = """
    rollouts = client.rollouts(["a", "b", "c"], agent="tool-loop")
    print(next(rollouts).task.id)
    """
    assert lines_printed(stub, script) == ["a"]
    wait_until_sync(lambda: stub.open == [])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_thread_that_still_calls_does_not_hold_up_the_end(stub: StubServer) -> None:
    stub.play = lambda _: Play(FOR_EVER)
    script = """
    episode = client.create_episode("do it", agent="tool-loop")
    def wait():
        try:
            episode.wait()
        except TurnstileError:
            pass
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.3)
    """
    lines_printed(stub, script)


@pytest.mark.slow
def test_calls_in_exit_handlers_and_finalizers_do_not_hang(stub: StubServer) -> None:
    """By name, so that asyncio would need a thread to resolve it: there is none any more."""
    script = """
    import atexit
    def last():
        for client in (fresh, known):
            try:
                client.health()
            except TurnstileError as error:
                print(type(error).__name__)
    by_name = url.replace("127.0.0.1", "localhost")
    fresh, known = Client(by_name, settings=settings), Client(by_name, settings=settings)
    known.health()

    class Late:
        def __init__(self, client):
            self.client = client
        def __del__(self):
            try:
                self.client.episode("ep_1").cancel()
            except TurnstileError:
                pass

    late = Late(known)
    late.itself = late
    atexit.register(last)
    sys.modules["late"] = late
    """
    lines_printed(stub, script)
