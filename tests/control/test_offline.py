"""``turnstile ui FOLDER``: a directory without a server answers as the server on it did, and stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest

from control_support import KEY, EngineProcess, engine, running_door
from local import ROOT
from turnstile import Client
from turnstile.errors import Conflict
from turnstile.models import TaskRef
from turnstile_server.errors import StartupError
from turnstile_server.journal.segments import MARKER
from turnstile_server.offline_app import open_offline_app
from turnstile_server.settings import Settings

__all__ = ["engine"]

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(180)]

GROUP = "g-offline"
LISTS = (
    "/episodes",
    "/episodes?view=summary",
    "/episodes?view=summary&sort=reward&order=asc&offset=0",
    f"/episodes?view=summary&group_id={GROUP}&metadata=kind%3Da",
    "/stats?by=task,status",
    f"/groups/{GROUP}",
)
OF_EPISODE = (
    "",
    "/turns",
    "/turns?arrays=false",
    "/samples",
    "/tree",
    "/breaks",
    "/spans",
    "/network",
    "/journal",
)
OF_TURN = ("/tokens", "/tokens?start=2&count=3", "/tokens/find?text=user", "/tokens/find?id=5")


@dataclass(frozen=True)
class Played:
    """A data directory whose server was stopped, with what the next server on it answered; ``killed``: a copy that
    was made while an episode ran, with bytes of a record behind its last one. ``open_id``: of that episode."""

    folder: Path
    killed: Path
    open_id: str
    turn_ids: tuple[str, ...]
    answers: dict[str, bytes]


def addresses(client: httpx.Client) -> Iterator[str]:
    yield from LISTS
    for episode in client.get("/episodes").json()["episodes"]:
        at = f"/episodes/{episode['episode_id']}"
        yield from (at + rest for rest in OF_EPISODE)
        for turn in client.get(f"{at}/turns?arrays=false").json()["turns"]:
            yield from (f"/turns/{turn['turn_id']}{rest}" for rest in OF_TURN)


@pytest.fixture(scope="module")
def played(engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Played:
    base = tmp_path_factory.mktemp("offline")
    folder, killed = base / "data", base / "killed"
    turns: list[str] = []
    headers = {"authorization": f"Bearer {KEY}"}
    with running_door(engine, folder) as door, httpx.Client(base_url=door.url, headers=headers, timeout=60) as api:
        made = []
        for kind in "aab":
            task = {"instruction": f"Do {kind}.", "reward": {"late": True}}
            body = {"task": task, "group_id": GROUP, "metadata": {"kind": kind}}
            made.append(api.post("/episodes", json=body).json()["episode_id"])
            turns += [door.add_turn(made[-1]), door.add_turn(made[-1])]
        assert api.post(f"/episodes/{made[0]}/finish").is_success
        assert api.post(f"/episodes/{made[0]}/reward", json={"key": "k", "reward": 1.0}).is_success
        assert api.post(f"/episodes/{made[1]}/cancel").is_success
        shutil.copytree(folder, killed)
    last = sorted((killed / "journal").glob("*.tsj"))[-1]
    with last.open("ab") as file:
        file.write(MARKER + b"torn")
    with running_door(engine, folder) as door, httpx.Client(base_url=door.url, headers=headers, timeout=60) as api:
        answers = {address: api.get(address).raise_for_status().content for address in addresses(api)}
    return Played(folder, killed, made[2], tuple(turns), answers)


def contents(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Digest, mode and time of change of each file; folders too."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = contents(folder)
    yield
    assert contents(folder) == before


@asynccontextmanager
async def looked_at(folder: Path, model: Path | None) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncExitStack() as stack:
        app = await open_offline_app(folder, KEY, Settings(model=model), anyio.Event(), stack)
        headers, transport = {"authorization": f"Bearer {KEY}"}, httpx.ASGITransport(app=app)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)
        yield await stack.enter_async_context(client)


async def test_every_route_answers_what_the_server_answered_and_no_byte_changes(
    played: Played, engine: EngineProcess
) -> None:
    with unchanged(played.folder):
        async with looked_at(played.folder, engine.model) as client:
            assert len(played.answers) > 40
            for address, expected in played.answers.items():
                answer = await client.get(address)
                assert (answer.status_code, answer.content) == (200, expected), address


async def test_the_directory_of_a_killed_server_shows_what_the_next_start_would_and_keeps_its_torn_tail(
    played: Played, engine: EngineProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with unchanged(played.killed):
        async with looked_at(played.killed, engine.model) as client:
            shown = (await client.get(f"/episodes/{played.open_id}")).json()
            assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
            last = (await client.get(f"/episodes/{played.open_id}/turns")).json()["turns"][-1]
            began = shown["timings"]["created_at"]
            at = last["timings"]["started_at"] + last["timings"]["total_s"]
            assert shown["timings"]["ended_s"] == pytest.approx(at - began)
            for address, expected in played.answers.items():
                if (played.open_id in address and "/turns" in address) or address.startswith("/turns/"):
                    assert (await client.get(address)).content == expected, address
    assert f"ends with {len(MARKER) + 4} bytes of no whole record" in caplog.text


async def test_exported_episodes_are_looked_at_as_on_the_server(
    played: Played, engine: EngineProcess, tmp_path: Path
) -> None:
    """Two of the three, one of them twice."""
    exported = [address.split("/")[2] for address in played.answers if address.endswith("/journal")]
    chosen = [episode_id for episode_id in exported if episode_id != played.open_id]
    for episode_id in chosen:
        (tmp_path / f"{episode_id}.tsj").write_bytes(played.answers[f"/episodes/{episode_id}/journal"])
    shutil.copyfile(tmp_path / f"{chosen[0]}.tsj", tmp_path / "again.tsj")
    with unchanged(tmp_path):
        async with looked_at(tmp_path, engine.model) as client:
            listed = (await client.get("/episodes?view=summary")).json()["summaries"]
            assert {row["episode_id"] for row in listed} == set(chosen)
            turns = played.turn_ids[:4]
            for address, expected in played.answers.items():
                if address.removeprefix("/episodes/") in chosen:  # kept work is not exported
                    assert (await client.get(address)).json() == {**json.loads(expected), "work": None}
                elif any(part in (*chosen, *turns) for part in address.replace("?", "/").split("/")):
                    assert (await client.get(address)).content == expected, address


async def test_an_episode_that_runs_is_not_exported(engine: EngineProcess, tmp_path: Path) -> None:
    with running_door(engine, tmp_path / "data") as door, Client([door.url], key=KEY) as client:
        running = client.create_episode(TaskRef(instruction="Do it."))
        with pytest.raises(Conflict, match="has not ended"):
            running.journal()
        running.cancel()
        assert running.journal().startswith(b"TSTLJRNL")


@pytest.mark.thorough
def test_the_command_exports_a_folder_that_can_be_looked_at(engine: EngineProcess, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with running_door(engine, tmp_path / "data") as door, Client([door.url], key=KEY) as client:
        made = client.create_episode(TaskRef(instruction="Do it."))
        turn_id = door.add_turn(made.episode_id)
        made.cancel()
        done = subprocess.run(
            [sys.executable, "-m", "turnstile", "episodes", "export", "--format", "journal", "--out", str(out)],
            env={**os.environ, "TURNSTILE_URL": door.url, "TURNSTILE_CONTROL_KEY": KEY},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stderr == "1 episodes exported\n"
    assert [path.name for path in out.iterdir()] == [f"{made.episode_id}.tsj"]

    async def look() -> None:
        async with looked_at(out, None) as client:
            turns = (await client.get(f"/episodes/{made.episode_id}/turns?arrays=false")).json()["turns"]
            assert [turn["turn_id"] for turn in turns] == [turn_id]

    anyio.run(look)


async def test_without_a_tokenizer_tokens_have_ids_and_no_text(played: Played) -> None:
    async with looked_at(played.folder, None) as client:
        at = f"/turns/{played.turn_ids[0]}/tokens"
        window = (await client.get(at)).json()
        assert window["tokenizer"] is False
        assert len(window["ids"]) == window["total"] == len(window["text"])
        assert set(window["text"]) == set(window["bytes"]) == {""}
        assert not any(window["special"])
        found = await client.get(f"{at}/find", params={"id": window["ids"][3]})
        assert 3 in [match["start"] for match in found.json()["matches"]]
        refused = await client.get(f"{at}/find?text=user")
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "no_tokenizer")
        assert "--model" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/episodes"),
        ("DELETE", "/episodes/{episode}"),
        ("POST", "/episodes/{episode}/finish"),
        ("POST", "/episodes/{episode}/reward"),
        ("POST", "/episodes/{episode}/regrade"),
        ("POST", "/episodes/{episode}/audit"),
        ("GET", "/episodes/{episode}/work"),
        ("GET", "/metrics"),
        ("GET", "/tasks"),
        ("POST", "/engine/pause"),
        ("PUT", "/no/such/route"),
    ],
)
async def test_whatever_needs_a_server_is_refused_as_read_only(played: Played, method: str, path: str) -> None:
    with unchanged(played.folder):
        async with looked_at(played.folder, None) as client:
            refused = await client.request(method, path.format(episode=played.open_id))
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "read_only")
    assert "only looked at" in refused.json()["error"]["message"]


async def test_the_key_is_needed(played: Played) -> None:
    async with looked_at(played.folder, None) as client:
        assert (await client.get("/episodes", headers={"authorization": "Bearer other"})).status_code == 401


async def test_a_segment_that_cannot_be_opened_and_damaged_bytes_cost_what_they_hold(
    played: Played, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(played.folder, folder)
    (folder / "journal" / "segment-0000000900.tsj").mkdir()
    [first] = [path for path in sorted((folder / "journal").glob("*.tsj")) if path.is_file()][:1]
    data = bytearray(first.read_bytes())
    at = data.index(played.turn_ids[-1].encode())
    data[at] ^= 0xFF
    first.write_bytes(bytes(data))
    for summary in (folder / "journal").glob("*.tsi"):
        summary.unlink()
    with unchanged(folder):
        async with looked_at(folder, None) as client:
            listed = (await client.get("/episodes")).json()["episodes"]
            assert len(listed) == 3
            turns = (await client.get(f"/episodes/{played.open_id}/turns")).json()["turns"]
            assert [turn["turn_id"] for turn in turns] == [played.turn_ids[-2]]


async def test_a_directory_whose_server_runs_is_refused(engine: EngineProcess, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with running_door(engine, folder), pytest.raises(StartupError, match=f"in use by process {os.getpid()}"):
        async with looked_at(folder, None):
            raise AssertionError("it was opened")


async def test_a_server_starts_on_a_directory_that_is_looked_at(
    played: Played, engine: EngineProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(played.folder, folder)
    async with looked_at(folder, None) as client:
        with running_door(engine, folder):
            assert (await client.get("/episodes")).status_code == 200


@pytest.mark.parametrize("name", ["absent", "empty", "file", "strange", "blank"])
async def test_what_holds_no_journal_is_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for folder, content in (("strange", b"of another program\n" * 100), ("blank", b"")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.tsj").write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(StartupError, match="data directory of a server"):
        async with looked_at(tmp_path / name, None):
            raise AssertionError("it was opened")
    assert contents(tmp_path) == before


def command(folder: Path, tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    """``turnstile ui FOLDER``, with the entry point of this checkout."""
    metadata = tmp_path / "path" / "viewer-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: viewer\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[turnstile.viewers]\nfolder = turnstile_server.commands.view_folder:view_folder\n"
    )
    path = os.pathsep.join([str(tmp_path / "path"), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-m", "turnstile", "ui", str(folder), "--no-browser", *flags],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.thorough
def test_the_command_serves_until_ctrl_c_and_leaves_nothing(
    played: Played, engine: EngineProcess, tmp_path: Path
) -> None:
    with unchanged(played.killed):
        process = command(played.killed, tmp_path, "--model", str(engine.model))
        try:
            assert process.stdout is not None
            address, _, key = process.stdout.readline().strip().partition("#key=")
            assert address.startswith("http://127.0.0.1:")
            assert httpx.get(address).status_code == 200
            url, headers = address.removesuffix("/ui"), {"authorization": f"Bearer {key}"}
            with httpx.stream("GET", f"{url}/events", headers=headers) as events:
                assert next(events.iter_lines()) == ": open"
                assert len(httpx.get(f"{url}/episodes", headers=headers).json()["episodes"]) == 3
                process.send_signal(signal.SIGINT)
                out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, out) == (0, ""), errors
    assert "read-only, until Ctrl-C" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["path"]


def test_the_command_says_in_one_sentence_why_nothing_is_shown(tmp_path: Path) -> None:
    process = command(tmp_path, tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("turnstile: ")
    assert "has no journal" in errors
    assert len(errors.splitlines()) == 1
