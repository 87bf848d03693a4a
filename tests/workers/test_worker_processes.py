"""Two worker processes behind one address: what dies takes with it what ran there, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import anyio
import httpx
import pytest
from whole_server import KEY, Played, WholeServer, whole_server

from turnstile_server.data_dir import journal_folder, worker_folder
from turnstile_server.journal.protocol import RecordType
from turnstile_server.journal.reading import ReadOnlyJournal
from turnstile_server.offline_app import open_offline_app
from turnstile_server.settings import Settings
from turnstile_server.testing.world_play import WorldAgent, play_agent
from turnstile_server.workers.socket_folder import NOTE
from waiting import wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_S = 100


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def recorded_turns(data_dir: Path, workers: int) -> Counter[str]:
    """Every turn in the journals of a stopped server, and how often it is there."""

    async def read() -> Counter[str]:
        found: Counter[str] = Counter()
        for number in range(workers):
            journal = await ReadOnlyJournal.open(journal_folder(worker_folder(data_dir, number)))
            async for record in journal.episodes():
                turns = [one for one in await journal.read(record.episode_id) if one.type is RecordType.TURN]
                found.update(str(turn.meta["turn_id"]) for turn in turns)
            await journal.close()
        return found

    return asyncio.run(read())


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tiny_model, tmp_path_factory.mktemp("workers") / "data", "--workers", "2") as running:
        yield running


def test_new_episodes_are_spread_and_each_is_told_its_worker_s_own_address(server: WholeServer) -> None:
    episodes = [server.create() for _ in range(8)]
    counts = Counter(server.owner(each) for each in episodes)
    assert min(counts[0], counts[1]) >= 3, "but for one that came while a worker told its load"
    for each in episodes:
        assert [each.call("hello")] == server.turns(each)
        server.http.post(f"/episodes/{each.episode_id}/cancel").raise_for_status()
    assert server.listed()[:8] == [each.episode_id for each in reversed(episodes)]


@pytest.mark.parametrize(("path", "allowed"), [("/ui/x", "GET, HEAD"), ("/ui", "GET, HEAD"), ("/health", "GET")])
def test_nothing_that_came_without_the_key_is_read_or_reaches_a_worker(
    server: WholeServer, path: str, allowed: str
) -> None:
    """Its body never comes: who waited for it would hold room that callers with the key need."""
    url = httpx.URL(server.url)
    head = f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: 5000000\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80), WAIT_S) as stranger:
        stranger.sendall(head.encode())
        stranger.settimeout(5)
        said = ""
        while "allowed:" not in said:
            said += stranger.recv(1 << 16).decode()
    assert said.startswith("HTTP/1.1 405 ")
    assert f"allow: {allowed}\r\n" in said
    assert f"POST {path} is not allowed here" in said


def test_a_group_is_one_worker_s_and_equal_creations_at_once_are_one_episode(server: WholeServer) -> None:
    def same(_: int) -> str:
        return server.create(idempotency_key="once", group_id="together").episode_id

    def chosen(_: int) -> int:
        body = {"task": {"instruction": "Talk."}, "agent": "external", "episode_id": "ep_chosen"}
        return server.http.post("/episodes", json=body).status_code

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(same, range(16)))) == 1
        assert Counter(threads.map(chosen, range(16))) == {201: 1, 409: 15}
    members = [server.create(group_id="together") for _ in range(4)]
    assert len({server.owner(each) for each in members}) == 1
    assert len(server.get("/groups/together")["members"]) == 5
    [row] = [group for group in server.get("/groups")["groups"] if group["group_id"] == "together"]
    assert row["rollouts"] == 5


def test_a_worker_that_is_killed_loses_what_ran_there_and_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with whole_server(tiny_model, data, "--workers", "2", TURNSTILE_WORKERS__WAIT_S="100") as server:
        everything = [server.create() for _ in range(6)]
        owners = Counter(server.owner(each) for each in everything)
        assert owners.keys() == {0, 1}
        victim = owners.most_common(1)[0][0]  # placement is partly chance: this one has three at least
        ended = next(each for each in everything if server.owner(each) == victim)
        running = [each for each in everything if each is not ended]
        for each in everything:
            each.call("first")
        server.http.post(f"/episodes/{ended.episode_id}/finish").raise_for_status()
        stop = threading.Event()
        with ThreadPoolExecutor(1 + len(running)) as threads, ExitStack() as on_exit:

            def talk(episode: Played) -> None:
                while not stop.is_set():
                    try:
                        episode.call("more")
                        time.sleep(0.05)  # the context is not to be full before the end
                    except httpx.HTTPError:
                        return

            talking = [threads.submit(talk, each) for each in running]
            on_exit.callback(stop.set)
            wait_until_sync(lambda: all(len(each.acknowledged) > 2 for each in running))
            os.kill(server.worker_pid(victim), signal.SIGKILL)
            wait_until_sync(lambda: f"worker {victim} has ended" in (tmp_path / "server.log").read_text())
            # Whoever waits for the worker is answered by its next life.
            assert server.get(f"/episodes/{ended.episode_id}")["status"] == "completed"
            lost = [each for each in running if server.owner(each) == victim]
            kept = [each for each in running if server.owner(each) != victim]
            assert lost
            for each in lost:
                found = server.get(f"/episodes/{each.episode_id}")
                assert (found["status"], found["error"]["type"]) == ("failed", "server_restarted")
            before = [len(each.acknowledged) for each in kept]
            wait_until_sync(
                lambda: all(len(each.acknowledged) > count for each, count in zip(kept, before, strict=True))
            )
            stop.set()
            for task in talking:
                task.result()
        for each in everything:
            assert set(each.acknowledged) <= set(server.turns(each))
        assert sorted(server.listed()) == sorted(each.episode_id for each in everything)
        again: list[Played] = []

        def created_there() -> bool:  # the front hears of a worker's next life when it asks for its load again
            again.append(server.create())
            return server.owner(again[-1]) == victim

        wait_until_sync(created_there, "its next life gets a new episode")
        again[0].call("after")
        assert server.stop() == 0
    turns = recorded_turns(data, 2)
    assert set(turns.values()) == {1}
    assert {turn for each in [*everything, *again] for turn in each.acknowledged} <= set(turns)


@pytest.mark.thorough  # the campaign in CI kills servers with workers too
def test_a_front_that_is_killed_takes_its_workers_along_and_the_next_server_has_all_they_acknowledged(
    tiny_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with whole_server(tiny_model, data, "--workers", "2") as server:
        episodes = [server.create() for _ in range(4)]
        for each in episodes:
            each.call("first")
        elsewhere = [each for each in episodes if server.owner(each) == 1]
        pids = [server.worker_pid(number) for number in (0, 1)]
        server.process.kill()
        server.process.wait(WAIT_S)
        wait_until_sync(lambda: not any(map(is_there, pids)))
    order = [each.episode_id for each in reversed(episodes)]
    # As many, one, three: whoever starts next shows all of them, in the same order.
    for workers in ("2", "1", "3"):
        with whole_server(tiny_model, data, "--workers", workers) as server:
            assert [each for each in server.listed() if each in order] == order
            for each in episodes:
                assert set(each.acknowledged) <= set(server.turns(each))
                assert server.get(f"/episodes/{each.episode_id}")["error"]["type"] == "server_restarted"
            if workers == "1":
                refused = {server.http.delete(f"/episodes/{each.episode_id}").status_code for each in elsewhere}
                assert refused == {409}, "its worker is not started: it is only shown"
                new = server.create()
                new.call("new")
                order.insert(0, new.episode_id)
            assert server.stop() == 0
    assert set(recorded_turns(data, 2).values()) == {1}
    assert asyncio.run(shown_without_a_server(data)) == order


async def shown_without_a_server(data_dir: Path) -> list[str]:
    """What `turnstile ui FOLDER` lists: the journals of all workers as one."""
    async with AsyncExitStack() as stack:
        app = await open_offline_app(data_dir, KEY, Settings(), anyio.Event(), stack)
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
            answer = await http.get("/episodes", params={"limit": 100})
            for episode in answer.json()["episodes"]:
                assert (await http.get(f"/episodes/{episode['episode_id']}/turns")).json()["turns"]
        return [episode["episode_id"] for episode in answer.json()["episodes"]]


@pytest.mark.thorough
def test_a_worker_that_dies_too_often_is_given_up_and_the_others_serve_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    limits = {"TURNSTILE_WORKERS__MAX_RESTARTS": "0", "TURNSTILE_WORKERS__WAIT_S": "0.5"}
    with whole_server(tiny_model, tmp_path / "data", "--workers", "2", **limits) as server:
        first, second = server.create(), server.create()
        os.kill(server.worker_pid(server.owner(first)), signal.SIGKILL)
        wait_until_sync(lambda: "max_restarts" in server.http.get(f"/episodes/{first.episode_id}").text)
        answer = server.http.get(f"/episodes/{first.episode_id}")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "worker_restarting")
        second.call("on")
        assert server.http.get("/ready").status_code == 200
        assert {server.owner(server.create()) for _ in range(3)} == {server.owner(second)}
        assert server.stop() == 0


@pytest.mark.thorough
def test_a_reader_of_events_is_told_that_a_worker_was_started_again(tiny_model: Path, tmp_path: Path) -> None:
    with whole_server(tiny_model, tmp_path / "data", "--workers", "2") as server:
        with server.http.stream("GET", "/events", timeout=WAIT_S) as events:
            lines = events.iter_lines()
            made = server.create()
            assert any(made.episode_id in line for line in lines)
            os.kill(server.worker_pid(1), signal.SIGKILL)
            assert any(line == "event: reset" for line in lines)
        assert server.stop() == 0


@pytest.mark.thorough
def test_agents_have_one_port_where_it_is_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    with whole_server(
        tiny_model, tmp_path / "data", "--workers", "2", TURNSTILE_WORKERS__ONE_AGENT_PORT="true"
    ) as server:
        episodes = [server.create() for _ in range(2)]
        assert {each.model_url.partition("/e/")[0] for each in episodes} == {server.ready["agent_url"]}
        for each in episodes:
            assert [each.call("by one port")] == server.turns(each)
        with httpx.stream(
            "POST",
            f"{episodes[0].model_url}/v1/chat/completions",
            headers={"authorization": f"Bearer {episodes[0].key}"},
            json={
                "model": "m",
                "max_tokens": 8,
                "stream": True,
                "messages": [{"role": "user", "content": "stream"}],
            },
            timeout=WAIT_S,
        ) as streamed:
            assert [line for line in streamed.iter_lines() if line][-1] == "data: [DONE]"
        stranger = httpx.post(f"{server.ready['agent_url']}/e/ep_none/v1/chat/completions", json={})
        assert stranger.status_code == 404
        assert server.stop() == 0


@pytest.mark.thorough
def test_a_flood_without_keys_at_the_one_port_cuts_no_agent_s_call(tiny_model: Path, tmp_path: Path) -> None:
    variables = {"TURNSTILE_WORKERS__ONE_AGENT_PORT": "true", "TURNSTILE_GATE__MAX_CONNECTIONS": "16"}
    with (
        whole_server(tiny_model, tmp_path / "data", "--workers", "2", **variables) as server,
        ExitStack() as flood,
    ):
        episode = server.create()
        url = httpx.URL(episode.model_url)
        body = {"model": "m", "max_tokens": 600, "messages": [{"role": "user", "content": "x"}]}
        with ThreadPoolExecutor() as threads:
            headers = {"authorization": f"Bearer {episode.key}"}
            call = threads.submit(
                httpx.post, f"{url}/v1/chat/completions", headers=headers, json=body, timeout=WAIT_S
            )
            time.sleep(0.5)
            for number in range(60):
                stranger = flood.enter_context(socket.create_connection((url.host, url.port or 80), WAIT_S))
                if number % 2:
                    stranger.sendall(f"POST {url.path}/v1/messages HTTP/1.1\r\nHost: x\r\n".encode())
                    stranger.sendall(b"Content-Length: 9000\r\nAuthorization: Bearer guessed\r\n\r\n{")
            assert not call.done()
            assert call.result(WAIT_S).status_code == 200
        assert server.stop() == 0


PROBE = """
import glob, json, os, socket, sys
for path in ["/run/turnstile/gate.sock", *glob.glob("/tmp/turnstile-w-*/*"), *sys.argv[2:]]:
    with socket.socket(socket.AF_UNIX if path[0] == "/" else socket.AF_INET) as server:
        server.settimeout(20)
        try:
            server.connect(path if path[0] == "/" else ("127.0.0.1", int(path)))
            server.sendall(f"GET {sys.argv[1]} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n".encode())
            print(path, server.recv(100).split(b"\\r\\n")[0].decode())
        except OSError as error:
            print(path, type(error).__name__)
"""


async def bash(episode: Played, command: str) -> str:
    """Runs a command in the episode's sandbox, as its agent's tool does."""
    said: list[str] = []

    async def agent(agent: WorldAgent) -> None:
        said.append((await agent.call("bash", command=command)).text)

    await play_agent(agent, command, f"{episode.model_url}/mcp", episode.key)
    return said[0]


@pytest.mark.thorough
def test_no_sandbox_reaches_the_sockets_between_the_workers(tiny_model: Path, tmp_path: Path) -> None:
    """By their paths, by the servers' ports, or through its own socket to the gate."""
    with whole_server(tiny_model, tmp_path / "data", "--workers", "2", "--sandbox", "local") as server:
        folder = Path((tmp_path / "data" / "workers" / NOTE).read_text())
        inner = sorted(str(path) for path in folder.iterdir())
        assert len(inner) == 2
        urls = [server.url, *(worker["agent_url"] for worker in server.ready["workers"])]
        ports = [str(httpx.URL(url).port) for url in urls]
        episode = server.create(task={"instruction": "look", "base": {"inline": {"probe.py": PROBE}}})
        wait_until_sync(lambda: server.get(f"/episodes/{episode.episode_id}")["status"] == "running")
        for target in ("/register/state", "/episodes"):
            said = asyncio.run(bash(episode, " ".join(["python3 probe.py", target, *inner, *ports])))
            answers = dict(line.split(" ", 1) for line in said.splitlines() if line.startswith(("/", *ports)))
            assert answers.pop("/run/turnstile/gate.sock") == "HTTP/1.1 404 Not Found"
            assert set(answers) == {*inner, *ports}
            assert set(answers.values()) <= {"FileNotFoundError", "ConnectionRefusedError"}
        assert server.stop() == 0
