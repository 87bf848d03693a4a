"""Replay: what each turn changed in the work folder of a real sandbox, read back by the public routes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from forks_support import FIRST, Episode, Messages, fork, run, sandbox_of, say, speak, turn_ids
from gate_support import Stage, staged
from light import SOLVE, TASK, light_work

from turnstile import AsyncClient
from turnstile_server.offline_app import open_offline_app
from turnstile_server.replay.store import ReplayStore
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import Settings

pytestmark = pytest.mark.anyio

HOSTILE = r"""
ln -s /etc/passwd passwd; ln -s /etc etc; mkfifo pipe; head -c 10000000 /dev/zero > huge
printf x > "$(printf 'new\nline')"; printf x > "$(printf 'esc\033[31m')"; printf x > "$(printf 'bad\377')"
mkdir "$(printf 'dir\376')"; printf x > "$(printf 'dir\376')/inner"; mkdir -p .git; printf x > .git/HEAD
mkdir locked; printf x > locked/inner; chmod 0 locked; printf x > unreadable; chmod 0 unreadable
printf '<script>alert(1)</script>' > page.html
"""


@asynccontextmanager
async def recording(model: Path, folder: Path, **episodes: Any) -> AsyncIterator[Stage]:
    work, wanted = light_work(model, folder / "data", folder / "installs")
    settings = {"replay": True, **episodes}
    async with staged(model, folder / "data", work=work, episodes=settings, **wanted) as stage:
        speak(stage)
        yield stage


async def states(stage: Stage, episode: Episode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await stage.get(episode, "/replay"))["states"]
    return found


async def listed(stage: Stage, episode: Episode, state: int) -> dict[str, dict[str, Any]]:
    files = (await stage.get(episode, f"/replay/files?state={state}"))["files"]
    return {file["path"]: file for file in files}


async def content(stage: Stage, episode: Episode, digest: str) -> httpx.Response:
    return await stage.control.get(f"/episodes/{episode['episode_id']}/replay/{digest}")


def summary(state: dict[str, Any]) -> list[tuple[str, str]]:
    return [(change["path"], change["change"]) for change in state["changes"]]


async def played(stage: Stage, *scripts: str, **fields: Any) -> tuple[Episode, Sandbox, Messages]:
    """An episode of a turn for each script, which runs as its tool call, and a turn after the last."""
    episode = await stage.episode(task=TASK, **fields)
    sandbox = await sandbox_of(stage, episode)
    history = await say(stage, episode, FIRST)
    for number, script in enumerate(scripts):
        await run(sandbox, script)
        history = await say(stage, episode, history, f"Step {number}.")
    return episode, sandbox, history


@pytest.mark.slow
async def test_each_turn_shows_what_it_changed_and_all_of_it_can_be_read_back(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with recording(tiny_model, tmp_path) as stage:
        steps = (
            "echo 'ANSWER = 42' > answer.py; mkdir lib; echo one > lib/one",
            "rm answer.py; chmod +x lib/one",
            ":",
        )
        episode, sandbox, _ = await played(stage, *steps, snapshots="every_turn")
        await run(sandbox, "echo last > last")
        assert (await stage.get(episode))["replay"] is True
        await stage.post(episode, "finish")
        turns = await turn_ids(stage, episode)
        found = await states(stage, episode)
        assert [one["moment"] for one in found] == ["begin", "turn", "turn", "turn", "end"]
        assert [one["turn_id"] for one in found] == [None, *turns[:3], turns[3]]
        assert [one["seq"] for one in found] == [None, 0, 1, 2, 3]
        assert [one["files"] for one in found] == [1, 2, 1, 1, 2]
        assert [summary(one) for one in found] == [
            [],
            [("answer.py", "changed"), ("lib/one", "added")],
            [("answer.py", "removed"), ("lib/one", "changed")],
            [],
            [("last", "added")],
        ]
        assert [one["at_s"] for one in found] == sorted(one["at_s"] for one in found)
        assert not any(one["missed"] or one["further"] for one in found)
        kept = {
            one["turn_id"]: one["snapshot_id"] for one in (await stage.get(episode, "/snapshots"))["snapshots"]
        }
        assert [one["snapshot_id"] for one in found] == [None, *(kept[turn] for turn in turns[:3]), None]
        changed = found[1]["changes"][0]
        before, after = [await content(stage, episode, changed[side]["digest"]) for side in ("before", "after")]
        assert (before.content, after.content) == (b"ANSWER = 41\n", b"ANSWER = 42\n")
        assert after.headers["content-type"] == "application/octet-stream"
        assert after.headers["x-content-type-options"] == "nosniff"
        assert after.headers["content-disposition"].startswith("attachment")
        modes = [found[2]["changes"][1][side]["mode"] for side in ("before", "after")]
        assert modes == ["100644", "100755"], "the same content, and executable now"
        assert sorted(await listed(stage, episode, 1)) == ["answer.py", "lib/one"]
        assert sorted(await listed(stage, episode, 4)) == ["last", "lib/one"]
        async with AsyncClient(str(stage.control.base_url)) as client:
            handle = client.episode(episode["episode_id"])
            report = (await handle.replay()).model_dump(mode="json")
            assert report == {"episode_id": episode["episode_id"], "states": found}
            [last, _] = (await handle.replay_files(4)).files
            assert await handle.replay_content(last.digest or "") == b"last\n"
        spans = (await stage.get(episode, "/spans"))["spans"]
        assert sum(span["name"] == "replay" for span in spans) == 5


@pytest.mark.slow
async def test_what_an_agent_leaves_to_harm_a_reader_is_text_or_left_out_with_a_reason(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with recording(tiny_model, tmp_path) as stage:
        episode, sandbox, history = await played(stage, HOSTILE)
        files = await listed(stage, episode, 1)
        root = os.geteuid() == 0 and (await run(sandbox, "id -u")).strip() == "0"
        assert {path: file["left_out"] for path, file in files.items() if file["digest"] is None} == {
            "pipe": "it is a pipe, a socket or a device",
            "huge": "it is larger than episodes.replay_file_bytes",
            "bad\\xff": "its name is not UTF-8",
            "dir\\xfe": "its name is not UTF-8",
            ".git": "folders of this name are not looked into (episodes.replay_skip)",
            **({} if root else {"locked": "it could not be read", "unreadable": "it could not be read"}),
        }
        for path, target in (("passwd", b"/etc/passwd"), ("etc", b"/etc")):
            assert files[path]["mode"] == "120000"
            assert (await content(stage, episode, files[path]["digest"])).content == target
        assert not any(path.startswith("etc/") for path in files), "no link is followed"
        assert {"new\nline", "esc\x1b[31m", "page.html"} < set(files)
        await run(sandbox, "rm -rf .git huge; chmod 700 locked; echo y >> page.html")
        history = await say(stage, episode, history, "Again.")
        changes = dict(summary((await states(stage, episode))[2]))
        assert changes["page.html"] == "changed"
        assert changes["huge"] == changes[".git"] == "removed"
        await run(sandbox, "find . -mindepth 1 -delete")
        await say(stage, episode, history, "All gone.")
        assert await listed(stage, episode, 3) == {}


@pytest.mark.slow
async def test_bounds_hold_and_what_they_leave_out_is_said(tiny_model: Path, tmp_path: Path) -> None:
    bounds = {"replay_files": 8, "replay_bytes": 40_000, "replay_file_bytes": 10_000, "replay_paths": 20}
    async with recording(tiny_model, tmp_path, **bounds) as stage:
        few = "for n in 1 2 3 4; do head -c 6000 /dev/urandom > f$n; done; head -c 20000 /dev/zero > large"
        many = "for n in $(seq 30); do echo $n > m$n; done"
        episode, _, _ = await played(stage, few, few, many)
        found = await states(stage, episode)
        reasons = [[change["after"]["left_out"] for change in state["changes"]] for state in found[1:]]
        assert reasons[0] == [None] * 4 + ["it is larger than episodes.replay_file_bytes"]
        assert "the episode's room is used up (episodes.replay_bytes)" in reasons[1]
        assert "the episode has as many contents as it may have" in reasons[2]
        assert (found[3]["files"], found[3]["further"]) == (20, 16)
        taken = sum(path.stat().st_size for path in (tmp_path / "data/replay/contents").iterdir())
        assert taken <= 40_000


@pytest.mark.slow
async def test_equal_contents_lie_on_the_disk_once_and_go_with_the_last_episode(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with recording(tiny_model, tmp_path) as stage:
        contents = tmp_path / "data/replay/contents"
        one, _, _ = await played(stage, "echo same > same; echo one > one")
        other, _, _ = await played(stage, "echo same > same; echo other > other")
        digest = hashlib.sha256(b"same\n").hexdigest()
        assert (contents / digest).stat().st_nlink == 3
        stranger = hashlib.sha256(b"one\n").hexdigest()
        assert (await content(stage, other, stranger)).status_code == 404, "another episode's content"
        assert (await content(stage, one, stranger)).status_code == 200
        for path in ("f" * 64, "f" * 63, "..%2Fstates", "states"):
            assert (await content(stage, one, path)).status_code == 404
        url = f"/episodes/{one['episode_id']}"
        assert (await stage.control.delete(url)).status_code == 204
        assert (await stage.control.get(f"{url}/replay")).status_code == 404
        left = {hashlib.sha256(text).hexdigest() for text in (b"same\n", b"other\n", b"ANSWER = 41\n")}
        assert {path.name for path in contents.iterdir()} == left
        await stage.control.delete(f"/episodes/{other['episode_id']}")
        assert list(contents.iterdir()) == list((tmp_path / "data/replay/episodes").iterdir()) == []


@pytest.mark.slow
async def test_off_there_is_no_folder_and_no_capture(tiny_model: Path, tmp_path: Path) -> None:
    async with recording(tiny_model, tmp_path, replay=False) as stage:
        episode, _, _ = await played(stage, "echo one > one")
        answer = await stage.control.get(f"/episodes/{episode['episode_id']}/replay")
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "conflict")
        assert (await stage.get(episode))["replay"] is False
        assert not (tmp_path / "data/replay").exists()
        await played(stage, "echo one > one", replay=True)
        assert (tmp_path / "data/replay").exists(), "an episode may ask for it"


@pytest.mark.slow
async def test_what_made_way_is_gone_and_said_to_be(tiny_model: Path, tmp_path: Path) -> None:
    bounds = {"keep_replay_bytes": 60_000}
    async with recording(tiny_model, tmp_path, **bounds) as stage:
        fill = "for n in 1 2 3; do head -c 9000 /dev/urandom > f$n; done"
        old, _, _ = await played(stage, fill)
        young, _, _ = await played(stage, fill)
        changed = (await states(stage, young))[1]["changes"]
        told = [change["after"]["left_out"] for change in changed]
        assert "the server's room is used up (episodes.keep_replay_bytes)" in told, "those of running ones stay"
        await stage.post(old, "finish")
        await played(stage, fill)
        answer = await stage.control.get(f"/episodes/{old['episode_id']}/replay")
        assert (answer.status_code, answer.json()["error"]["type"]) == (410, "work_not_kept")
        assert await states(stage, young)


@pytest.mark.slow
async def test_a_capture_that_hangs_delays_a_call_no_longer_than_it_may_and_stands_among_the_states(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tiny_model, tmp_path, replay_wait_s=0.3) as stage:
        episode = await stage.episode(task=TASK)
        sandbox = await sandbox_of(stage, episode)
        history = await say(stage, episode, FIRST)
        with monkeypatch.context() as hanging:

            async def never(self: Any, command: Any) -> None:
                await anyio.sleep_forever()

            hanging.setattr(type(sandbox), "exec", never)
            history = await say(stage, episode, history, "It hangs.")
        await run(sandbox, "echo one > one")
        await say(stage, episode, history, "It goes on.")
        begin, missed, found = await states(stage, episode)
        assert (missed["missed"], missed["changes"]) == ("it took longer than 0.3 s", [])
        assert begin["files"] == missed["files"] == 1
        assert summary(found) == [("one", "added")]


@pytest.mark.slow
async def test_an_agent_that_the_server_launches_is_recorded_and_judged_as_ever(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with recording(tiny_model, tmp_path) as stage:
        body = {"task": TASK, "agent": "light", "env": {"WORK": SOLVE}}
        episode = (await stage.control.post("/episodes", json=body)).json()
        url = f"/episodes/{episode['episode_id']}"
        with anyio.fail_after(120):
            while (found := (await stage.control.get(f"{url}?wait=20")).json())["status"] != "completed":
                assert found["status"] in ("queued", "preparing", "running", "grading"), found
        assert found["reward"] == 1.0
        begin, end = await states(stage, episode)
        assert (begin["moment"], begin["files"], end["moment"], end["seq"]) == ("begin", 1, "end", 1)
        assert summary(end) == [("answer.py", "changed")]


async def test_a_fault_of_the_recorder_fails_no_call(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ReplayStore, "_keep", broken)
    async with recording(tiny_model, tmp_path) as stage:
        episode, _, _ = await played(stage, "echo one > one")
        assert (await stage.get(episode))["status"] == "running"
        assert await states(stage, episode) == []


@pytest.mark.slow
async def test_the_states_of_an_episode_that_a_restart_ended_are_still_there(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with recording(tiny_model, tmp_path) as stage:
        episode, _, _ = await played(stage, "echo one > one")
        before = await states(stage, episode)
    async with recording(tiny_model, tmp_path) as stage:
        assert (await stage.get(episode))["error"]["type"] == "server_restarted"
        assert await states(stage, episode) == before
        await stage.control.delete(f"/episodes/{episode['episode_id']}")
        assert list((tmp_path / "data/replay/contents").iterdir()) == []


@pytest.mark.slow
async def test_a_fork_records_states_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    async with recording(tiny_model, tmp_path) as stage:
        parent, _, _ = await played(stage, "echo one > one", snapshots="every_turn")
        state = (await states(stage, parent))[1]
        [child] = await fork(stage, parent, snapshot_id=state["snapshot_id"])
        await sandbox_of(stage, child)
        [first] = await states(stage, child)
        assert (first["moment"], first["files"], first["changes"]) == ("begin", 2, [])
        assert (await listed(stage, child, 0)).keys() == {"answer.py", "one"}


@pytest.mark.slow
async def test_a_directory_without_a_server_answers_the_same(tiny_model: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"one\n").hexdigest()
    paths = ("", "/files?state=1", "/files?state=9", f"/{digest}", f"/{'0' * 64}")
    async with recording(tiny_model, tmp_path) as stage:
        episode, _, _ = await played(stage, "echo one > one")
        await stage.post(episode, "finish")
        url = f"/episodes/{episode['episode_id']}/replay"
        online = [await stage.control.get(url + path) for path in paths]
    settings = Settings(model=tiny_model, data_dir=tmp_path / "unused")
    async with AsyncExitStack() as stack:
        app = await open_offline_app(tmp_path / "data", "key", settings, anyio.Event(), stack)
        transport, headers = httpx.ASGITransport(app), {"authorization": "Bearer key"}
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)
        await stack.enter_async_context(client)
        offline = [await client.get(url + path) for path in paths]
    assert [one.status_code for one in online] == [200, 200, 404, 200, 404]
    assert [one.content for one in offline] == [one.content for one in online]


@pytest.mark.docker
async def test_in_docker_it_is_the_same(tiny_model: Path, tmp_path: Path, docker_image: str) -> None:
    sandboxes = {"kind": "docker", "docker_image": docker_image}
    settings = {"replay": True}
    async with staged(tiny_model, tmp_path / "data", sandboxes=sandboxes, episodes=settings) as stage:
        speak(stage)
        episode, _, _ = await played(
            stage, "echo 'ANSWER = 42' > answer.py; ln -s / root; mkfifo pipe", "rm root", ":"
        )
        found = await states(stage, episode)
        assert [summary(one) for one in found[1:]] == [
            [("answer.py", "changed"), ("pipe", "added"), ("root", "added")],
            [("root", "removed")],
            [],
        ]
        digest = found[1]["changes"][0]["after"]["digest"]
        assert (await content(stage, episode, digest)).content == b"ANSWER = 42\n"
        assert not any(one["missed"] for one in found)
        await stage.post(episode, "cancel")
