"""The store of replay's states on a real disk: what a crash leaves, what makes way, what no answer can be."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bounded import bounded
from turnstile_server.errors import NotFound, SandboxFailed, WorkNotKept
from turnstile_server.replay import inside
from turnstile_server.replay.capture import Capture, ChangedFile, read_capture
from turnstile_server.replay.manifest import StateRecord
from turnstile_server.replay.store import KeepRoom, ReplayStore
from turnstile_server.settings import EpisodeSettings

pytestmark = pytest.mark.anyio

PROGRAM = Path(inside.__file__).with_name("changed_files.py")

ENDLESS = """
import anyio, os, sys
from pathlib import Path
from test_replay_store import state, store_in

async def main():
    store = store_in(Path(sys.argv[1]))
    await store.open()
    print("open", flush=True)
    for number in range(10_000):
        await state(store, "ep_killed", {f"f{n}": os.urandom(3000) for n in range(20)})

anyio.run(main)
"""


def store_in(folder: Path, **settings: int) -> ReplayStore:
    return ReplayStore(folder, bounded(EpisodeSettings, **{"keep_replay_bytes": 8 << 20, **settings}), 0, set())


async def state(store: ReplayStore, episode_id: str, files: dict[str, bytes]) -> None:
    changed = tuple(ChangedFile(path, "m", "100644", len(data), data, None) for path, data in files.items())
    capture = Capture(changed, (), 0, late=False)
    await store.keep(
        episode_id, StateRecord("turn", "turn_1", 1.0), capture, {}, KeepRoom(1 << 40, math.inf), always=True
    )


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "contents").iterdir())


def endless(folder: Path) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", ENDLESS, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths})


async def test_a_server_that_is_killed_while_it_writes_leaves_whole_states_and_no_waste(tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    program = endless(folder)
    assert program.stdout is not None
    assert program.stdout.readline() == b"open\n"
    states = folder / "episodes/ep_killed/states"
    while not (states.exists() and states.stat().st_size > 20_000):
        assert program.poll() is None
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    with states.open("ab") as file:
        file.write(b'{"moment": "turn", "tur')
    (folder / "contents/partial").write_bytes(b"half")
    store = store_in(folder)
    await store.open()
    assert not (folder / "contents/partial").exists()
    found = await store.states("ep_killed")
    assert found is not None
    assert all(len(one.set) == 20 for one in found)
    for file in found[-1].set:
        assert file.digest is not None
        assert len(await store.content("ep_killed", file.digest)) == 3000
    await state(store, "ep_other", {"a": b"a"})
    await store.sweep(lambda episode_id: episode_id == "ep_other")
    assert on_disk(folder) == 1
    await store.remove_of(["ep_other"])
    assert (store.used_bytes, list((folder / "contents").iterdir())) == (0, [])


async def test_what_is_removed_half_is_removed_whole_at_the_next_start(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    await store.open()
    await state(store, "ep_1", {"a": b"shared", "b": b"own"})
    await state(store, "ep_2", {"a": b"shared"})
    (tmp_path / "episodes/ep_1/states").unlink()  # as a removal begins
    again = store_in(tmp_path)
    await again.open()
    assert not (tmp_path / "episodes/ep_1").exists()
    assert on_disk(tmp_path) == len(b"shared")
    assert await again.states("ep_1") is None
    await again.remove_of(["ep_2"])
    assert again.used_bytes == 0


async def test_the_oldest_that_ended_makes_way(tmp_path: Path) -> None:
    running = {"ep_0"}
    store = ReplayStore(tmp_path, EpisodeSettings(keep_replay_bytes=200_000), 0, running)
    await store.open()
    for number in range(6):
        await state(store, f"ep_{number}", {"a": os.urandom(50_000)})
    kept = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert kept == ["ep_0", "ep_4", "ep_5"], "one that runs stays"
    assert store.used_bytes <= 200_000
    await store.trim(1)
    assert await store.states("ep_4") is None
    await store.trim(1 << 40)
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["ep_0"]


async def test_a_content_that_the_disk_has_damaged_is_not_served(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    await store.open()
    await state(store, "ep_1", {"a": b"whole"})
    [record] = await store.states("ep_1") or []
    digest = record.set[0].digest
    assert digest is not None
    (tmp_path / "contents" / digest).write_bytes(b"other")
    with pytest.raises(WorkNotKept):
        await store.content("ep_1", digest)
    with pytest.raises(NotFound):
        await store.content("ep_1", "../../contents/" + digest)


async def test_a_full_disk_leaves_contents_out_and_says_so(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path, EpisodeSettings(), 1 << 60, set())
    await store.open()
    await state(store, "ep_1", {"a": b"a"})
    [record] = await store.states("ep_1") or []
    assert (record.set[0].digest, record.set[0].left_out) == (None, "the disk is nearly full")


def told(root: Path, known: dict[str, str] | None = None, **bounds: float) -> tuple[int, list[Any]]:
    """What the program that looks at a work folder says of one: exit code and lines, without contents."""
    wide = {"paths": 100, "list_bytes": 10_000, "file_bytes": 100, "files": 100, "bytes": 1000, "seconds": 60}
    wanted = {"root": str(root), "known": known or {}, "skip": ["skipped"], **wide, **bounds}
    done = subprocess.run(
        [sys.executable, "-ISBc", PROGRAM.read_text()],
        input=json.dumps(wanted).encode(),
        capture_output=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in (b"[", b"{")]
    return done.returncode, lines


@pytest.mark.slow
def test_the_program_inside_tells_what_changed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "work"
    (root / "sub" / "skipped").mkdir(parents=True)
    (root / "a").write_text("text\n")
    (root / "sub" / "b").write_text("b" * 200 + "\n")
    _, first = told(root)
    assert [(line[0], line[5]) for line in first[:-1]] == [
        ("a", None),
        ("sub/b", "large"),
        ("sub/skipped", "skipped"),
    ]
    marks = {line[0]: line[1] for line in first[:-1]}
    assert told(root, marks)[1] == [LAST], "nothing changed"
    status = (root / "a").stat()
    (root / "a").write_text("tex2\n")
    os.utime(root / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert [line[0] for line in told(root, marks)[1][:-1]] == ["a"], "the same size and time of writing"
    (root / "sub" / "b").unlink()
    assert told(root, {**marks, "a": told(root)[1][0][1]})[1] == [{**LAST, "gone": ["sub/b"]}]
    _, late = told(root, marks, seconds=-1)
    assert late == [{**LAST, "late": True}]
    _, cut = told(root, marks, paths=1)
    assert cut[-1] == {**LAST, "gone": ["sub/b"], "further": 1}
    assert told(root, list_bytes=10)[1] == [{**LAST, "further": 2}]
    assert told(tmp_path / "none", marks)[1] == [{**LAST, "gone": [*marks]}]
    (tmp_path / "link").symlink_to("/etc")
    assert told(tmp_path / "link") == told(root / "a") == (1, [])


LAST = {"gone": [], "further": 0, "late": False}


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["nonsense", LAST],
        [["a", "m", "100644", 1, -1, None], LAST],
        [["a", "m", "100644", 1, -1, "no such reason"], LAST],
        [["a", "m", "100644", 1 << 40, 1 << 40, None], LAST],
        [["../a", "m", "100644", 1, -1, "large"], LAST],
        [["/etc/passwd", "m", "100644", 1, -1, "large"], LAST],
        [["\ud800", "m", "100644", 1, -1, "large"], LAST],
        [["a", "m", "777", 1, -1, "large"], LAST],
        [["a", "m" * 200, "100644", 1, -1, "large"], LAST],
        [["a", "m", "100644", -1, -1, "large"], LAST],
        [["a", "m", "100644", 1, -1, []], LAST],
        [{"gone": ["a/../.."], "further": 0, "late": False}],
        [{"gone": [], "further": True, "late": False}],
        [["a", "m", "100644", 1, -1, "large"]],
        [[[[[]]]] * 10, LAST],
    ],
)
def test_an_answer_that_no_program_of_ours_gives_is_none(lines: list[object]) -> None:
    said = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with pytest.raises(SandboxFailed):
        read_capture(said)
    with pytest.raises(SandboxFailed):
        read_capture(b"[" * 100_000 + b"\n" + said)
