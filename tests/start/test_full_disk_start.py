"""`turnstile serve` on a disk that has become full, or read-only: it starts, and gives what it has."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import environment, serve_command

from real_disk import fill, remount, tmpfs
from waiting import wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "control-key-of-the-full-disk"
SETTINGS = {"TURNSTILE_CONTROL_KEY": KEY}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "size=200m,nr_inodes=5000") as folder:
        yield folder


@contextmanager
def serving(model: Path, data: Path) -> Iterator[tuple[httpx.Client, dict[str, Any]]]:
    command = serve_command("--engine", "trainer", "--model", model, "--data-dir", data, "--sandbox", "none")
    with (data.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment(**SETTINGS), stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (data.parent / "server.log").read_text()[-3000:]
        ready = json.loads(line)
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=ready["control_url"], headers=headers, timeout=30) as client:
            yield client, ready
    finally:
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.thorough
def test_a_server_starts_on_a_disk_that_has_become_full(tiny_model: Path, disk: Path) -> None:
    with serving(tiny_model, disk) as (client, ready):
        assert "the oldest ended episodes that a trainer has fetched are deleted" in ready["journal"]
        assert ready["journal"] in (disk.parent / "server.log").read_text()
        assert client.get("/ready").json() == {"status": "ready"}
        made = []
        for number in range(3):
            created = client.post("/episodes", json={"task": {"instruction": f"task {number}"}})
            made.append(created.json()["episode_id"])
            client.post(f"/episodes/{made[-1]}/cancel").raise_for_status()
    ballast = fill(disk)
    with serving(tiny_model, disk) as (client, _):
        assert {shown["episode_id"] for shown in client.get("/episodes").json()["episodes"]} == set(made)
        assert (
            client.get(f"/episodes/{made[0]}/samples", headers={"accept": "application/json"}).status_code == 200
        )
        told = client.get("/ready")
        assert (told.status_code, told.json()["status"]) == (503, "not ready")
        assert "new episodes and turns are refused" in told.json()["reason"]
        refused = client.post("/episodes", json={"task": {"instruction": "no room"}})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "journal_unavailable")
        assert client.delete(f"/episodes/{made[0]}").status_code == 204
        assert client.get("/health").status_code == 200
    log = (disk.parent / "server.log").read_text()
    assert "The server starts, because what is there can be read and deleted" in log
    assert "Traceback" not in log
    ballast.unlink()
    remount(disk, "ro")
    with serving(tiny_model, disk) as (client, _):
        assert {shown["episode_id"] for shown in client.get("/episodes").json()["episodes"]} == set(made[1:])
        assert "Read-only" in client.get("/ready").json()["reason"]
        assert client.delete(f"/episodes/{made[1]}").status_code == 503
        remount(disk, "rw")
        wait_until_sync(lambda: client.get("/ready").status_code == 200)
        assert client.delete(f"/episodes/{made[1]}").status_code == 204
        assert client.post("/episodes", json={"task": {"instruction": "room"}}).status_code == 201
    assert "Traceback" not in (disk.parent / "server.log").read_text()
