"""The clients, async and blocking, against a real control API."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import turnstile
from control_support import Door, OpenDoor, engine_process, running_door
from turnstile import (
    AsyncClient,
    AuthError,
    Client,
    Conflict,
    EngineError,
    InvalidRequest,
    NotFound,
    ProtocolError,
    ServerBusy,
    ServerError,
    ServerUnavailable,
    Timeout,
)
from turnstile._operations import Operations
from waiting import wait_until

pytestmark = pytest.mark.anyio

Make = Callable[..., Any]
"""Makes a client of either kind (see conftest)."""


def free_socket() -> socket.socket:
    """Bound, not listening: connections to it are refused."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


# One server


async def test_an_episode_from_creation_to_samples(client: Any, door: Door) -> None:
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    episode = await client.create_episode(
        "say hello", metadata={"split": "train"}, limits={"max_turns": 3}, traceparent=trace
    )
    assert (await episode.status()).traceparent == trace
    assert episode.model_url.endswith(f"/e/{episode.episode_id}")
    assert episode.episode_key
    turn_id = door.add_turn(episode.episode_id)
    now = await episode.status()
    assert (now.status, now.metadata, now.limits.max_turns) == ("running", {"split": "train"}, 3)
    assert (await episode.finish()).status == "completed"
    assert (await episode.wait(timeout=60)).status == "completed"
    [turn] = await episode.turns()
    assert turn.turn_id == turn_id
    [row] = (await episode.samples()).samples
    assert row.input_ids.dtype == np.int32
    assert row.logprobs.dtype == np.float32
    assert row.loss_mask.sum() == len(turn.completion_ids) - len(turn.without_token)
    assert len((await episode.samples(include_untrained=True)).samples) == 1
    [outline] = await episode.turn_outlines()
    assert (outline.turn_id, outline.completion_tokens) == (turn_id, len(turn.completion_ids))
    shown = await episode.tokens(turn_id, start=1, count=3)
    assert (list(shown.ids), shown.sample_id) == (row.input_ids[1:4].tolist(), row.sample_id)
    found = await episode.find_tokens(turn_id, token_id=shown.ids[0], after=0, limit=1)
    assert [match.start for match in found.matches] == [1]
    assert (await episode.find_tokens(turn_id, "call 0")).matches != ()
    assert (await episode.breaks()).breaks == ()
    forest = await episode.tree()
    assert forest.to_samples().model_dump_json() == (await episode.samples()).model_dump_json()
    assert (await episode.audit()).passed
    spans = (await episode.spans()).spans
    assert [span.turn_id for span in spans if span.kind == "model"] == [turn_id]
    assert (await client.audit(episode.episode_id)).episode_id == episode.episode_id
    await episode.delete()
    with pytest.raises(NotFound):
        await episode.status()


async def test_an_external_agent_is_told_what_it_is_asked(make: Make, launching_door: Door) -> None:
    async with make(launching_door.url, key=launching_door.key) as client:
        for task, instruction in (("sum-1", "1 + 3?"), ("say hello to all", "say hello to all")):
            episode = await client.create_episode(task)
            assert (await episode.ready(timeout=60)).instruction == instruction
            assert (await episode.status()).task.instruction == (None if task == "sum-1" else instruction)
            await episode.cancel()


@pytest.mark.slow
async def test_wait_returns_when_the_episode_ends(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = await client.create_episode("say hello")
    ended: list[Any] = []
    polls: list[str] = []
    poll = Operations.episode

    async def noted(self: Operations, episode_id: str, wait_s: float = 0.0) -> Any:
        polls.append(episode_id)
        return await poll(self, episode_id, wait_s)

    monkeypatch.setattr(Operations, "episode", noted)

    async def wait() -> None:
        ended.append(await episode.wait(timeout=60))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await wait_until(lambda: len(polls) == 3)
        assert ended == []
        await client.episode(episode.episode_id).cancel()
    assert ended[0].status == "cancelled"


async def test_wait_that_takes_too_long_is_a_timeout(client: Any) -> None:
    episode = await client.create_episode("say hello")
    with pytest.raises(Timeout, match="still running after"):
        await episode.wait(timeout=0.3)
    with pytest.raises(TimeoutError):
        await episode.wait(timeout=0)


async def test_a_block_that_raises_cancels_its_episode(client: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with await client.create_episode("say hello") as episode:
            raise ZeroDivisionError
    assert (await episode.status()).status == "cancelled"


async def test_a_block_that_ends_leaves_its_episode_alone(client: Any) -> None:
    async with await client.create_episode("say hello") as episode:
        pass
    assert (await episode.status()).status == "running"


async def test_the_blocks_own_error_wins_over_a_failing_cancel(client: Any) -> None:
    with pytest.raises(ZeroDivisionError) as raised:  # noqa: PT012
        async with await client.create_episode("say hello") as episode:
            await episode.delete()
            raise ZeroDivisionError
    assert "could not be cancelled" in raised.value.__notes__[0]


async def test_a_cancelled_task_still_cancels_its_episode(door: Door) -> None:
    async with AsyncClient(door.url, key=door.key) as client:
        with anyio.CancelScope() as scope:
            async with await client.create_episode("say hello") as episode:
                scope.cancel()
                await anyio.sleep_forever()
        assert (await episode.status()).status == "cancelled"


async def test_episodes_walks_all_pages(client: Any) -> None:
    group = (await client.create_episode("say hello")).episode_id
    made = [(await client.create_episode("say hello", group_id=group)).episode_id for _ in range(5)]
    seen = [e.episode_id async for e in client.episodes(group_id=group, page_size=2)]
    assert seen == made[::-1]
    assert [e async for e in client.episodes(group_id=group, status="failed")] == []


async def test_the_engine_is_shown_paused_resumed_and_given_weights(client: Any, door: Door) -> None:
    assert (await client.engine())[door.url].ok
    assert (await client.pause())[door.url].paused is True
    assert (await client.resume())[door.url].paused is False
    assert (await client.update_weights(str(door.other_model), "v7"))[door.url].weight_version == "v7"
    assert await client.health() == {door.url: None}


# Errors


@pytest.mark.slow
async def test_a_wrong_key_is_an_auth_error_that_says_where_the_key_is(make: Make, door: Door) -> None:
    async with make(door.url, key="wrong") as client:
        with pytest.raises(AuthError, match=r"control\.key") as raised:
            await client.create_episode("say hello")
    assert (raised.value.status, raised.value.type) == (401, "unauthorized")
    assert raised.value.server == door.url


async def test_the_key_may_be_in_the_url(make: Make, door: Door) -> None:
    async with make(f"{door.url}/k/{door.key}/") as client:
        assert (await client.create_episode("say hello")).episode_id


async def test_server_errors_are_typed(client: Any, door: Door) -> None:
    episode = await client.create_episode("say hello")
    with pytest.raises(Conflict):
        await client.create_episode("say hello", episode_id=episode.episode_id)
    with pytest.raises(InvalidRequest, match=r"limits\.max_turns"):
        await client.create_episode("say hello", limits={"max_turns": 10**9})
    with pytest.raises(NotFound):
        await client.episode("ep_unknown").samples()
    with pytest.raises(InvalidRequest) as raised:
        await client.update_weights("/nowhere", "v8")
    assert raised.value.type == "engine_refused"


@pytest.mark.parametrize("metadata", [{"n": float("nan")}, {"text": "half a \ud800 pair"}])
async def test_what_json_cannot_hold_is_an_invalid_request(client: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await client.create_episode("say hello", metadata=metadata)


@pytest.mark.thorough
@pytest.mark.slow
async def test_an_engine_that_has_died_is_an_engine_error(
    tiny_model: Path, other_tiny_model: Path, tmp_path: Path
) -> None:
    with (
        engine_process(tiny_model, other_tiny_model) as own,
        running_door(own, tmp_path) as door,
    ):
        own.process.kill()
        own.process.wait()
        async with AsyncClient(door.url, key=door.key) as client:
            with pytest.raises(EngineError):
                await client.pause()
            assert (await client.engine())[door.url].ok is False


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"limits": {"max_turns": 0}}, "limits.max_turns"),
        ({"episode_id": "a/b"}, "episode_id"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
    ],
)
async def test_what_cannot_be_a_request_is_refused_before_it_is_sent(
    make: Make, fields: dict[str, Any], named: str
) -> None:
    async with make("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest, match=named):
            await client.create_episode("say hello", **fields)


@pytest.mark.parametrize("episode_id", ["", "../engine", "a b", "x" * 65, "ep_1\n"])
async def test_what_cannot_be_an_episode_id_is_refused_before_it_is_sent(make: Make, episode_id: str) -> None:
    async with make("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest, match="no episode id"):
            await client.episode(episode_id).status()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", []])
def test_what_cannot_be_a_server_is_refused_at_once(make: Make, url: Any) -> None:
    with pytest.raises(InvalidRequest, match="URL"):
        make(url)


@pytest.mark.slow
async def test_a_full_server_is_server_busy(make: Make, open_door: OpenDoor) -> None:
    with open_door(episodes={"max_open": 1}) as door:
        async with make(door.url, key=door.key) as client:
            await client.create_episode("say hello")
            with pytest.raises(ServerBusy) as raised:
                await client.create_episode("say hello")
    assert raised.value.retry_after_s == 5


async def test_a_failing_server_is_a_server_error(make: Make) -> None:
    body = b'{"error": {"type": "internal_error", "message": "its log says why"}}'
    with scripted_server(http_answer("500 Internal Server Error", body)) as (url, _):
        async with make(url) as client:
            with pytest.raises(ServerError, match="its log says why"):
                await client.episode("ep_1").finish()


async def test_a_server_that_is_down_is_server_unavailable(make: Make) -> None:
    with free_socket() as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with make(url) as client:
            with pytest.raises(ServerUnavailable) as raised:
                await client.create_episode("say hello")
            assert raised.value.may_have_happened is False
            with pytest.raises(ServerUnavailable):
                await client.episode("ep_1").status()
            [error] = (await client.health()).values()
            assert isinstance(error, ServerUnavailable)


# Servers that misbehave below HTTP


@contextmanager
def scripted_server(*answers: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """A TCP server that reads one request per connection and gives the next answer; None hangs up."""
    requests: list[bytes] = []
    listener = free_socket()
    listener.listen()

    def serve() -> None:
        for answer in answers:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                requests.append(_read_request(connection))
                if answer is not None:
                    connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _read_request(connection: socket.socket) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(65536)
    head, _, body = request.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while lengths and len(body) < int(lengths[0]):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def http_answer(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status.encode(), len(body), body)


CREATED = http_answer("201 Created", b'{"episode_id":"ep_1","status":"running","model_url":"http://m/e/ep_1"}')


async def test_a_creation_whose_answer_is_lost_is_repeated_with_the_same_idempotency_key(make: Make) -> None:
    with scripted_server(None, CREATED) as (url, requests):
        async with make(url) as client:
            assert (await client.create_episode("say hello")).episode_id == "ep_1"
    first, second = (request.partition(b"\r\n\r\n")[2] for request in requests)
    assert b'"idempotency_key"' in first
    assert first == second


async def test_a_read_whose_answer_is_lost_is_repeated(make: Make) -> None:
    with scripted_server(None, http_answer("200 OK", b"{}")) as (url, requests):
        async with make(url) as client:
            assert await client.health() == {url: None}
    assert len(requests) == 2


async def test_a_call_that_may_have_happened_is_not_repeated(make: Make) -> None:
    with scripted_server(None, None) as (url, requests):
        async with make(url) as client:
            with pytest.raises(ServerUnavailable) as raised:
                await client.episode("ep_1").finish()
    assert raised.value.may_have_happened
    assert len(requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        http_answer("200 OK", b"<html>hello</html>"),
        http_answer("200 OK", b'{"status": "running"}'),
        http_answer("404 Not Found", b"<html>nothing here</html>"),
        http_answer("502 Bad Gateway", b""),
        http_answer("500 Internal Server Error", b'{"error": "a string"}'),
        http_answer("200 OK", b"[" * 100_000),
        http_answer("500 Internal Server Error", b"[" * 100_000),
        http_answer("500 Internal Server Error", b'{"error": ' + b"1" * 5000 + b"}"),
    ],
)
async def test_an_answer_that_is_not_turnstiles_is_a_protocol_error(make: Make, answer: bytes) -> None:
    with scripted_server(answer) as (url, _):
        async with make(url) as client:
            with pytest.raises(ProtocolError):
                await client.episode("ep_1").status()


async def test_damaged_samples_are_a_protocol_error(make: Make) -> None:
    with scripted_server(http_answer("200 OK", b"\x00" * 64)) as (url, _):
        async with make(url) as client:
            with pytest.raises(ProtocolError):
                await client.episode("ep_1").samples()


async def test_an_unknown_status_with_a_turnstile_error_keeps_its_words(make: Make) -> None:
    body = b'{"error": {"type": "teapot", "message": "short and stout", "detail": [1]}}'
    with scripted_server(http_answer("418 Teapot", body)) as (url, _):
        async with make(url) as client:
            with pytest.raises(ServerError, match="short and stout") as raised:
                await client.episode("ep_1").status()
    assert (raised.value.type, raised.value.status, raised.value.detail) == ("teapot", 418, [1])


# Several servers


@pytest.fixture(scope="module")
def doors(open_door: OpenDoor) -> Iterator[list[Door]]:
    with open_door() as first, open_door() as second, open_door() as third:
        yield [first, second, third]


async def where(door: Door) -> set[str]:
    async with AsyncClient(door.url, key=door.key) as client:
        return {episode.episode_id async for episode in client.episodes()}


@pytest.mark.slow
async def test_episodes_spread_over_the_servers(make: Make, doors: list[Door]) -> None:
    before = [len(await where(door)) for door in doors]
    async with make([door.url for door in doors], key=doors[0].key) as client:
        for _ in range(6):
            await client.create_episode("say hello")
    assert [len(await where(door)) - count for door, count in zip(doors, before, strict=True)] == [2, 2, 2]


async def test_an_episode_goes_where_the_fewest_are_open(make: Make, doors: list[Door]) -> None:
    async with make([door.url for door in doors], key=doors[0].key) as client:
        made = [await client.create_episode("say hello") for _ in range(3)]
        await made[1].finish()
        fourth = await client.create_episode("say hello")
        [home] = [door for door in doors if made[1].episode_id in await where(door)]
        assert fourth.episode_id in await where(home)


async def test_a_server_that_is_down_is_passed_over(make: Make, doors: list[Door]) -> None:
    with free_socket() as closed:
        down = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with make([down, doors[0].url, doors[1].url], key=doors[0].key) as client:
            made = {(await client.create_episode("say hello")).episode_id for _ in range(4)}
            assert made <= await where(doors[0]) | await where(doors[1])
            health = await client.health()
    assert isinstance(health[down], ServerUnavailable)
    assert health[doors[0].url] is None


@pytest.mark.slow
async def test_a_full_server_is_passed_over(make: Make, doors: list[Door], open_door: OpenDoor) -> None:
    with open_door(episodes={"max_open": 1}) as small:
        async with make([small.url, doors[0].url], key=small.key) as client:
            for _ in range(5):
                await client.create_episode("say hello")
        assert len(await where(small)) == 1


async def test_all_servers_down_is_one_typed_error_that_names_each(make: Make) -> None:
    with free_socket() as one, free_socket() as two:
        urls = [f"http://127.0.0.1:{s.getsockname()[1]}" for s in (one, two)]
        async with make(urls) as client:
            with pytest.raises(ServerUnavailable) as raised:
                await client.create_episode("say hello")
    assert all(url in raised.value.message for url in urls)


async def test_an_episode_of_another_client_is_found_by_asking_all(make: Make, doors: list[Door]) -> None:
    async with make(doors[2].url, key=doors[2].key) as other:
        episode_id = (await other.create_episode("say hello")).episode_id
    async with make([door.url for door in doors], key=doors[0].key) as client:
        assert (await client.episode(episode_id).finish()).status == "completed"
        with pytest.raises(NotFound, match="none of 3 servers"):
            await client.episode("ep_unknown").status()


async def test_an_episode_that_may_be_on_a_silent_server_is_not_called_unknown(
    make: Make, doors: list[Door]
) -> None:
    with free_socket() as closed:
        down = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with make([doors[0].url, down], key=doors[0].key) as client:
            with pytest.raises(ServerUnavailable, match="on no server that answers"):
                await client.episode("ep_unknown").status()


async def test_listing_and_engine_calls_cover_every_server(make: Make, doors: list[Door]) -> None:
    async with make([door.url for door in doors], key=doors[0].key) as client:
        made = [await client.create_episode("say hello", group_id="everywhere") for _ in range(3)]
        seen = {e.episode_id async for e in client.episodes(group_id="everywhere")}
        assert {episode.episode_id for episode in made} <= seen
        assert (await client.pause()).keys() == {door.url for door in doors}
        assert all(info.paused is False for info in (await client.resume()).values())
        assert (await client.engine(doors[1].url)).keys() == {doors[1].url}


@pytest.mark.slow
async def test_a_client_may_be_shared_by_threads(doors: list[Door]) -> None:
    made: list[str] = []
    with Client([door.url for door in doors], key=doors[0].key) as client:

        def work() -> None:
            for _ in range(5):
                with client.create_episode("say hello") as episode:
                    episode.finish()
                made.append(episode.episode_id)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(made)) == 30


@pytest.mark.slow
def test_the_package_exports_what_it_says() -> None:
    for name in turnstile.__all__:
        assert getattr(turnstile, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = turnstile.nothing
