"""``turnstile serve --launch``: whole servers, and what is left of their engine when they end or are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from launch_support import TOY, Toy
from server_process import TIMEOUT_S, environment, refusal, serve_command

from waiting import wait_until_sync

pytestmark = pytest.mark.slow
ENGINE = ("--engine", "sglang", "--launch")


class Served:
    """A server on the toy engine, with its log in a file."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ready(self) -> dict[str, str]:
        assert self.process.stdout is not None
        found: dict[str, str] = json.loads(self.process.stdout.readline())
        return found

    def ends(self) -> int:
        return self.process.wait(TIMEOUT_S)


@contextmanager
def served(toy: Toy, model: Path, tmp_path: Path, *further: str, **settings: str) -> Iterator[Served]:
    log = tmp_path / "server.log"
    given = {
        "TURNSTILE_LAUNCH__PYTHON": sys.executable,
        "TURNSTILE_LAUNCH__ENVIRONMENT": json.dumps({"PYTHONPATH": str(TOY), "TOY_DIR": str(toy.folder)}),
        "TURNSTILE_LAUNCH__STOP_GRACE_S": "5",
    }
    command = serve_command("--model", model, "--data-dir", tmp_path / "data", *ENGINE, *further)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment(**(given | settings)), stdout=subprocess.PIPE, stderr=file, text=True
        )
    try:
        yield Served(process, log)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_server_that_is_stopped_ends_its_engine(toy: Toy, tiny_model: Path, tmp_path: Path) -> None:
    toy.behave("children")
    toy.behave("orphan")
    with served(toy, tiny_model, tmp_path, "--", "--context-length", "4096") as server:
        ready = server.ready()
        assert toy.json("arguments")[:2] == ["--context-length", "4096"]
        key = (tmp_path / "data" / "control.key").read_text().strip()
        with httpx.Client(
            base_url=ready["control_url"], headers={"authorization": f"Bearer {key}"}, timeout=60
        ) as http:
            engine = http.get("/engine").json()
        assert (engine["ok"], engine["weight_version"]) == (True, "default")
        assert len(toy.left()) == 4
        server.process.terminate()
        assert server.ends() == 0
        assert toy.left() == []
        assert "sglang: loading \\u202eweights\\x07" in server.log
        assert "\x1b" not in server.log


def test_a_server_that_is_killed_while_it_serves_leaves_no_engine(
    toy: Toy, tiny_model: Path, tmp_path: Path
) -> None:
    toy.behave("children")
    toy.behave("orphan")
    toy.behave("ignore_term")
    with served(toy, tiny_model, tmp_path) as server:
        server.ready()
        assert len(toy.left()) == 4
        server.process.kill()
        toy.wait_gone()


@pytest.mark.thorough
def test_a_server_that_is_killed_while_the_engine_starts_leaves_no_engine(
    toy: Toy, tiny_model: Path, tmp_path: Path
) -> None:
    toy.behave("children")
    toy.behave("orphan")
    toy.behave("never_ready")
    with served(toy, tiny_model, tmp_path) as server:
        wait_until_sync(lambda: len(toy.left()) == 4)
        server.process.kill()
        toy.wait_gone()


@pytest.mark.thorough
def test_a_server_that_is_killed_while_it_stops_leaves_no_engine(
    toy: Toy, tiny_model: Path, tmp_path: Path
) -> None:
    toy.behave("children")
    toy.behave("ignore_term")
    with served(toy, tiny_model, tmp_path, TURNSTILE_LAUNCH__STOP_GRACE_S="600") as server:
        server.ready()
        server.process.terminate()
        wait_until_sync(lambda: toy.lines("terms"))
        assert server.process.poll() is None
        server.process.kill()
        toy.wait_gone()


@pytest.mark.thorough
def test_a_start_that_waits_for_the_engine_says_so_and_can_be_stopped(
    toy: Toy, tiny_model: Path, tmp_path: Path
) -> None:
    toy.behave("never_ready")
    toy.behave("children")
    with served(toy, tiny_model, tmp_path, "--control-port", str(free_port())) as server:
        wait_until_sync(lambda: "waiting for the engine: process" in server.log and "loading" in server.log)
        port = server.process.args[-1]  # type: ignore[index]
        ready = f"http://127.0.0.1:{port}/ready"
        wait_until_sync(lambda: "loading" in httpx.get(ready).json()["reason"])
        answer = httpx.get(ready)
        assert answer.status_code == 503
        assert f"it waits for the engine: process {toy.starts[0]} of sglang, " in answer.json()["reason"]
        server.process.terminate()
        assert server.ends() == 0
        assert toy.left() == []


@pytest.mark.thorough
def test_ready_says_that_no_engine_serves_and_that_a_pause_lasts(
    toy: Toy, tiny_model: Path, tmp_path: Path
) -> None:
    with served(toy, tiny_model, tmp_path, TURNSTILE_FLEET__PAUSE_ALARM_S="0.2") as server:
        url = server.ready()["control_url"]
        key = (tmp_path / "data" / "control.key").read_text().strip()
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as http:

            def ready() -> tuple[int, str]:
                answer = http.get("/ready")
                return answer.status_code, answer.text

            assert ready() == (200, '{"status":"ready"}')
            toy.behave("never_ready")
            os.kill(toy.starts[0], signal.SIGKILL)
            wait_until_sync(lambda: ready()[0] == 503)
            assert "No engine serves: w1 is down: " in ready()[1]
            toy.forget("never_ready")
            wait_until_sync(lambda: ready() == (200, '{"status":"ready"}'))
            http.post("/engine/pause", json={"mode": "retract"}).raise_for_status()
            assert ready()[1].startswith('{"status":"ready","engine":"model calls wait: the engine is paused')
            wait_until_sync(lambda: ready()[0] == 503)
            assert '"reason":"model calls wait: the engine is paused' in ready()[1]
            http.post("/engine/resume").raise_for_status()
            assert ready() == (200, '{"status":"ready"}')


def test_an_engine_that_cannot_start_ends_the_server_with_the_engines_words(
    toy: Toy, tiny_model: Path, tmp_path: Path
) -> None:
    toy.behave("fails", "OSError: no weights \x1b[2Jhere")
    with served(toy, tiny_model, tmp_path) as server:
        assert server.ends() == 2
        assert "turnstile: The engine (sglang) did not start: its process ended with code 3\n" in server.log
        assert server.log.endswith("OSError: no weights here\n")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            (*ENGINE, "--engine-url", "http://127.0.0.1:1"),
            "--launch starts an engine, --engine-url attaches to one",
        ),
        (("--launch",), "--engine embedded is none"),
        (("--engine", "trainer", "--launch"), "--engine trainer is none"),
        ((*ENGINE, "--", "--host", "0.0.0.0"), "--host is not allowed here"),
        (("--", "--tp", "2"), "'--tp 2': arguments of an engine are for one that --launch starts"),
    ],
)
def test_flags_that_contradict_a_launch_are_refused(
    tiny_model: Path, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in refusal("--model", tiny_model, "--data-dir", tmp_path / "data", *arguments)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
