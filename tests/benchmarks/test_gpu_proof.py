"""The proof on a GPU: its dry run, and what it makes of its rows. Nothing is measured here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TABLES = """
import json, sys
sys.path.insert(0, sys.argv[1])
from gpu_proof_parts.tables import tables
print(tables(json.loads(sys.argv[2])))
"""


@pytest.mark.thorough
def test_a_dry_run_prints_every_command_and_starts_nothing() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_proof.sh"), "--dry-run"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for dtype in ("bfloat16", "float32"):
        assert sum(f"--engine embedded --device cuda --dtype {dtype}" in line for line in lines) == 1
    for concurrent in (64, 256):
        for through in ("engine", "gate"):
            wanted = f"gpu_engines_parts.load embedded {through} --concurrent {concurrent} "
            assert sum(wanted in line for line in lines) == 2
    assert sum("gpu_engines_parts.update embedded tensors " in line for line in lines) == 3
    assert sum("gpu_proof_parts.distances " in line for line in lines) == 4
    assert sum("grpo.grpo " in line and "--steps 20 " in line for line in lines) == 1


def test_a_part_that_failed_is_in_the_tables_and_hides_no_other() -> None:
    rows = (
        '[{"part": "load", "dtype": "bfloat16", "concurrent": 64, "through": "gate", "tokens_per_s": 1234.5},'
        ' {"part": "update", "dtype": "bfloat16", "failed": "Traceback\\nRuntimeError: no memory"}]'
    )
    done = subprocess.run(
        [sys.executable, "-c", TABLES, str(ROOT / "benchmarks"), rows], capture_output=True, text=True, check=True
    )
    assert "| bfloat16 | 64 | gate | 1,234 |" in done.stdout
    assert "| update | RuntimeError: no memory |" in done.stdout
