"""What a start imports, and what it leaves alone: both decide how soon a server answers."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_listeners_open_before_anything_heavy_is_imported() -> None:
    program = """
import sys, turnstile_server.commands.serve
print(sorted({"torch", "transformers", "tokenizers", "mcp", "fastapi", "docker", "openenv", "gradio",
    "aiohttp", "prometheus_client"} & set(sys.modules)))
"""
    assert run(program) == "[]"


@pytest.mark.slow
def test_a_start_without_a_model_imports_no_library_of_models() -> None:
    program = """
import sys, turnstile_server.app
print(sorted({"torch", "transformers", "openenv", "gradio", "fastmcp"} & set(sys.modules)))
"""
    assert run(program) == "[]"
