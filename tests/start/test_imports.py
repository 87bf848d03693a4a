"""What a start imports, and what it leaves alone: both decide how soon a server answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(program: str, folder: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_listeners_open_before_anything_heavy_is_imported() -> None:
    program = """
import sys, turnstile_server.commands.serve
print(sorted({"torch", "transformers", "tokenizers", "mcp", "fastapi", "docker", "openenv", "gradio",
    "aiohttp", "prometheus_client"} & set(sys.modules)))
"""
    assert run(program) == "[]"


def test_a_start_without_a_model_imports_no_library_of_models() -> None:
    program = """
import sys, turnstile_server.app
print(sorted({"torch", "transformers", "openenv", "gradio", "fastmcp"} & set(sys.modules)))
"""
    assert run(program) == "[]"


def test_openenv_is_loaded_without_its_web_interface_which_others_may_import(tmp_path: Path) -> None:
    (tmp_path / "probe_server.py").write_text(
        "from openenv.core.env_server import types\nclass OpenEnvServer:\n    def __init__(self, parts): pass\n"
    )
    program = """
import importlib.util, sys, anyio
from turnstile_server.control.openenv import OpenEnvLoader
anyio.run(OpenEnvLoader(None, "probe_server").server)
print(sorted({"gradio", "pandas", "openenv"} & set(sys.modules)), importlib.util.find_spec("gradio") is not None)
"""
    assert run(program, tmp_path) == "['openenv'] True"
