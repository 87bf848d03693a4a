"""The control API on a real server: routes, statuses, bodies, keys, limits."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from fastapi import APIRouter
from starlette.responses import StreamingResponse

from control_support import KEY, Door, OpenDoor, running_app
from turnstile.models import AuditReport, EngineInfo, Episode, EpisodeCreated, EpisodePage, Turn
from turnstile.models.samples_encoding import MEDIA_TYPE, decode_forest, decode_samples
from turnstile_server.control.app import build_control_app
from turnstile_server.http.connections import Seat
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio

TASK: dict[str, Any] = {"task": {"instruction": "say hello"}}


async def create(http: httpx.AsyncClient, **fields: Any) -> EpisodeCreated:
    response = await http.post("/episodes", json={**TASK, **fields})
    assert response.status_code == 201, response.text
    return EpisodeCreated.model_validate_json(response.content)


def error_of(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() <= {"type", "message", "detail"}
    assert error["type"] == kind
    assert error["message"]
    return error


# Episodes


async def test_an_episode_is_created_shown_finished_and_deleted(http: httpx.AsyncClient) -> None:
    created = await create(http, metadata={"split": "train"}, group_id="g1")
    path = f"/episodes/{created.episode_id}"
    assert created.model_url.endswith(f"/e/{created.episode_id}")
    assert created.episode_key
    shown = Episode.model_validate_json((await http.get(path)).content)
    assert (shown.status, shown.metadata, shown.reward) == ("running", {"split": "train"}, None)
    finished = await http.post(f"{path}/finish")
    assert finished.json()["status"] == "completed"
    assert (await http.delete(path)).status_code == 204
    error_of(await http.get(path), 404, "not_found")


async def test_cancel_ends_an_episode_once(http: httpx.AsyncClient) -> None:
    path = f"/episodes/{(await create(http)).episode_id}"
    assert (await http.post(f"{path}/cancel")).json()["status"] == "cancelled"
    assert (await http.post(f"{path}/cancel")).json()["status"] == "cancelled"


async def test_a_repeated_idempotency_key_gives_the_same_episode_with_200(http: httpx.AsyncClient) -> None:
    first = await create(http, idempotency_key="once")
    again = await http.post("/episodes", json={**TASK, "idempotency_key": "once"})
    assert again.status_code == 200
    assert EpisodeCreated.model_validate_json(again.content) == first


async def test_a_reused_id_is_409(http: httpx.AsyncClient) -> None:
    await create(http, episode_id="mine")
    error_of(await http.post("/episodes", json={**TASK, "episode_id": "mine"}), 409, "conflict")


async def test_wait_answers_at_the_next_change_of_status(http: httpx.AsyncClient, begun: list[Seat]) -> None:
    path = f"/episodes/{(await create(http)).episode_id}"
    seen: list[str] = []
    begun.clear()

    async def wait() -> None:
        seen.append((await http.get(path, params={"wait": 60}, timeout=120)).json()["status"])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await wait_until(lambda: begun)
        assert (await http.get(path)).json()["status"] == "running"
        assert seen == []
        await http.post(f"{path}/finish")
    assert seen == ["completed"]


async def test_wait_is_cut_to_the_servers_ceiling(open_door: OpenDoor) -> None:
    with open_door(control={"max_wait_s": 0.05}) as door:
        async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
            path = f"/episodes/{(await create(http)).episode_id}"
            assert (await http.get(path, params={"wait": 3600})).json()["status"] == "running"


async def test_pages_walk_all_episodes_newest_first(http: httpx.AsyncClient) -> None:
    made = [(await create(http, group_id="paged")).episode_id for _ in range(5)]
    seen: list[str] = []
    params: dict[str, Any] = {"group_id": "paged", "limit": 2}
    while True:
        page = EpisodePage.model_validate_json((await http.get("/episodes", params=params)).content)
        assert len(page.episodes) <= 2
        seen += [episode.episode_id for episode in page.episodes]
        if page.cursor is None:
            break
        params["cursor"] = page.cursor
    assert seen == made[::-1]


async def test_a_page_can_be_filtered_by_status(http: httpx.AsyncClient) -> None:
    kept = await create(http, group_id="filtered")
    ended = await create(http, group_id="filtered")
    await http.post(f"/episodes/{ended.episode_id}/cancel")
    page = await http.get("/episodes", params={"group_id": "filtered", "status": "running"})
    assert [e["episode_id"] for e in page.json()["episodes"]] == [kept.episode_id]


# Results


async def test_turns_come_as_json_in_commit_order(http: httpx.AsyncClient, door: Door) -> None:
    episode_id = (await create(http)).episode_id
    ids = [door.add_turn(episode_id) for _ in range(2)]
    body = (await http.get(f"/episodes/{episode_id}/turns")).json()
    turns = [Turn.model_validate(turn) for turn in body["turns"]]
    assert [turn.turn_id for turn in turns] == ids
    assert len(turns[0].logprobs) == len(turns[0].completion_ids) > 0


async def test_samples_come_as_safetensors_unless_json_is_asked_for(http: httpx.AsyncClient, door: Door) -> None:
    episode_id = (await create(http)).episode_id
    door.add_turn(episode_id)
    path = f"/episodes/{episode_id}/samples"
    binary = await http.get(path)
    assert binary.headers["content-type"] == MEDIA_TYPE
    [row] = decode_samples(binary.content).samples
    asked = await http.get(path, headers={"accept": "application/json"})
    assert asked.headers["content-type"] == "application/json"
    assert asked.json().keys() >= {"samples", "untrained", "stats"}
    [json_row] = asked.json()["samples"]
    assert json_row["input_ids"] == row.input_ids.tolist()
    assert json_row["weight_version"] == [
        None if index < 0 else row.weight_version_names[index] for index in row.weight_version
    ]


async def test_rows_without_a_trained_token_are_added_on_request(http: httpx.AsyncClient, door: Door) -> None:
    episode_id = (await create(http, sampling={"temperature": 0})).episode_id  # greedy turns are not trained
    door.add_turn(episode_id)
    path = f"/episodes/{episode_id}/samples"
    found = decode_samples((await http.get(path)).content)
    assert found.samples == ()
    assert [entry.tokens for entry in found.untrained] == [found.stats.sampled_tokens]
    [row] = decode_samples((await http.get(path, params={"include_untrained": "true"})).content).samples
    assert not row.loss_mask.any()


async def test_the_tree_holds_each_token_once_and_gives_the_samples(http: httpx.AsyncClient, door: Door) -> None:
    episode_id = (await create(http)).episode_id
    door.add_turn(episode_id)
    door.add_turn(episode_id)
    binary = await http.get(f"/episodes/{episode_id}/tree")
    assert binary.headers["content-type"] == MEDIA_TYPE
    forest = decode_forest(binary.content)
    flat = decode_samples((await http.get(f"/episodes/{episode_id}/samples")).content)
    assert forest.to_samples().model_dump_json() == flat.model_dump_json()
    asked = await http.get(f"/episodes/{episode_id}/tree", headers={"accept": "application/json"})
    assert asked.headers["content-type"] == "application/json"
    assert asked.json()["input_ids"] == forest.input_ids.tolist()
    assert set(asked.json()["weight_version"]) == {None, *forest.weight_version_names}
    greedy = (await create(http, sampling={"temperature": 0})).episode_id
    door.add_turn(greedy)
    path = f"/episodes/{greedy}/tree"
    assert decode_forest((await http.get(path)).content).turn_ids == ()
    assert len(decode_forest((await http.get(path, params={"include_untrained": "true"})).content).rows) == 1


async def test_audit_gives_the_report(http: httpx.AsyncClient, door: Door) -> None:
    episode_id = (await create(http)).episode_id
    door.add_turn(episode_id)
    report = AuditReport.model_validate_json((await http.post(f"/episodes/{episode_id}/audit")).content)
    assert report.passed
    assert len(report.turns) == 1


# The engine, watching


async def test_the_engine_is_shown_paused_resumed_and_given_weights(http: httpx.AsyncClient, door: Door) -> None:
    before = EngineInfo.model_validate_json((await http.get("/engine")).content)
    assert before.ok
    assert before.paused is False
    assert (await http.post("/engine/pause", json={"mode": "in_place"})).json()["paused"] is True
    assert (await http.post("/engine/resume")).json()["paused"] is False
    after = await http.post("/engine/weights", json={"path": str(door.other_model), "version": "v2"})
    assert after.json()["weight_version"] == "v2"


async def test_refused_weights_and_bad_pause_modes_are_named(http: httpx.AsyncClient) -> None:
    refused = await http.post("/engine/weights", json={"path": "/nowhere", "version": "v3"})
    error_of(refused, 400, "engine_refused")
    error = error_of(await http.post("/engine/pause", json={"mode": "nap"}), 422, "invalid_value")
    assert error["detail"][0]["field"] == "mode"


async def test_events_tell_each_change_of_status(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.aiter_lines()
        assert await anext(lines) == ": open"
        created = await create(http)
        await http.post(f"/episodes/{created.episode_id}/finish")
        seen = [event async for event in _events(lines, created.episode_id, 2)]
    assert [event["status"] for event in seen] == ["running", "completed"]


async def test_a_reader_of_events_that_comes_back_is_sent_what_it_missed(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "/events") as stream:
        place = await _place(stream.aiter_lines())
    created = await create(http)
    await http.post(f"/episodes/{created.episode_id}/finish")
    async with http.stream("GET", "/events", headers={"last-event-id": place}) as stream:
        lines = stream.aiter_lines()
        assert await _place(lines) == place
        seen = [event async for event in _events(lines, created.episode_id, 2)]
    assert [event["status"] for event in seen] == ["running", "completed"]
    async with http.stream("GET", "/events", headers={"last-event-id": "00000000-1"}) as stream:
        lines = stream.aiter_lines()
        assert await _place(lines) != "00000000-1"
        assert [await anext(lines), await anext(lines)] == [
            "event: reset",
            'data: {"reason":"the server has started since"}',
        ]


async def _place(lines: AsyncIterator[str]) -> str:
    while not (line := await anext(lines)).startswith("id: "):
        pass
    return line.removeprefix("id: ")


async def test_a_silent_event_stream_has_a_heartbeat(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "/events") as stream:
        comments = [line async for line in _first(stream.aiter_lines(), 8)]
    assert comments.count(": ") + comments.count(":") >= 2


async def _first(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield await anext(lines)


async def _events(lines: AsyncIterator[str], episode_id: str, count: int) -> AsyncIterator[dict[str, Any]]:
    while count:
        line = await anext(lines)
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if event["episode_id"] == episode_id:
                count -= 1
                yield event


async def test_the_place_of_a_reader_of_events_is_free_when_it_leaves(http: httpx.AsyncClient) -> None:
    for _ in range(5):  # there are two places

        async def follow() -> bool:
            async with http.stream("GET", "/events") as stream:
                return stream.status_code == 200 and await anext(stream.aiter_lines()) == ": open"

        await wait_until(follow)


async def test_metrics_are_in_the_prometheus_format(http: httpx.AsyncClient) -> None:
    await http.get("/episodes/unknown")
    text = (await http.get("/metrics")).text
    assert 'turnstile_control_requests_total{route="/episodes/{episode_id}",status="404"}' in text
    assert "turnstile_calls_in_flight 0.0" in text


# Keys


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_and_ready_are_open_and_constant(stranger: httpx.AsyncClient, path: str) -> None:
    first, second = await stranger.get(path), await stranger.get(path)
    assert first.status_code == 200
    assert first.content == second.content


CLOSED = ["/episodes", "/metrics", "/engine", "/events", "/nowhere", "/openapi.json"]
WITHOUT_THE_KEY: list[dict[str, str | bytes]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer"},
    {"authorization": "Bearer test-control-key-012345678"},
    {"authorization": "Basic test-control-key-0123456789"},
    {"authorization": "Bearer schl\u00fcssel".encode("latin-1")},
]
"""Each is answered later than the one before (``http/wrong_keys.py``), so CI plays each kind on two paths."""


@pytest.mark.cases(2 * len(CLOSED))
@pytest.mark.parametrize(
    ("headers", "path"),
    [
        (headers, CLOSED[(place + shift) % len(CLOSED)])
        for shift in range(len(CLOSED))
        for place, headers in enumerate(WITHOUT_THE_KEY)
    ],
)
async def test_without_the_key_everything_else_is_401_and_says_where_the_key_is(
    stranger: httpx.AsyncClient, path: str, headers: dict[str, Any]
) -> None:
    response = await stranger.get(path, headers=headers)
    error = error_of(response, 401, "unauthorized")
    assert "control.key" in error["message"]
    assert "TURNSTILE_CONTROL_KEY" in error["message"]
    assert ("not this server's" if headers else "has no control key") in error["message"]
    assert response.headers["www-authenticate"] == 'Bearer realm="turnstile control"'


async def test_the_key_may_be_in_the_path(stranger: httpx.AsyncClient, door: Door) -> None:
    assert (await stranger.get(f"/k/{door.key}/episodes")).status_code == 200
    assert (await stranger.get(f"/k/{door.key}/health")).status_code == 200
    error_of(await stranger.get(f"/k/{door.key}/nowhere"), 404, "not_found")
    error_of(await stranger.get("/k/wrong-key-of-somebody/episodes"), 401, "unauthorized")
    error_of(await stranger.get("/k/"), 401, "unauthorized")


async def test_a_wrong_key_in_the_path_is_not_mended_by_the_right_header(http: httpx.AsyncClient) -> None:
    error_of(await http.get("/k/wrong-key-of-somebody/episodes"), 401, "unauthorized")


async def test_no_key_is_ever_logged(
    stranger: httpx.AsyncClient, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await stranger.get(f"/k/{door.key}/episodes?limit=1")
    await stranger.get(f"/k/{door.key}/nowhere")
    await stranger.get("/k/guess-of-somebody/episodes")
    texts = server_log(caplog)
    for expected in ('"GET /episodes?limit=1 HTTP/1.1" 200', '"GET /nowhere HTTP/1.1" 404'):
        assert any(expected in text for text in texts)
    assert not any(door.key in text or "guess-of-somebody" in text for text in texts)


def server_log(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the server logged; the log of the test's own HTTP client knows what that client sent."""
    loggers = ("uvicorn", "turnstile_server")
    records = [record for record in caplog.records if record.name.split(".")[0] in loggers]
    return [record.getMessage() + (record.exc_text or "") for record in records]


async def test_authentication_can_be_switched_off_by_name(open_door: OpenDoor) -> None:
    with open_door(control={"auth": False}) as door:
        async with httpx.AsyncClient(base_url=door.url, timeout=60) as anyone:
            assert (await anyone.get("/episodes")).status_code == 200
            assert (await anyone.get("/k/whatever/episodes")).status_code == 200


# Bad input


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_episode_is_404(http: httpx.AsyncClient, method: str) -> None:
    error_of(await http.request(method, "/episodes/ep_unknown"), 404, "not_found")


@pytest.mark.parametrize("action", ["finish", "cancel", "audit"])
async def test_an_action_on_an_unknown_episode_is_404(http: httpx.AsyncClient, action: str) -> None:
    error_of(await http.post(f"/episodes/ep_unknown/{action}"), 404, "not_found")


@pytest.mark.parametrize("what", ["turns", "samples", "tree"])
async def test_results_of_an_unknown_episode_are_404(http: httpx.AsyncClient, what: str) -> None:
    error_of(await http.get(f"/episodes/ep_unknown/{what}"), 404, "not_found")


@pytest.mark.parametrize("path", ["/nowhere", "/episodes/", "/episodes/a/b/c", "/e/ep_1/v1/models", "/docs"])
async def test_an_unknown_route_is_404(http: httpx.AsyncClient, path: str) -> None:
    error_of(await http.get(path), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/episodes", "GET, POST"),
        ("PUT", "/episodes/ep_1", "DELETE, GET"),
        ("GET", "/engine/pause", "POST"),
        ("POST", "/health", "GET"),
    ],
)
async def test_a_wrong_method_is_405_and_names_the_right_ones(
    http: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await http.request(method, path)
    error_of(response, 405, "method_not_allowed")
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    "body", [b"{", b"hello", b'{"task": NaN}', b"\xff\xfe", b'{"task": "\\ud800"}', b"[" * 5000, b"{}{}"]
)
async def test_malformed_json_is_400(http: httpx.AsyncClient, body: bytes) -> None:
    error = error_of(await http.post("/episodes", content=body), 400, "invalid_request")
    assert "JSON" in error["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"limits": {"max_turns": 0}}, "limits.max_turns"),
        ({"limits": {"max_turns": 10**9}}, "limits.max_turns"),
        ({"limits": {"wall_s": -1}}, "limits.wall_s"),
        ({"limits": {"max_tokens": 5}}, "limits.max_tokens"),
        ({"sampling": {"temperature": 99}}, "sampling.temperature"),
        ({"episode_id": "a/b"}, "episode_id"),
        ({"episode_id": "x" * 65}, "episode_id"),
        ({"env": {"A": 1}}, "env.A"),
        ({"taks": {}}, "taks"),
        ({"task": "hello"}, "task"),
        ({"task": None}, "task"),
    ],
)
async def test_an_impossible_value_is_422_and_names_its_field(
    http: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    error = error_of(await http.post("/episodes", json={**TASK, **fields}), 422, "invalid_value")
    assert named in error["message"]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"3", b"null"])
async def test_a_body_that_is_no_episode_is_422(http: httpx.AsyncClient, body: bytes) -> None:
    error_of(await http.post("/episodes", content=body), 422, "invalid_value")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/episodes?status=sleeping", "status"),
        ("/episodes?limit=0", "limit"),
        ("/episodes?limit=1001", "limit"),
        ("/episodes/x?wait=-1", "wait"),
        ("/episodes/x?wait=nan", "wait"),
        ("/episodes/x?wait=soon", "wait"),
        ("/episodes/x/samples?include_untrained=perhaps", "include_untrained"),
        ("/episodes/x/tree?include_untrained=perhaps", "include_untrained"),
    ],
)
async def test_an_impossible_query_is_422_and_names_its_field(
    http: httpx.AsyncClient, path: str, named: str
) -> None:
    assert named in error_of(await http.get(path), 422, "invalid_value")["message"]


async def test_a_foreign_cursor_is_400(http: httpx.AsyncClient) -> None:
    error_of(await http.get("/episodes?cursor=nonsense"), 400, "invalid_request")


async def test_a_full_server_is_429_with_the_time_to_retry(open_door: OpenDoor) -> None:
    with open_door(episodes={"max_open": 1}) as door:
        async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
            await create(http)
            response = await http.post("/episodes", json=TASK)
    error_of(response, 429, "queue_full")
    assert response.headers["retry-after"] == "5"


async def test_a_body_over_the_limit_is_413_by_its_declared_length(open_door: OpenDoor) -> None:
    with open_door(control={"max_body_bytes": 1024}) as door:
        async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
            response = await http.post("/episodes", content=b" " * 1025)
            error = error_of(response, 413, "body_too_large")
            assert "control.max_body_bytes" in error["message"]
            assert (await http.post("/episodes", content=json.dumps(TASK))).status_code == 201


async def test_a_body_of_too_many_values_is_413_and_commas_in_a_text_are_none(open_door: OpenDoor) -> None:
    """8 MB of small values kept the event loop for 0.8 s."""
    with open_door(control={"max_body_values": 100}) as door:
        async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
            asked = TASK | {"metadata": {"numbers": [*range(200)]}}
            for path in ("/episodes", "/reset", "/mcp"):
                error = error_of(await http.post(path, content=json.dumps(asked)), 413, "body_too_large")
                assert "control.max_body_values" in error["message"]
            asked = TASK | {"metadata": {"text": "," * 200}}
            assert (await http.post("/episodes", content=json.dumps(asked))).status_code == 201
            completion = {"call_id": "c", "completion_ids": [7] * 200, "logprobs": [-1.0] * 200}
            error = error_of(
                await http.post("/episodes/none/completions", json=completion), 400, "invalid_request"
            )
            assert "--engine trainer" in error["message"]  # it was read


async def test_a_body_over_the_limit_is_413_while_it_arrives_in_chunks(open_door: OpenDoor) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 512
            yield b" " * 512

    with open_door(control={"max_body_bytes": 1024}) as door:
        async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
            error_of(await http.post("/episodes", content=chunks()), 413, "body_too_large")


@pytest.mark.slow
async def test_a_server_that_stops_lets_those_go_who_only_wait(open_door: OpenDoor, begun: list[Seat]) -> None:
    ends: dict[str, Any] = {}
    opened = anyio.Event()

    async def poll(http: httpx.AsyncClient, path: str) -> None:
        ends["poll"] = (await http.get(path, params={"wait": 50})).json()["status"]

    async def follow(http: httpx.AsyncClient) -> None:
        async with http.stream("GET", "/events") as stream:
            lines = []
            async for line in stream.aiter_lines():
                lines.append(line)
                opened.set()
            ends["follow"] = lines

    running = open_door()
    door = running.__enter__()
    async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
        path = f"/episodes/{(await create(http)).episode_id}"
        begun.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poll, http, path)
            tasks.start_soon(follow, http)
            await opened.wait()
            await wait_until(lambda: len(begun) >= 2)
            assert (await http.get(path)).json()["status"] == "running"
            assert ends == {}
            await anyio.to_thread.run_sync(running.__exit__, None, None, None)
    assert ends["poll"] == "running"
    assert ends["follow"][0] == ": open"


@pytest.fixture
def failing_door() -> Iterator[str]:
    """An application with two routes that fail: before and after the answer has begun."""
    router = APIRouter()

    @router.get("/fails")
    async def fails() -> None:
        raise RuntimeError("secret internals")

    @router.get("/lacks/memory")
    async def lacks_memory() -> None:
        raise MemoryError

    @router.get("/lacks/thread")
    async def lacks_thread() -> None:
        raise RuntimeError("can't start new thread")

    @router.get("/lacks/{code}")
    async def lacks(code: int) -> None:
        raise OSError(code, os.strerror(code), "secret internals")

    @router.get("/breaks")
    async def breaks() -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"begun"
            raise RuntimeError("secret internals")

        return StreamingResponse(chunks())

    app = build_control_app([router], key=KEY, metrics=Metrics(), settings=ControlSettings())
    with running_app(app) as url:
        yield f"{url}/k/{KEY}"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (errno.EMFILE, "Too many open files"),
        ("memory", "out of memory"),
        ("thread", "can't start new thread"),
    ],
)
async def test_a_lack_of_anything_is_a_503_to_try_again_and_no_other_os_error_is(
    failing_door: str, caplog: pytest.LogCaptureFixture, what: int | str, said: str
) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.get(f"{failing_door}/lacks/{what}")
        assert "Traceback" not in caplog.text
        other = await http.get(f"{failing_door}/lacks/{errno.EIO}")
    assert said in error_of(response, 503, "server_exhausted")["message"]
    assert response.headers["retry-after"] == "1"
    error_of(other, 500, "internal_error")
    assert "secret internals" not in response.text + other.text


async def test_an_unforeseen_error_is_a_500_that_tells_nothing_and_is_logged_once(
    failing_door: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.get(f"{failing_door}/fails")
    error_of(response, 500, "internal_error")
    assert "secret internals" not in response.text

    async def errors_logged() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno >= logging.ERROR]

    await wait_until(errors_logged)  # it is logged after the answer
    [logged] = await errors_logged()
    assert "secret internals" in str(logged.exc_info)
    assert KEY not in logged.getMessage()


async def test_an_answer_that_fails_midway_is_cut_off_not_ended(failing_door: str) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(f"{failing_door}/breaks")


async def test_the_door_goes_on_after_every_bad_request(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "healthy"}
    assert (
        time.time()
        - (await http.get(f"/episodes/{(await create(http)).episode_id}")).json()["timings"]["created_at"]
        < 60
    )


EVIL = "evil.example.com"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": f"https://{EVIL}", "content-type": "text/plain"}, (403, "origin_not_allowed")),
        ({"origin": "null", "content-type": "text/plain"}, (403, "origin_not_allowed")),
        ({"host": f"{EVIL}:8000"}, (421, "host_not_allowed")),
        ({"host": f"{EVIL}:8000", "origin": f"http://{EVIL}:8000"}, (421, "host_not_allowed")),
        ({"host": "127.0.0.1.nip.io"}, (421, "host_not_allowed")),
        ({"host": "localhost", "origin": f"http://localhost.{EVIL}"}, (403, "origin_not_allowed")),
    ],
    ids=["page", "null", "rebound", "rebound-post", "nip", "lookalike"],
)
async def test_without_a_key_no_web_page_of_a_stranger_drives_the_server(
    open_door: OpenDoor, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    sent = b'{"task": {"instruction": "t"}, "agent": "external"}'
    with open_door(control={"auth": False}) as door:
        async with httpx.AsyncClient(base_url=door.url, timeout=60) as http:
            for method, path in [
                ("POST", "/episodes"),
                ("GET", "/episodes"),
                ("DELETE", "/episodes/x"),
                ("GET", "/events"),
                ("GET", "/metrics"),
                ("POST", "/engine/pause"),
                ("POST", "/engine/weights"),
                ("POST", "/reset"),
                ("POST", "/k/anything/episodes"),
                ("POST", "/mcp"),
                ("OPTIONS", "/episodes"),
            ]:
                error_of(await http.request(method, path, content=sent, headers=headers), *expected)
            assert (await http.get("/health", headers=headers)).status_code == 200
            assert (await http.get("/episodes")).json()["episodes"] == []
            own = {"origin": door.url, "content-type": "text/plain"}
            assert (await http.post("/episodes", content=sent, headers=own)).status_code == 201
