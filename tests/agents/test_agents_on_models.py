"""Agents that people use, on models that people train: each writes its calls in its own format, end to end.

Templates and vocabularies are the models' own (``scripts/model_kits.py``); a policy writes what they would sample.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio import to_thread
from solved import assert_solved

from model_kits import Kits, cache_folder
from turnstile.models import Limits
from turnstile_server.settings import Settings
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.testing.server import scripted_server
from turnstile_server.testing.shell_policy import ShellPolicy, endpoint_texts, solution_commands

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.thorough, pytest.mark.timeout(900)]

TASK = "fix-cart-discount"
MODELS = ("qwen3.5", "qwen3-coder", "glm-4.7", "kimi-k2", "gpt-oss", "llama-3.3")
AGENTS = ("claude-code", "codex", "mini-swe-agent")


@pytest.fixture(scope="module")
def kits() -> Kits:
    return Kits(cache_folder())


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("model", MODELS)
async def test_it_solves_a_task_on_one_path_in_the_models_own_format(
    agent: str, model: str, kits: Kits, run_dir: Path
) -> None:
    folder = await to_thread.run_sync(kits.make, model)
    settings = Settings(model=folder, sandboxes={"kind": "local", "run_dir": run_dir})
    task = (await to_thread.run_sync(load_tasks, ())).get(TASK)
    policy = ShellPolicy(solution_commands(task, settings.tasks), fallback=endpoint_texts(settings.tools))
    async with scripted_server(settings, policy) as server:
        told = await server.play(agent, TASK, limits=Limits(wall_s=600.0, max_turns=30))
    assert_solved(told)
    assert told.samples.stats.parse == {}
    breaks = told.samples.stats.breaks
    assert set(breaks) <= {"new_conversation", "system_changed"}, breaks
