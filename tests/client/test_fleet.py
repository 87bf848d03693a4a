"""A fleet that changes under its rollouts: servers that join, leave, move, drain, fall silent and come back.

The servers are stubs over real HTTP; ``test_fleet_processes`` has real ones.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from stub_server import FOR_EVER, Answer, Play, StubServer

from control_support import running_app
from turnstile import (
    AsyncClient,
    AuthError,
    Client,
    ClientSettings,
    InvalidRequest,
    ServerUnavailable,
    _server_fleet,
)
from turnstile.errors import ProtocolError, SourceUnavailable
from turnstile.models import EpisodeRequest, EpisodeStatus, Fault
from turnstile.rollout import Rollout
from turnstile.servers import DnsServers, FileServers, checked_source
from waiting import wait_until

pytestmark = pytest.mark.anyio

QUICK = ClientSettings(
    retries=0,
    retry_delay_s=0.01,
    poll_s=0.2,
    cancel_s=2.0,
    backoff_s=0.01,
    backoff_max_s=0.05,
    silent_s=0.3,
    start_s=0.3,
    outage_s=20.0,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server_fleet, "LOOK_S", 0.05)


@dataclass
class Fleet:
    """Stubs, and the file that names them."""

    file: Path
    stack: ExitStack
    stops: dict[str, ExitStack] = field(default_factory=dict)
    """By URL: ends the listener."""

    def start(self, stub: StubServer | None = None) -> StubServer:
        """A new server, or one that is started again, at a free port."""
        stub = stub or StubServer()
        stop = ExitStack()
        stub.url = stop.enter_context(running_app(stub.app()))
        self.stops[stub.url] = stop
        self.stack.callback(stop.close)
        return stub

    def stop(self, stub: StubServer) -> None:
        self.stops.pop(stub.url).close()

    def name(self, *stubs: StubServer) -> None:
        self.file.write_text("# the fleet\n" + "".join(f"{stub.url}\n" for stub in stubs))

    def client(self, **changes: Any) -> AsyncClient:
        settings = ClientSettings(**{**vars_of(QUICK), **changes})
        return AsyncClient(f"file:{self.file}", settings=settings)


def vars_of(settings: ClientSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__slots__}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path / "servers", stack)


@dataclass
class Run:
    """Rollouts under way."""

    given: list[Rollout] = field(default_factory=list)

    async def collect(self, client: AsyncClient, tasks: Sequence[str], **options: Any) -> None:
        async for rollout in client.rollouts(tasks, **{"agent": "tool-loop", **options}):
            self.given.append(rollout)

    def once_each(self, count: int) -> None:
        """Every rollout is given once, completed, and what is given was played to its end."""
        assert len({rollout.rollout_id for rollout in self.given}) == len(self.given) == count
        assert {rollout.status for rollout in self.given} == {EpisodeStatus.COMPLETED}


def lasting(seconds: float) -> Callable[[EpisodeRequest], Play]:
    return lambda _: Play(seconds)


@pytest.mark.slow
async def test_a_server_joins_while_rollouts_run(fleet: Fleet) -> None:
    first, run = fleet.start(), Run()
    first.play = lasting(0.2)
    fleet.name(first)
    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 12, max_concurrent=2))
        await wait_until(lambda: run.given)
        second = fleet.start()
        fleet.name(first, second)
        await task
    run.once_each(12)
    assert second.created


@pytest.mark.slow
async def test_a_server_that_leaves_the_source_loses_its_rollouts_at_once_and_cancels_them(fleet: Fleet) -> None:
    """``outage_s`` and ``silent_s`` are for ever here: only the source tells."""
    leaving, staying, run = fleet.start(), fleet.start(), Run()
    leaving.play = lasting(FOR_EVER)
    fleet.name(leaving, staying)
    async with fleet.client(silent_s=1e9, outage_s=1e9) as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 6, max_concurrent=6))
        await wait_until(lambda: leaving.open and len(run.given) + len(leaving.open) == 6)
        lost = len(leaving.open)
        fleet.name(staying)
        await task
        await wait_until(lambda: len(leaving.cancelled) == lost)
    run.once_each(6)
    assert Counter(rollout.attempts for rollout in run.given) == {1: 6 - lost, 2: lost}
    again = [rollout for rollout in run.given if rollout.attempts == 2]
    assert {error.type for rollout in again for error in rollout.lost} == {"server_lost"}
    assert "does not name it any more" in again[0].lost[0].message
    assert {rollout.episode.episode_id for rollout in again if rollout.episode} <= {
        episode.episode_id for episode in staying.episodes
    }


@pytest.mark.slow
async def test_a_silent_server_that_comes_back_with_a_finished_episode_gives_nothing_twice(fleet: Fleet) -> None:
    silent, other, run = fleet.start(), fleet.start(), Run()
    silent.play = other.play = lasting(FOR_EVER)
    fleet.name(silent, other)
    async with fleet.client(outage_s=1e9) as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 8, max_concurrent=8))
        await wait_until(lambda: len(silent.open) + len(other.open) == 8 and len(silent.open) >= 2)
        finished, *running = silent.open
        fleet.stop(silent)
        await wait_until(lambda: len(other.open) == 8, "its rollouts are made again while it is away")
        episode, _, play = silent._episodes[finished.episode_id]
        silent._episodes[finished.episode_id] = episode, 0.0, play  # it has ended meanwhile
        fleet.start(silent)
        fleet.name(silent, other)
        await wait_until(lambda: len(silent.cancelled) == len(running))
        other.let_end()
        await task
    run.once_each(8)
    still = {episode.episode_id for episode in running}
    assert set(silent.cancelled) == still, "what still ran; what had ended stays as it is"
    given = {rollout.episode.episode_id for rollout in run.given if rollout.episode is not None}
    assert not given & {*still, finished.episode_id}
    assert Counter(rollout.attempts for rollout in run.given) == {1: 8 - len(running) - 1, 2: len(running) + 1}


@pytest.mark.slow
async def test_a_server_that_moves_keeps_its_rollouts(fleet: Fleet) -> None:
    moving, other, run = fleet.start(), fleet.start(), Run()
    moving.play = lasting(FOR_EVER)
    fleet.name(moving, other)
    async with fleet.client(silent_s=30.0) as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 4, max_concurrent=4))
        await wait_until(lambda: moving.open and len(moving.open) + len(run.given) == 4)
        before = moving.url
        fleet.stop(moving)
        fleet.start(moving)
        assert moving.url != before
        fleet.name(moving, other)

        async def followed() -> bool:
            return moving.url in {each.url for each in await client.servers() if each.state == "ready"}

        await wait_until(followed)
        moving.let_end()
        await task
        assert [(each.url, each.state) for each in await client.servers()] == [
            (url, "ready") for url in (other.url, moving.url)
        ]
    run.once_each(4)
    assert {rollout.attempts for rollout in run.given} == {1}


@pytest.mark.slow
async def test_a_draining_server_ends_what_it_has_also_where_the_source_drops_it(fleet: Fleet) -> None:
    """A headless service drops a pod that is not ready."""
    draining, other, run = fleet.start(), fleet.start(), Run()
    draining.play = lasting(0.8)
    fleet.name(draining, other)
    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 12, max_concurrent=4))
        await wait_until(lambda: draining.open)
        assert (await client.drain(draining.url)).open >= 1
        made = len(draining.created)
        fleet.name(other)
        await task
    run.once_each(12)
    assert {rollout.attempts for rollout in run.given} == {1}
    assert len(draining.created) == made
    assert draining.cancelled == []


async def test_what_waits_for_a_place_on_a_draining_server_is_made_elsewhere(fleet: Fleet) -> None:
    draining, other, run = fleet.start(), fleet.start(), Run()
    kinds = iter([Play(FOR_EVER), Play(FOR_EVER, queued=True), Play(FOR_EVER, queued=True)])
    draining.play = lambda _: next(kinds)
    fleet.name(draining)
    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 3, max_concurrent=3, retries=0))
        await wait_until(lambda: len(draining.open) == 3)
        running, *queued = draining.open
        fleet.name(draining, other)
        await client.drain(draining.url)
        await wait_until(lambda: len(run.given) == 2)
        await wait_until(lambda: len(draining.cancelled) == 2)
        draining.let_end()
        await task
    run.once_each(3)
    assert set(draining.cancelled) == {episode.episode_id for episode in queued}
    by_attempts = {rollout.episode.episode_id: rollout.attempts for rollout in run.given if rollout.episode}
    assert by_attempts.pop(running.episode_id) == 1
    assert list(by_attempts.values()) == [2, 2]
    assert {error.type for rollout in run.given for error in rollout.lost} == {"server_draining"}


@pytest.mark.slow
async def test_a_fleet_without_a_place_is_waited_for_and_costs_no_attempt(fleet: Fleet) -> None:
    first, other, run = fleet.start(), fleet.start(), Run()
    first.play = lasting(FOR_EVER)
    fleet.name(first)
    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"], retries=1))
        await wait_until(lambda: first.open)
        other.max_open = 0
        fleet.name(first, other)
        fleet.stop(first)

        async def lost() -> bool:
            return any("has not served" in str(each.lost) for each in client._operations._pool.servers)

        await wait_until(lost)
        other.draining = True  # now none takes it
        await anyio.sleep(0.5)
        assert not task.done()
        first.play = lasting(0.0)
        fleet.start(first)
        fleet.name(first, other)
        await task
    run.once_each(1)
    assert run.given[0].attempts == 2
    assert len(first.created) == 2
    assert other.created == []


async def test_an_agent_of_ones_own_is_stopped_and_started_elsewhere(fleet: Fleet) -> None:
    leaving, staying, run = fleet.start(), fleet.start(), Run()
    fleet.name(leaving)
    cancelled: list[str] = []

    async def agent(handle: Any) -> None:
        if handle.episode_id in {episode.episode_id for episode in leaving.episodes}:
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                cancelled.append(handle.episode_id)
                raise

    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"], agent=agent))
        await wait_until(lambda: leaving.open)
        fleet.name(staying)
        await task
    run.once_each(1)
    assert len(cancelled) == 1


@pytest.mark.slow
async def test_a_creation_that_was_lost_with_its_server_is_found_and_cancelled_later(fleet: Fleet) -> None:
    leaving, staying, run = fleet.start(), fleet.start(), Run()
    leaving.play = lasting(FOR_EVER)
    leaving.answer = lambda call: Answer(502, None, afterwards=True) if call == "POST /episodes" else None
    fleet.name(leaving)
    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"]))
        await wait_until(lambda: leaving.created)
        fleet.stop(leaving)
        fleet.name(leaving, staying)
        await task
        fleet.start(leaving)
        fleet.name(leaving, staying)

        async def cancelled() -> bool:
            await client.servers()
            return bool(leaving.cancelled)

        await wait_until(cancelled)
    run.once_each(1)
    assert len(leaving.created) == 1
    assert len(staying.created) == 1
    assert [one.attempt for one in staying.created] == [1]


@pytest.mark.slow
async def test_a_source_that_says_nothing_sensible_changes_nothing(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "turnstile")
    server, run = fleet.start(), Run()
    server.play = lasting(FOR_EVER)
    fleet.name(server)
    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 2, max_concurrent=2))
        await wait_until(lambda: len(server.open) == 2)
        wrong = [b"", b"# nothing\n", b"http://", b"http://127.0.0.1:1 and more\n", b"no url", b"\xff\xfe", None]
        for text in wrong:
            fleet.file.unlink() if text is None else fleet.file.write_bytes(text)
            looks = server.looks
            await wait_until(partial(_further, server, looks + 3))
        fleet.name(server)
        looks = server.looks
        await wait_until(lambda: server.looks > looks + 1)
        server.let_end()
        await task
    run.once_each(2)
    assert {rollout.attempts for rollout in run.given} == {1}
    for said in ("names no server", "is no URL", "is no server URL", "cannot be read"):
        assert said in caplog.text
    assert caplog.text.count("can be read again") == 1


def _further(server: StubServer, looks: int) -> bool:
    return server.looks > looks


@pytest.mark.slow
@pytest.mark.parametrize("what", ["source", "server"])
async def test_what_flaps_makes_some_rollouts_again_and_gives_none_twice(fleet: Fleet, what: str) -> None:
    """``server``: it is away each time, too, and comes back elsewhere."""
    one, other, run = fleet.start(), fleet.start(), Run()
    one.play = other.play = lasting(0.15)
    fleet.name(one, other)
    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 30, max_concurrent=6, retries=30))
        while not task.done():
            fleet.name(one)
            if what == "server":
                fleet.stop(other)
            await anyio.sleep(0.2)
            if what == "server":
                fleet.start(other)
            fleet.name(other, one)
            await anyio.sleep(0.1)
        await task
    run.once_each(30)


@pytest.mark.parametrize("what", ["release", "key"])
async def test_a_server_that_becomes_another_one_in_mid_run_loses_its_rollouts_and_says_why(
    fleet: Fleet, what: str
) -> None:
    changed, other, run = fleet.start(), fleet.start(), Run()
    changed.play = other.play = lasting(FOR_EVER)
    fleet.name(changed, other)
    async with fleet.client() as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 4, max_concurrent=4))
        await wait_until(lambda: len(changed.open) + len(other.open) == 4 and changed.open)
        moved = len(changed.open)
        if what == "release":
            changed.release = "99.1.0"
        else:
            changed.key = "another"
        await wait_until(lambda: len(other.open) == 4)
        other.let_end()
        await task
    run.once_each(4)
    lost = [error for rollout in run.given for error in rollout.lost]
    assert len(lost) == moved
    for error in lost:
        assert (error.type, error.fault) == ("server_lost", Fault.INFRASTRUCTURE)
        assert f"{changed.url} cannot be used: " in error.message
        assert ("use one release" if what == "release" else "unauthorized") in error.message


async def test_a_machine_that_is_listed_under_two_names_is_used_once(fleet: Fleet) -> None:
    server, run = fleet.start(), Run()
    names = [server.url, server.url.replace("127.0.0.1", "localhost")]
    async with AsyncClient(names, settings=QUICK) as client:
        await run.collect(client, ["a"] * 6, max_concurrent=6)
        found = {each.state: each for each in await client.servers()}
    run.once_each(6)
    assert len(server.created) == 6
    assert set(found) == {"ready", "refused"}
    assert f"the server at {found['ready'].url} (" in str(found["refused"].why)


@pytest.mark.slow
async def test_a_name_that_cannot_be_looked_up_meanwhile_changes_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, run = fleet.start(), Run()
    server.play = lasting(FOR_EVER)
    number: int | None = 0

    async def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if number is None:
            await anyio.sleep_forever()
        if number:
            raise socket.gaierror(number, "it says no")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(anyio, "getaddrinfo", look_up)
    monkeypatch.setattr(_server_fleet, "LOOK_TIMEOUT_S", 0.2)
    async with AsyncClient(f"dns://turnstile.rl.svc:{server.url.rpartition(':')[2]}", settings=QUICK) as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 2, max_concurrent=2))
        await wait_until(lambda: len(server.open) == 2)
        for number in (socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_FAIL, None, 0):  # noqa: B007
            await wait_until(partial(_further, server, server.looks + 3))
        server.let_end()
        await task
    run.once_each(2)
    assert {rollout.attempts for rollout in run.given} == {1}
    for said in (
        "cannot be looked up: it says no",
        "names no server",
        "gave no answer within",
        "can be read again",
    ):
        assert said in caplog.text


@pytest.mark.slow
async def test_servers_that_cannot_be_used_are_left_out_and_told(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "turnstile")
    fine, strange, older, keyed, twin = (fleet.start() for _ in range(5))
    strange.release = "99.1.0"
    older.no_load = Answer(404, "not_found")
    keyed.key = "another"
    twin.server_id = fine.server_id
    fleet.name(fine, strange, older, keyed, twin)
    run = Run()
    async with fleet.client() as client:
        await run.collect(client, ["a"] * 5, max_concurrent=5)
        found = {each.url: each for each in await client.servers()}
    run.once_each(5)
    if twin.created:  # of two that say the same the first to answer is used
        fine, twin = twin, fine
    assert [len(each.created) for each in (fine, strange, older, keyed, twin)] == [5, 0, 0, 0, 0]
    assert found[fine.url].state == "ready"
    for each, said in (
        (strange, "is Turnstile 99.1.0, this client"),
        (older, "an older release"),
        (keyed, "unauthorized"),
        (twin, "has the data directory of the server at"),
    ):
        assert found[each.url].state == "refused"
        assert said in str(found[each.url].why)
        assert said in caplog.text


@pytest.mark.slow
async def test_where_no_server_can_be_used_the_first_call_says_why(fleet: Fleet) -> None:
    server = fleet.start()
    fleet.name(server)
    server.key = "another"
    with pytest.raises(AuthError):
        await first_call(fleet)
    server.key, server.release = None, "99.1.0"
    with pytest.raises(ProtocolError, match="use one release"):
        await first_call(fleet)
    fleet.file.write_text("# none yet\n")
    with pytest.raises(ServerUnavailable, match=r"has named no server for 0\.3 s"):
        await first_call(fleet)
    fleet.file.unlink()
    with pytest.raises(SourceUnavailable, match="cannot be read"):
        await first_call(fleet)


async def first_call(fleet: Fleet) -> None:
    async with fleet.client() as client:
        await client.create_episode("Hello.")


@pytest.mark.slow
async def test_the_first_server_may_come_later_than_the_client(fleet: Fleet) -> None:
    fleet.file.write_text("")
    async with fleet.client(start_s=30.0) as client:
        task = asyncio.create_task(client.create_episode("Hello."))
        await anyio.sleep(0.2)
        server = fleet.start()
        server.no_load = Answer(503, "server_starting")
        fleet.name(server)
        await wait_until(lambda: server.looks > 2)
        assert [each.state for each in await client.servers()] == ["starting"]
        assert not task.done()
        server.no_load = None
        await task
    assert len(server.created) == 1


async def test_a_starting_server_is_waited_for_by_a_client_of_its_own(fleet: Fleet) -> None:
    server = fleet.start()
    left = iter([True, True, False])
    listed = server.answer

    def starting(call: str) -> Answer | None:
        return Answer(503, "server_starting") if call == "POST /episodes" and next(left) else listed(call)

    server.answer = starting
    async with AsyncClient(server.url, settings=QUICK) as client:
        await client.create_episode("Hello.")
    server.answer = lambda call: Answer(503, "server_starting") if call == "POST /episodes" else None
    async with AsyncClient(server.url, settings=QUICK) as client:
        with pytest.raises(ServerUnavailable, match="server_starting"):
            await client.create_episode("Hello.")


@pytest.mark.parametrize("how", ["gone", "silent", "drained"])
async def test_a_step_tells_what_is_left_of_a_server_that_is_lost(fleet: Fleet, how: str) -> None:
    leaving, staying, run = fleet.start(), fleet.start(), Run()
    fleet.name(leaving, staying)
    async with fleet.client(silent_s=0.2 if how == "silent" else 1e9, retries=0) as client:
        await run.collect(client, ["a"] * 4, max_concurrent=4)
        assert leaving.created
        if how == "drained":
            await client.drain(leaving.url)
            await wait_until(partial(_drains, client, leaving))
        fleet.stop(leaving)
        if how == "gone":
            fleet.name(staying)
        told = await client.trained(7, run.given)
    steps = Counter(rollout.episode.train_step for rollout in told if rollout.episode is not None)
    assert steps == {7: len(staying.created), None: len(leaving.created)}


async def _drains(client: AsyncClient, stub: StubServer) -> bool:
    return {each.url: each.state for each in await client.servers()}[stub.url] == "draining"


def test_a_blocking_client_follows_a_file_and_can_be_pickled(fleet: Fleet) -> None:
    one, other = fleet.start(), fleet.start()
    fleet.name(one, other)
    with Client(FileServers(fleet.file), settings=QUICK) as client:
        given = list(client.rollouts(["a"] * 6, agent="tool-loop", max_concurrent=6))
        assert {each.state for each in client.servers()} == {"ready"}
        assert set(client.load()) == {one.url, other.url}
        copy = pickle.loads(pickle.dumps(client))
    with copy:
        assert set(copy.load()) == {one.url, other.url}
        assert copy.drain(one.url).draining
    assert len({rollout.rollout_id for rollout in given}) == 6
    assert len(one.created) + len(other.created) == 6
    assert one.created
    assert other.created


@pytest.mark.slow
async def test_two_urls_are_a_fleet_too(fleet: Fleet) -> None:
    one, other, run = fleet.start(), fleet.start(), Run()
    one.play = lasting(FOR_EVER)
    async with AsyncClient([one.url, other.url], settings=QUICK) as client:
        task = asyncio.create_task(run.collect(client, ["a"] * 4, max_concurrent=4))
        await wait_until(lambda: one.open and len(one.open) + len(run.given) == 4)
        fleet.stop(one)
        await task
    run.once_each(4)


async def addresses(source: Any) -> list[str]:
    return list(await source.addresses())


async def test_the_files_of_a_folder_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "0.url").write_text("http://a:1/  # rank 0\n")
    (tmp_path / "1.url").write_text("\nhttp://b:1\nhttp://c:1\n")
    (tmp_path / ".2.url.part").write_text("http://half")
    assert await addresses(FileServers(tmp_path)) == ["http://a:1/", "http://b:1", "http://c:1"]
    with pytest.raises(SourceUnavailable, match="cannot be read"):
        await addresses(FileServers(tmp_path / "none"))
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(SourceUnavailable, match="is it a list of URLs"):
        await addresses(FileServers(tmp_path))


async def test_every_address_of_a_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await addresses(DnsServers("127.0.0.1", 8000)) == ["http://127.0.0.1:8000"]
    assert await addresses(DnsServers("::1", 8000)) == ["http://[::1]:8000"]

    async def failing(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "it says no")

    monkeypatch.setattr(anyio, "getaddrinfo", failing)
    number = socket.EAI_NONAME
    assert await addresses(DnsServers("turnstile.rl.svc", 8000)) == [], "no pod is there"
    number = socket.EAI_AGAIN
    with pytest.raises(SourceUnavailable, match=r"turnstile\.rl\.svc cannot be looked up: it says no"):
        await addresses(DnsServers("turnstile.rl.svc", 8000))


async def test_health_says_what_a_server_waits_for(fleet: Fleet) -> None:
    fine, waiting, away = fleet.start(), fleet.start(), fleet.start()
    waiting.not_ready = "the server is starting: it waits for the engine (sglang)"
    fleet.name(fine, waiting, away)
    fleet.stop(away)
    async with fleet.client() as client:
        found = await client.health()
    assert found[fine.url] is None
    error = found[waiting.url]
    assert isinstance(error, ServerUnavailable)
    assert (error.type, error.message) == ("not_ready", waiting.not_ready)
    assert "could not be asked" in str(found[away.url])


def test_a_source_is_given_as_text_too() -> None:
    assert checked_source("file:/run/servers") == FileServers("/run/servers")
    assert checked_source(["dns://turnstile.rl.svc:8000"]) == DnsServers("turnstile.rl.svc", 8000)
    for wrong in ("dns://turnstile", "dns://:80", "dns://host:port", "ftp://a", [], ["http://a", "file:/b"]):
        with pytest.raises(InvalidRequest):
            checked_source(wrong)
