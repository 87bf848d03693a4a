"""A server that cannot start says why in one line, exits with code 2, and leaves nothing running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from gate_support import staged

pytestmark = pytest.mark.slow


def refusal(*arguments: str | Path) -> str:
    """The one line that ``turnstile serve`` writes before it exits with code 2."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    done = subprocess.run(
        [sys.executable, "-m", "turnstile", "serve", "--control-port", "0", "--agent-port", "0", *arguments],
        env=inherited,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert line.startswith("turnstile: ")
    return line


@pytest.mark.thorough
@pytest.mark.anyio
async def test_a_locked_data_directory(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path):
        line = await anyio.to_thread.run_sync(refusal, "--model", tiny_model, "--data-dir", tmp_path)
    assert str(tmp_path) in line
    assert "another" in line or "lock" in line


def test_a_missing_model_folder(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert str(absent) in refusal("--model", absent, "--data-dir", tmp_path / "data")


@pytest.mark.thorough
def test_experts_of_an_engine_that_returns_none(tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "turnstile.toml"
    config.write_text("[engine]\nrouted_experts = true\n")
    line = refusal("--model", tiny_model, "--data-dir", tmp_path / "data", "--config", config)
    assert "engine.routed_experts" in line
    assert "embedded" in line


@pytest.mark.thorough
def test_a_tokenizer_without_a_chat_template(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert "chat template" in refusal("--model", model, "--data-dir", tmp_path / "data")


def test_an_engine_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        engine = f"http://127.0.0.1:{unused.getsockname()[1]}"
        config = tmp_path / "turnstile.toml"
        config.write_text("[engine]\nstart_timeout_s = 1.0\n")
        line = refusal(
            *("--model", tiny_model, "--data-dir", tmp_path / "data", "--config", config),
            *("--engine", "sglang", "--engine-url", engine),
        )
    assert engine in line


@pytest.mark.thorough
@pytest.mark.slow
def test_a_data_directory_that_cannot_be_made(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in refusal("--model", tiny_model, "--data-dir", file / "data")


@pytest.mark.thorough
@pytest.mark.slow
def test_an_engine_url_that_is_none(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--model", tiny_model, "--data-dir", tmp_path / "data", "--engine-url", "foo")
    assert "http://" in refusal(*arguments, "--engine", "sglang")


@pytest.mark.thorough
@pytest.mark.slow
def test_an_engine_url_for_the_embedded_engine(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--model", tiny_model, "--data-dir", tmp_path / "data", "--engine-url", "http://127.0.0.1:9")
    assert "--engine sglang" in refusal(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM])
def test_a_start_that_waits_can_be_stopped(tiny_model: Path, tmp_path: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "turnstile", "serve", "--control-port", "0", "--agent-port", "0"]
    command += ["--model", str(tiny_model), "--data-dir", str(tmp_path / "data")]
    command += ["--engine", "sglang", "--engine-url", "http://127.0.0.1:9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        waiting = next(line for line in process.stderr if "waiting for the engine" in line)
        assert "waiting for the engine at http://127.0.0.1:9" in waiting
        process.send_signal(sent)
        _, rest = process.communicate(timeout=60)  # less than engine.start_timeout_s
    assert process.returncode == 0
    assert all(" INFO " in line for line in rest.splitlines()), rest
