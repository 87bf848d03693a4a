"""``make agents-matrix`` plays its rows, keeps what it has, and leaves no container when it is interrupted."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from agents_matrix.recording import SUFFIX, read
from turnstile_server.sandboxes.docker.containers import SANDBOX_LABEL
from waiting import wait_until_sync

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

MATRIX = Path(__file__).resolve().parents[2] / "benchmarks" / "agents_matrix"
START_S = 120.0


def command(folder: Path, image: str, *faults: str) -> list[str]:
    where = ["--rows", str(folder), "--table", str(folder / "table.md"), "--image", image]
    return [sys.executable, str(MATRIX), "--agents", "plain-loop", "--faults", *faults, *where]


@pytest.fixture
def own_image(docker_image: str) -> Iterator[str]:
    """An image that only one test uses: it tells the test's containers from others on the engine."""
    engine = docker.from_env()
    name = f"turnstile-test:matrix-{uuid.uuid4().hex[:8]}"
    text = f"FROM {docker_image}\nLABEL turnstile.test={name}\n"
    engine.images.build(fileobj=io.BytesIO(text.encode()), tag=name, rm=True)
    try:
        yield name
    finally:
        engine.images.remove(name)
        engine.close()


def containers(image: str) -> set[str]:
    engine = docker.from_env()
    try:
        filters = {"ancestor": image, "label": SANDBOX_LABEL}
        return {one["Id"] for one in engine.api.containers(all=True, filters=filters)}
    finally:
        engine.close()


@pytest.mark.thorough
def test_rows_are_played_tabled_recorded_and_not_played_twice(tmp_path: Path, docker_image: str) -> None:
    first = subprocess.run(
        command(tmp_path, docker_image, "ok", "cut"), capture_output=True, text=True, check=False
    )
    assert first.returncode == 0, first.stdout + first.stderr
    rows = {fault: json.loads((tmp_path / f"plain-loop.{fault}.json").read_text()) for fault in ("ok", "cut")}
    assert {row["status"] for row in rows.values()} == {"completed"}
    assert all(row["finished"] and row["fired"] for row in rows.values())
    assert rows["cut"]["refused"] == {"503": 1}
    assert [len(read(tmp_path / f"plain-loop.{fault}{SUFFIX}").calls) for fault in ("ok", "cut")] == [3, 4]
    table = (tmp_path / "table.md").read_text()
    assert table.count("| `ok` | yes | completed, 0 | 3 |") == 1

    again = subprocess.run(command(tmp_path, docker_image, "ok"), capture_output=True, text=True, check=True)
    assert again.stdout == ""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_container(tmp_path: Path, own_image: str, number: signal.Signals) -> None:
    process = subprocess.Popen(command(tmp_path, own_image, "server_error"), stdout=subprocess.DEVNULL)
    try:

        def has_container() -> bool:
            assert process.poll() is None
            return bool(containers(own_image))

        wait_until_sync(has_container, within_s=START_S)
        process.send_signal(number)
        assert process.wait(180) == 1
    finally:
        process.kill()
    assert not containers(own_image)
