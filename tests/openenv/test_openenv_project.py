"""What OpenEnv's published command checks: the project's files, a running server; and the server under uvicorn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openenv_support import REPLY_S, TASK, base_url

from control_support import Door

ROOT = Path(__file__).resolve().parents[2]
OPENENV = Path(sys.executable).parent / "openenv"
KEY = "k" * 20


def openenv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([OPENENV, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)


def environment(**extra: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    return {**inherited, "TURNSTILE_CONTROL_KEY": KEY, **extra}


@pytest.mark.slow
def test_a_running_server_is_valid(door: Door) -> None:
    httpx.get(f"{base_url(door)}/schema", timeout=REPLY_S).raise_for_status()
    done = openenv("validate", "--url", base_url(door))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["passed"], report["mode"]) == (True, "simulation")


@contextmanager
def serving(*command: str, env: dict[str, str]) -> Iterator[str]:
    """A server's control URL, with the key in it, until the end of the block; it must stop cleanly."""
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        yield f"{ready['control_url']}/k/{KEY}"
        process.terminate()
        assert process.wait(REPLY_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_a_server_without_a_model_is_healthy_and_tells_what_it_lacks(tmp_path: Path) -> None:
    flags = ["--engine", "none", "--host", "127.0.0.1", "--port", "0", "--agent-port", "0"]
    with serving(
        sys.executable, "-m", "server.app", *flags, "--data-dir", str(tmp_path), env=environment()
    ) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "healthy"}
        assert httpx.get(f"{url}/ready").status_code == 503
        refused = httpx.post(f"{url}/reset", json={"task": TASK})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "engine_unavailable")
        assert "TURNSTILE_MODEL" in refused.json()["error"]["message"]
        assert httpx.get(f"{url.removesuffix(KEY)}wrong-key-0123456789/episodes").status_code == 401


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["simulation", "production"])
@pytest.mark.parametrize("model", [False, True])
def test_the_validator_passes_with_and_without_a_model_in_both_modes(
    tmp_path: Path, tiny_model: Path, mode: str, model: bool
) -> None:
    engine = ["--engine", "trainer", "--model", str(tiny_model)] if model else ["--engine", "none"]
    flags = [*engine, "--port", "0", "--agent-port", "0", "--data-dir", str(tmp_path), "--sandbox", "none"]
    env = environment(TURNSTILE_OPENENV__MODE=mode)
    with serving(sys.executable, "-m", "server.app", *flags, env=env) as url:
        done = openenv("validate", "--url", url)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(done.stdout)
        assert (report["passed"], report["mode"]) == (True, mode)


@pytest.mark.thorough
@pytest.mark.slow
def test_uvicorn_serves_the_application_that_openenv_names(tmp_path: Path, tiny_model: Path) -> None:
    listening = tmp_path / "control.sock"
    env = environment(TURNSTILE_MODEL=str(tiny_model), TURNSTILE_DATA_DIR=str(tmp_path), TURNSTILE_GATE__PORT="0")
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "server.app:app", "--uds", str(listening)],
        cwd=ROOT,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "startup complete" in line:
                break
        transport = httpx.HTTPTransport(uds=str(listening), retries=20)
        with httpx.Client(transport=transport, base_url=f"http://server/k/{KEY}", timeout=REPLY_S) as http:
            begun = http.post("/reset", json={"task": TASK}).json()["observation"]
            chat = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
            bearer = {"authorization": f"Bearer {begun['episode_key']}"}
            path = f"{begun['model_url']}/v1/chat/completions"
            assert httpx.post(path, json=chat, headers=bearer, timeout=REPLY_S).status_code == 200
        process.terminate()
        process.communicate(timeout=REPLY_S)
        # uvicorn raises the signal again once it has stopped in order.
        assert process.returncode in (0, -15)
    finally:
        process.kill()
        process.wait()


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("TURNSTILE_MODEL", "/nowhere"), ("TURNSTILE_ENGINE__KIND", "sglang")]
)
def test_uvicorn_is_told_why_the_server_cannot_start(tmp_path: Path, name: str, value: str) -> None:
    env = environment(TURNSTILE_DATA_DIR=str(tmp_path), TURNSTILE_GATE__PORT="0", **{name: value})
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--uds", str(tmp_path / "control.sock")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "model" in done.stderr
