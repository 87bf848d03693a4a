"""The example in which a trainer and an engine take turns, as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load_file

from local import ROOT
from turnstile_server.demo import TINY
from vllm_server import TIMEOUT_S, vllm_model

pytestmark = pytest.mark.timeout(600)


def take_turns(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "take_turns", out, "--sandbox", "local", *options],
        cwd=ROOT / "examples",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_two_rounds_free_the_engines_memory_and_serve_the_trained_weights(tmp_path: Path) -> None:
    done = take_turns(tmp_path / "out", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = {
        phase: [int(size) for size in re.findall(rf"{phase} +engine +(\d+) MiB", done.stdout)]
        for phase in ("played", "engine asleep")
    }
    assert len(shown["played"]) == 2, done.stdout
    for awake, asleep in zip(shown["played"], shown["engine asleep"], strict=True):
        assert asleep < awake
    assert re.findall(r"of (\d+) episodes, .* weights (\d) now", done.stdout) == [("8", "1"), ("8", "2")]
    first, last = (load_file(folder / "model.safetensors") for folder in (TINY, tmp_path / "out" / "v2"))
    assert any((first[name].astype("float32") != last[name]).any() for name in last), "no round changed a weight"


def is_told(done: subprocess.CompletedProcess[str], reason: str) -> None:
    """It failed with the engine's own reason and what to do, before anything was played. What its server left
    running would be a second failure."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("Failed: ") == 1, done.stderr
    assert reason in done.stderr
    assert "as examples/grpo does" in done.stderr
    assert "Traceback" not in done.stderr
    assert "round" not in done.stdout


@pytest.mark.thorough
@pytest.mark.sglang
def test_an_sglang_that_cannot_sleep_is_told_with_its_reason(
    tmp_path: Path, sglang_url: str, tiny_model: Path
) -> None:
    done = take_turns(tmp_path / "out", "--model", str(tiny_model), "--engine-url", sglang_url)
    is_told(done, "This SGLang runs on a CPU")


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.timeout(TIMEOUT_S)
def test_a_vllm_that_cannot_sleep_is_told_with_its_reason_and_serves_on(tmp_path: Path, vllm_url: str) -> None:
    engine = ("--engine", "vllm", "--engine-url", vllm_url)
    done = take_turns(tmp_path / "out", "--model", str(vllm_model()), *engine)
    is_told(done, "This vLLM cannot sleep: on a CPU it frees nothing")
    paused = httpx.get(f"{vllm_url}/is_paused", timeout=60.0).json()
    assert paused == {"is_paused": False}
