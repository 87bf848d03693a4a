"""A sound task folder of Harbor, to spoil."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import TaskProblem
from turnstile_server.tasks.registry import installed_sources

CONFIG = """\
schema_version = "1.4"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
memory_mb = 256
"""
FILES = {
    "task.toml": CONFIG,
    "instruction.md": "Write `done.txt`.\n",
    "environment/Dockerfile": "FROM turnstile-example:base\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\n[ -e done.txt ] && echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\ntouch done.txt\n",
}


def harbor_folder(folder: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    """``changes``: text by path; None leaves the file out."""
    for path, text in {**FILES, **(changes or {})}.items():
        if text is not None:
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


def loaded(source: Path, settings: TaskSettings | None = None) -> tuple[list[Task], list[TaskProblem]]:
    """As the registry would load it."""
    kind = next(each for each in installed_sources() if each.recognises(str(source)))
    tasks: list[Task] = []
    problems: list[TaskProblem] = []
    for found in kind.load(str(source), settings or TaskSettings()):
        if isinstance(found, TaskProblem):
            problems.append(found)
        else:
            tasks.append(found.task)
    return tasks, problems


def told(source: Path, settings: TaskSettings | None = None) -> list[str]:
    """The problems, as lines, without the folder."""
    return [str(each).replace(f"{source}/", "") for each in loaded(source, settings)[1]]


STEP_TESTS = (
    '#!/bin/bash\n[ "$(cat "$(cat /tests/step).txt")" = done ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'
)


def steps_config(changes: Mapping[str, str] | None = None) -> str:
    """``changes``: further keys by the name of a step; `strategy`."""
    said = {"one": "min_reward = 0.5", "strategy": "mean", **(changes or {})}
    tables = "".join(f'[[steps]]\nname = "{name}"\n{said.get(name, "")}\n' for name in ("one", "two", "three"))
    return f'multi_step_reward_strategy = "{said["strategy"]}"\n{CONFIG}{tables}'


def steps_folder(folder: Path, changes: Mapping[str, str] | None = None) -> Path:
    """A task of three steps: each wants `NAME.txt` to say `done`; the second has a set-up. ``changes`` as in
    ``steps_config``."""
    steps: dict[str, str | None] = {"task.toml": steps_config(changes), "tests/test.sh": STEP_TESTS}
    for name in ("one", "two", "three"):
        steps |= {
            f"steps/{name}/instruction.md": f"Do step {name}.\n",
            f"steps/{name}/tests/step": f"{name}\n",
            f"steps/{name}/solution/solve.sh": f"#!/bin/bash\necho done > {name}.txt\n",
        }
    steps["steps/two/workdir/more.txt"] = "more\n"
    steps["steps/two/workdir/setup.sh"] = "set -e\nmv more.txt two-has-begun.txt\n"
    return harbor_folder(folder, {**steps, "instruction.md": None, "solution/solve.sh": None})
