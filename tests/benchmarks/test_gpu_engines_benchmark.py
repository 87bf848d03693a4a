"""The GPU benchmark's dry run: every command is there, and every part of it loads. Nothing is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_engines.py"


@pytest.mark.thorough
def test_a_dry_run_prints_every_command_and_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--dry-run"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("gpu_engines_parts.model" in line for line in lines) == 2
    for kind, engine in (("sglang", "sglang.launch_server"), ("vllm", "vllm.entrypoints.openai.api_server")):
        assert sum(engine in line for line in lines) == 1
        assert sum(f"--engine {kind} " in line for line in lines) == 1
        for concurrent in (64, 256):
            for through in ("engine", "gate"):
                wanted = f"gpu_engines_parts.load {kind} {through} --concurrent {concurrent} "
                assert sum(wanted in line for line in lines) == 2
        for way in ("disk", "tensors", "nccl"):
            assert sum(f"gpu_engines_parts.update {kind} {way} " in line for line in lines) == 1


def test_without_an_engine_it_says_what_to_name() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "--sglang-python" in done.stderr
