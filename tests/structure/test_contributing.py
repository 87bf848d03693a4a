"""The recipes of CONTRIBUTING.md, followed to the letter on a copy of the packages, and then used."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MOST_LINES = 40
BLOCK = re.compile(r'^```(python|diff) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

ENGINE = """
import sys
from pathlib import Path
import anyio, numpy as np
from turnstile_server.demo import TINY
from turnstile_server.engines.registry import create_engine
from turnstile_server.engines.protocol import CallOrigin, EngineSampling
from turnstile_server.settings import EngineSettings, Settings

async def main():
    engine = create_engine(Settings(engine={"kind": "uniform"}).engine, TINY, None)
    await engine.start()
    prompt = np.arange(5, dtype=np.int32)
    options = dict(rid="call", origin=CallOrigin("episode"), stream=False)
    chunks = [chunk async for chunk in engine.generate(prompt, EngineSampling(max_new_tokens=7), **options)]
    assert len(chunks) == 1 and len(chunks[0].ids) == len(chunks[0].logprobs) == 7
    assert chunks[0].finish.reason == "length"
    await engine.close()

anyio.run(main)
"""

DIALECT = """
import anyio, httpx
from turnstile.models import EpisodeRequest, TaskRef
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import Step
from turnstile_server.testing.server import scripted_server

async def main():
    settings = Settings(sandboxes={"kind": "none"})
    async with scripted_server(settings, lambda call: Step(text=f"turn {call.turn}")) as server:
        made = await server.create(EpisodeRequest(task=TaskRef(instruction="Talk."), agent="external"))
        async with httpx.AsyncClient(headers={"x-api-key": made.episode_key}) as http:
            reply = await http.post(f"{made.model_url}/v1/plain", content="What is 2 + 2?")
            assert (reply.status_code, reply.text) == (200, "turn 0"), reply.text
        turns = (await server.control.get(f"/episodes/{made.episode_id}/turns")).json()["turns"]
        assert [turn["dialect"] for turn in turns] == ["plain"]

anyio.run(main)
"""

SANDBOX = """
import anyio
from turnstile.models import TaskRef
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import Step
from turnstile_server.testing.server import scripted_server

def policy(call):
    if call.calls_made:
        return Step(text="Done.")
    return Step(text="I look.", tool="bash", arguments={"command": "ls"})

async def main():
    async with scripted_server(Settings(sandboxes={"kind": "frugal"}), policy) as server:
        played = await server.play("plain-loop", TaskRef(instruction="Look around."))
        assert played.episode.status.value == "completed", played.episode.error
        assert played.tool_calls == 1 and played.accounted

anyio.run(main)
"""

TASKS = """
from turnstile_server.errors import StartupError
from turnstile_server.tasks.registry import load_tasks

tasks = list(load_tasks(["sums:3"]))
assert [task.id for task in tasks] == ["sum-0", "sum-1", "sum-2"] and tasks[2].answer.value == 4.0
try:
    load_tasks(["sums:many"])
except StartupError as error:
    assert "N below a million" in error.message
else:
    raise AssertionError("a bad source was taken")
"""

GRADER = """
import anyio
from turnstile.models import EpisodeRequest, TaskRef
from turnstile_server.grading.brevity import BrevityGrader
from turnstile_server.grading.protocol import Work
from turnstile_server.grading.registry import GRADERS, unknown_graders
from turnstile_server.tasks.model import Task

task = Task(id="short", instruction="Be brief.", grading={"brevity": {"chars": 5}})
assert unknown_graders(task) is None and GRADERS["brevity"] is BrevityGrader

async def main():
    grader = GRADERS["brevity"](None)
    assert (await grader.grade(task, Work(answer="four"))).value == 1.0
    lost = await grader.grade(task, Work(answer="fourteen"))
    assert lost.value == 0.0 and "8 characters" in lost.summary[0]

anyio.run(main)
"""

EXPORTER = """
import io
import anyio
from turnstile.exporters.registry import FORMATS, writer_of
from turnstile.models import EpisodeRequest, TaskRef
from turnstile.models.wire import decode_samples
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import Step
from turnstile_server.testing.server import scripted_server

async def main():
    assert FORMATS["csv"].suffix == ".csv"
    async with scripted_server(Settings(), lambda call: Step(text="Done.")) as server:
        played = await server.play("plain-loop", TaskRef(instruction="Say that you are done."))
    file = io.BytesIO()
    assert writer_of("csv")([played.samples], file) == 1
    head, row = file.getvalue().decode().split()
    assert head == "sample_id,reward,tokens,trained" and row.startswith(played.samples.samples[0].sample_id)
    assert int(row.rsplit(",")[-1]) == played.samples.stats.trained_tokens > 0

anyio.run(main)
"""

PROGRAMS = {
    "engine": ENGINE,
    "dialect": DIALECT,
    "sandbox backend": SANDBOX,
    "task source": TASKS,
    "grader": GRADER,
    "exporter": EXPORTER,
}
"""What each addition must do once the recipe was followed, by the recipe's name."""


@dataclass(frozen=True)
class Recipe:
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.strip().splitlines()

    def follow(self, root: Path) -> None:
        """Writes the recipe's modules below ``root`` and adds its lines to the registries."""
        for language, path, body in BLOCK.findall(self.text):
            target = root / path
            if language == "python":
                assert not target.exists(), f"{path} is there already"
                target.write_text(body)
            else:
                target.write_text(with_lines(target.read_text(), body))


def with_lines(text: str, diff: str) -> str:
    """``text`` with each added line of ``diff`` below the line that stands above it in ``diff``."""
    lines = text.splitlines()
    above = ""
    for line in diff.splitlines():
        if line.startswith("+"):
            assert lines.count(above) == 1, f"{above!r} stands {lines.count(above)} times in the file"
            lines.insert(lines.index(above) + 1, line[1:])
        above = line[1:]
    return "\n".join(lines) + "\n"


def recipes() -> dict[str, Recipe]:
    parts = re.split(r"^## Add an? (.+)$", PAGE, flags=re.MULTILINE)[1:]
    return {name: Recipe(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_there_is_a_recipe_for_each_of_the_six() -> None:
    assert set(recipes()) == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recipe_is_one_module_and_one_entry_on_at_most_forty_lines(name: str) -> None:
    recipe = recipes()[name]
    assert len(recipe.lines) <= MOST_LINES
    assert [language for language, _, _ in BLOCK.findall(recipe.text)] == ["python", "diff"]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_who_follows_a_recipe_has_what_it_promises(name: str, tmp_path: Path) -> None:
    for folder in ("client", "env_server"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with what is compiled: a recipe changes a few files
    environment = {"PYTHONPATH": f"{tmp_path}/client:{tmp_path}/env_server", "PATH": "/usr/bin:/bin", "HOME": "/"}
    program = [sys.executable, "-P", "-c", PROGRAMS[name]]
    before = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert before.returncode != 0, "the program passes without the recipe"
    recipes()[name].follow(tmp_path)
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
