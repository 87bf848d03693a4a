"""Forks: several episodes that begin at one turn of another, which has the shared tokens alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from forks_support import FIRST, Episode, Messages, fork, refused, run, samples, sandbox_of, say, speak, turn_ids
from gate_support import Stage, staged
from light import TASK, light_work

from turnstile import AsyncClient
from turnstile.models import EpisodeStatus
from turnstile_server.episodes.fork_point import CLEAR, running_processes
from turnstile_server.errors import Conflict, SandboxFailed
from turnstile_server.sandboxes.protocol import Command
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.toolbox import Toolbox
from waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def stage(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tiny_model, tmp_path) as running:
        speak(running)
        yield running


@pytest.mark.slow
async def test_forks_continue_the_very_tokens_and_train_only_their_own(stage: Stage) -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    of_trainer = {"run_id": "r", "train_step": 3, "traceparent": traceparent}
    parent = await stage.episode(metadata={"kind": "search"}, group_id="g", **of_trainer)
    history = await say(stage, parent, FIRST)
    history = await say(stage, parent, history, "And then?")
    _, second = await turn_ids(stage, parent)
    continued = await say(stage, parent, history, "Now choose.")
    fed = stage.engine.calls[-1].input_ids
    children = await fork(stage, parent, turn_id=second, n=3)
    assert len({child["episode_key"] for child in children}) == 3
    replies = set()
    for child in children:
        shown = await stage.get(child)
        assert (shown["forked_from"]["turn_id"], shown["group_id"], shown["metadata"]) == (
            second,
            "g",
            {"kind": "search"},
        )
        assert {name: shown[name] for name in of_trainer} == of_trainer
        replies.add((await say(stage, child, history, "Now choose."))[-1]["content"])
        assert np.array_equal(stage.engine.calls[-1].input_ids, fed), "token for token what the parent was fed"
    assert len(replies | {continued[-1]["content"]}) == 4
    whole = await samples(stage, parent)
    assert (whole.stats.turns, len(whole.samples)) == (3, 1)
    shared = whole.samples[0].turn_spans[1].end
    for child in children:
        rows = await samples(stage, child)
        [row] = rows.samples
        assert (rows.stats.turns, rows.stats.roots, rows.untrained) == (1, 0, ())
        assert np.array_equal(row.input_ids[: len(fed)], fed)
        assert not row.loss_mask[: len(fed)].any(), "what is before the fork is context"
        assert row.loss_mask[len(fed) :].all()
        assert rows.stats.trained_tokens == int(row.loss_mask.sum())
        assert not row.logprobs[:shared].any()
        assert [span.trained for span in row.turn_spans] == [False, False, True]
        assert len(await turn_ids(stage, child)) == 1
        report = await stage.post(child, "audit")
        assert report["passed"], report
        assert [turn["turn_id"] for turn in report["turns"]] == await turn_ids(stage, child)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, True])
async def test_a_fork_is_given_rewards_of_its_own_turns_only(stage: Stage, ended: bool) -> None:
    parent = await stage.episode(task={"instruction": "t", "reward": {"late": True}})
    history = await say(stage, parent, FIRST)
    [shared] = await turn_ids(stage, parent)
    [child] = await fork(stage, parent, turn_id=shared)
    await say(stage, child, history, "On.")
    [own] = await turn_ids(stage, child)
    if ended:
        await stage.post(child, "finish")
    status, said = await refused(stage, child, "reward", key="a", turn_rewards={shared: 1})
    assert (status, "it has 1 turns" in said) == (404, True)
    path = f"/episodes/{child['episode_id']}/reward"
    given = await stage.control.post(path, json={"key": "b", "turn_rewards": {"0": 1}})
    assert (given.status_code, given.json()["turn_rewards"]) == (200, {own: 1.0}), given.text


@pytest.mark.slow
async def test_a_fork_may_go_back_branch_and_be_forked(stage: Stage) -> None:
    parent = await stage.episode(limits={"max_turns": 3})
    early = await say(stage, parent, FIRST)
    history = await say(stage, parent, early, "On.")
    _, last = await turn_ids(stage, parent)
    [child] = await fork(stage, parent, turn_id=last)
    await say(stage, child, early, "Back.")
    await say(stage, child, history, "Forth.")
    again = await say(stage, child, history, "Forth, otherwise.")
    rows = await samples(stage, child)
    assert (rows.stats.turns, rows.stats.branches, rows.stats.breaks) == (3, 2, {})
    assert {len(row.turn_spans) for row in rows.samples} == {2, 3}
    status, said = await _exhausted(stage, child, again)
    assert (status, "turns are used up" in said) == (400, True), "its budget is of its own turns"
    *_, latest = await turn_ids(stage, child)
    [grandchild] = await fork(stage, child, turn_id=latest)
    await say(stage, grandchild, again, "Deeper.")
    [row] = (await samples(stage, grandchild)).samples
    assert [span.trained for span in row.turn_spans] == [False, False, False, True]
    assert (await stage.get(grandchild))["forked_from"]["episode_id"] == child["episode_id"]


async def _exhausted(stage: Stage, episode: Episode, history: Messages) -> tuple[int, str]:
    answer = await stage.control.post(
        f"{stage.agent_url}/e/{episode['episode_id']}/v1/chat/completions",
        headers={"authorization": f"Bearer {episode['episode_key']}"},
        json={"model": "m", "messages": [*history, {"role": "user", "content": "more"}]},
    )
    return answer.status_code, answer.text


@pytest.mark.slow
async def test_asking_again_for_the_turn_before_a_fork_samples_anew(stage: Stage) -> None:
    parent = await stage.episode()
    history = await say(stage, parent, FIRST)
    [first] = await turn_ids(stage, parent)
    [child] = await fork(stage, parent, turn_id=first)
    again = await say(stage, child, FIRST)
    assert again[-1] != history[-1], "no reply of another episode is replayed"
    assert np.array_equal(stage.engine.calls[0].input_ids, stage.engine.calls[1].input_ids)
    [row] = (await samples(stage, child)).samples
    assert [span.trained for span in row.turn_spans] == [True]


@pytest.mark.slow
async def test_forks_outlive_restarts_and_hold_what_they_continue(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        speak(stage)
        parent = await stage.episode()
        history = await say(stage, parent, FIRST)
        [first] = await turn_ids(stage, parent)
        done, running = await fork(stage, parent, turn_id=first, n=2, idempotency_key="k")
        assert [
            one["episode_id"] for one in await fork(stage, parent, turn_id=first, n=2, idempotency_key="k")
        ] == [
            done["episode_id"],
            running["episode_id"],
        ]
        for child in (done, running):
            await say(stage, child, history, "On.")
        await stage.post(done, "finish")
        await stage.post(parent, "finish")
        before = [await samples(stage, child) for child in (done, running)]
    async with staged(tiny_model, tmp_path, journal={"retention_bytes": 1 << 20}) as stage:
        for child, rows in zip((done, running), before, strict=True):
            found = await samples(stage, child)
            assert np.array_equal(found.samples[0].input_ids, rows.samples[0].input_ids)
            assert np.array_equal(found.samples[0].loss_mask, rows.samples[0].loss_mask)
        assert (await stage.get(running))["error"]["type"] == "server_restarted"
        path = f"/episodes/{parent['episode_id']}"
        deletion = await stage.control.delete(path)
        assert deletion.status_code == 409
        assert done["episode_id"] in deletion.json()["error"]["message"]
        old = await stage.journal.apply_retention(4e9, {parent["episode_id"]})
        assert parent["episode_id"] not in old
        for child in (done, running):
            assert (await stage.control.delete(f"/episodes/{child['episode_id']}")).status_code == 204
        assert (await stage.control.delete(path)).status_code == 204


@pytest.mark.slow
async def test_what_cannot_be_forked_is_refused_before_anything_is_made(stage: Stage) -> None:
    parent = await stage.episode()
    await say(stage, parent, FIRST)
    [first] = await turn_ids(stage, parent)
    assert (await refused(stage, parent, "fork", turn_id="turn_none"))[0] == 404
    assert (await refused(stage, parent, "fork", snapshot_id="snapshot_none"))[0] == 410
    assert (await refused(stage, parent, "fork"))[0] == 422
    assert (await refused(stage, parent, "fork", turn_id=first, n=2, episode_ids=["one"]))[0] == 422
    assert (await refused(stage, {"episode_id": "nowhere"}, "fork", turn_id=first))[0] == 404
    taken = ["free", parent["episode_id"]]
    status, said = await refused(stage, parent, "fork", turn_id=first, n=2, episode_ids=taken)
    assert (status, said) == (409, f"episode_id {parent['episode_id']} is taken")
    status, said = await refused(stage, parent, "snapshot")
    assert status == 409
    assert "no sandbox" in said
    assert len((await stage.control.get("/episodes")).json()["episodes"]) == 1


# With files


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
async def files(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path
) -> AsyncIterator[tuple[Stage, dict[str, Any]]]:
    sandboxes = {"kind": request.param}
    if request.param == "docker":
        sandboxes["docker_image"] = request.getfixturevalue("docker_image")
    work, wanted = light_work(tiny_model, tmp_path / "data", tmp_path / "installs", sandboxes=sandboxes)
    async with staged(tiny_model, tmp_path / "data", work=work, **wanted) as stage:
        speak(stage)
        yield stage, wanted


WRITE = """
echo 'ANSWER = 42' > answer.py; mkdir -p sub; echo deep > sub/file; ln -s sub/file link; chmod 755 sub/file
echo mine > ~/note; echo passing > /tmp/passing; rm -f gone.txt
"""
READ = "cat answer.py link ~/note /tmp/passing; ls; test -x sub/file && echo runs"


@pytest.mark.slow
async def test_a_fork_begins_with_the_files_of_its_snapshot(
    files: tuple[Stage, dict[str, Any]], tmp_path: Path
) -> None:
    stage, _ = files
    task = {**TASK, "base": {"inline": {"answer.py": "ANSWER = 41\n", "gone.txt": "x"}}}
    parent = await stage.episode(task=task)
    sandbox = await sandbox_of(stage, parent)
    history = await say(stage, parent, FIRST)
    [first] = await turn_ids(stage, parent)
    status, said = await refused(stage, parent, "fork", turn_id=first)
    assert status == 409
    assert "no snapshot" in said
    await run(sandbox, WRITE)
    background = await sandbox.start(Command(("/bin/sh", "-c", "sleep 1000; true")))
    with anyio.fail_after(60):
        while not any("sleep 1000" in process for process in await running_processes(sandbox)):
            pass
    snapshot = await stage.post(parent, "snapshot")
    assert (snapshot["turn_id"], snapshot["bytes"] > 0) == (first, True)
    assert any("sleep 1000" in process for process in snapshot["processes"])
    await background.kill()
    expected = await run(sandbox, READ)
    assert "gone.txt" not in expected
    await run(sandbox, "rm -r sub link; echo 'ANSWER = 0' > answer.py; echo changed > ~/note")
    one, two = await fork(stage, parent, turn_id=first, n=2)
    await stage.post(parent, "cancel")
    for child in (one, two):
        own = await sandbox_of(stage, child)
        assert await run(own, READ) == expected
        assert await running_processes(own) == (), "no process survives"
    await run(await sandbox_of(stage, two), "echo 'ANSWER = 7' > answer.py")
    for child, reward in ((one, 1.0), (two, 0.0)):
        await say(stage, child, history, "Done?")
        await stage.post(child, "finish")
        with anyio.fail_after(120):
            while not EpisodeStatus((await stage.get(child, "?wait=5"))["status"]).ended:
                pass
        assert (await stage.get(child))["reward"] == reward
    kept = await stage.get(parent, "/snapshots")
    assert [each["snapshot_id"] for each in kept["snapshots"]] == [snapshot["snapshot_id"]]
    for episode in (one, two, parent):
        assert (await stage.control.delete(f"/episodes/{episode['episode_id']}")).status_code == 204
    assert list((tmp_path / "data" / "snapshots").iterdir()) == [], "a snapshot goes with its episode"


HOSTILE = """
ln -s /home/tests tests; ln -s / root; ln -s /proc/1/root helper; ln -s loop loop; ln -s /home/harness ~/harness
mkfifo pipe /tmp/pipe; touch -- -rf; python3 -c 'open(b"bad\\xff", "w"); open("new\\nline", "w")'
(while true; do rm -rf swap; mkdir swap; rm -rf swap; ln -s /home/tests swap; done) > /dev/null 2>&1 &
"""
CALL = """
import http.client, json, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
for episode, key in json.loads(sys.argv[2]):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    connection.request("GET", f"/e/{episode}/v1/models", headers={"authorization": f"Bearer {key}"})
    print(connection.getresponse().status)
"""


@pytest.mark.slow
async def test_a_fork_has_its_snapshot_and_no_way_to_the_episode_that_it_continues(
    files: tuple[Stage, dict[str, Any]],
) -> None:
    """Whatever lies in the folders, and while the other episode runs."""
    stage, _ = files
    parent = await stage.episode(task=TASK)
    other = await sandbox_of(stage, parent)
    await say(stage, parent, FIRST)
    await run(other, HOSTILE)
    snapshot = await stage.post(parent, "snapshot")
    [child] = await fork(stage, parent, snapshot_id=snapshot["snapshot_id"])
    own = await sandbox_of(stage, child)
    found = await run(
        own, "find . ~ /tmp -type p; for link in tests root helper loop ~/harness; do readlink $link; done"
    )
    assert found.split() == ["/home/tests", "/", "/proc/1/root", "loop", "/home/harness"], "links, and no pipe"
    for closed in ("ls tests/", "ls helper/", "ls ~/harness/", "cat loop"):
        with pytest.raises(SandboxFailed):
            await run(own, f"{closed} | grep .")
    assert await running_processes(own) == ()
    keys = [(each["episode_id"], key["episode_key"]) for each in (parent, child) for key in (parent, child)]
    command = ("python3", "-c", CALL, own.agent_url or "", json.dumps(keys))
    said = (await own.exec(Command(command))).stdout.decode().split()
    assert said == ["404", "404", "401", "200"], "this socket serves the fork, and the fork's key opens it"


@pytest.mark.slow
async def test_snapshots_are_bounded_and_swept(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    work, wanted = light_work(tiny_model, data, tmp_path / "installs")
    async with staged(tiny_model, data, work=work, episodes={"max_snapshots": 2}, **wanted) as stage:
        speak(stage)
        parent = await stage.episode(task=TASK)
        await sandbox_of(stage, parent)
        first, second = [await stage.post(parent, "snapshot") for _ in range(2)]
        assert (first["turn_id"], first["processes"]) == (None, [])
        assert (await refused(stage, parent, "snapshot"))[0] == 409
        [child] = await fork(stage, parent, snapshot_id=first["snapshot_id"])
        await sandbox_of(stage, child)
        await say(stage, child, FIRST)
        launched = await stage.episode(task=TASK, agent="light")
        status, said = await refused(stage, launched, "snapshot")
        assert (status, "light" in said) == (422, True)
    (data / "snapshots" / "half.partial").write_bytes(b"not whole")
    (data / "snapshots" / "strange.snapshot").write_bytes(b"of nothing\n")
    bounds = {"keep_snapshot_bytes": second["bytes"], "retention_interval_s": 0.02}
    async with staged(tiny_model, data, work=work, episodes=bounds, **wanted) as stage:

        async def only_one() -> bool:
            return len((await stage.get(parent, "/snapshots"))["snapshots"]) == 1

        await wait_until(only_one)
        [left] = (await stage.get(parent, "/snapshots"))["snapshots"]
        assert left == second, "the oldest goes first"
        assert not (data / "snapshots" / "half.partial").exists()
        assert not (data / "snapshots" / "strange.snapshot").exists()
        assert (await refused(stage, parent, "fork", snapshot_id=first["snapshot_id"]))[0] == 410


@pytest.mark.slow
async def test_a_repeated_fork_gives_its_episodes_on_a_full_server_and_after_a_later_snapshot(
    tiny_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    work, wanted = light_work(tiny_model, data, tmp_path / "installs")
    settings = {"max_open": 2, "max_snapshots": 2}
    async with staged(tiny_model, data, work=work, episodes=settings, **wanted) as stage:
        speak(stage)
        parent = await stage.episode(task=TASK)
        await sandbox_of(stage, parent)
        await say(stage, parent, FIRST)
        [first] = await turn_ids(stage, parent)
        snapshot = await stage.post(parent, "snapshot")
        made = await fork(stage, parent, turn_id=first, idempotency_key="k")
        await stage.post(parent, "snapshot")
        again = await fork(stage, parent, turn_id=first, idempotency_key="k")
        assert [one["episode_id"] for one in again] == [one["episode_id"] for one in made]
        (data / "snapshots" / f"{snapshot['snapshot_id']}.snapshot").unlink()
        again = await fork(stage, parent, turn_id=first, idempotency_key="k")
        assert [one["episode_id"] for one in again] == [one["episode_id"] for one in made]
        status, said = await refused(stage, parent, "fork", turn_id=first, idempotency_key="k", metadata={"a": 1})
        assert (status, "for another request" in said) == (409, True)
        assert (await refused(stage, parent, "fork", turn_id=first, idempotency_key="l"))[0] == 429


@pytest.mark.slow
@pytest.mark.parametrize("programs", [(), ("rm",)], ids=["all programs", "no find"])
def test_a_folder_of_any_size_is_emptied(tmp_path: Path, programs: tuple[str, ...]) -> None:
    """The names of the first have more bytes than a command line may have."""
    work, path = tmp_path / "work", tmp_path / "bin"
    work.mkdir()
    for number in range(10 if programs else 10_000):
        (work / f"{number}{'x' * 240}").touch()
    (work / "-rf sub").mkdir()
    (work / "-rf sub" / ".hidden").touch()
    (work / ".git").mkdir()
    (work / "link").symlink_to(tmp_path)
    path.mkdir()
    for program in programs:
        (path / program).symlink_to(shutil.which(program) or program)
    env = {"PATH": str(path) if programs else os.defpath}
    subprocess.run(["/bin/sh", "-c", CLEAR, "sh", work], check=True, env=env)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bin", "work"]
    assert list(work.iterdir()) == []


async def test_no_snapshot_is_taken_while_a_tool_runs_and_tools_wait_for_one() -> None:
    toolbox = Toolbox(ToolSettings())
    toolbox._in_use["busy"] = object()  # type: ignore[assignment]
    with pytest.raises(Conflict, match="a tool call"), toolbox.paused("busy"):
        pass
    with toolbox.paused("ep"), pytest.raises(Conflict), toolbox.paused("ep"):
        pass
    assert toolbox._paused == {}


@pytest.mark.slow
async def test_the_client_takes_snapshots_and_forks(stage: Stage) -> None:
    async with AsyncClient(str(stage.control.base_url)) as client:
        episode = await client.create_episode("Search.")
        created = episode.created.model_dump()
        history = await say(stage, created, FIRST)
        [turn] = await episode.turns()
        assert await episode.snapshots() == ()
        children = await episode.fork(turn_id=turn.turn_id, n=2, group_id="search")
        for child in children:
            await say(stage, child.created.model_dump(), history, "On.")
            assert (await child.status()).group_id == "search"
            [row] = (await child.samples()).samples
            assert [span.trained for span in row.turn_spans] == [False, True]
