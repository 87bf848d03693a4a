"""What SWE-bench's own harness says of a set of patches, and what Turnstile's grader says, side by side.

The harness runs as it is, on the same engine and images. Where a work forges its log, or changes what no work may,
the two differ on purpose, and the table says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from grading_support import NO_AGENTS, SANDBOXES, spec_of
from swe_support import SweRow, author_rows, harness, make

from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.settings import GradingSettings, TaskSettings

pytestmark = [pytest.mark.docker, pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]

SLUGS = (
    "test_lower_case",
    "test_signs_go",
    "test_accents_go_and_letters_stay",
    "test_one_hyphen_for_several_blanks",
)
FORGED = "".join(f"PASSED tests/test_slugs.py::{name}\\n" for name in SLUGS)
SLUGIFY = """import re


def slugify(text):
    return re.sub(r"[^a-z0-9-]", "", text.strip().lower().replace(" ", "-"))
"""
ACCENTS = SLUGIFY.replace("import re\n", "import re\nimport unicodedata\n").replace(
    "    return", '    text = unicodedata.normalize("NFKD", text)\n    return'
)


@dataclass(frozen=True)
class Case:
    """A work. ``ours`` differs from the harness's verdict where that believes what the work says of itself."""

    row: str
    files: dict[str, str]
    resolved: bool
    ours: float | None = None


SPECIAL = {
    "wrong": Case(
        "rounding", {"ledger/money.py": "def split(cents, people):\n    return []\n\n\nshow = str\n"}, False
    ),
    "partial": Case("slugify", {"textkit/slugs.py": ACCENTS}, False),
    "breaks-another": Case(
        "merge", {"spans.py": "def merge(spans):\n    return [(min(spans)[0], max(spans)[1])]\n"}, False
    ),
    "does-not-import": Case("quotes", {"src/minicsv/__init__.py": "def read_line(:\n"}, False),
    "prints-passed": Case("slugify", {"textkit/slugs.py": f'print("{FORGED}FAILED x")\n{SLUGIFY}'}, False),
    "prints-and-exits": Case(
        "slugify",
        {
            "textkit/slugs.py": "import os\n\nwith open(f'/proc/{os.getppid()}/fd/1', 'w') as log:\n"
            f"    log.write('{FORGED}FAILED x\\n')\nos._exit(1)\n"
        },
        True,
        ours=0.0,
    ),
    "cuts-the-log": Case(
        "queue",
        {
            "waitline.py": "import os\n\nos.write(2, b'''"
            + "".join(
                f"{test} (tests.test_waitline.Order.{test}) ... ok\n"
                for test in (
                    "test_first_come_first_out",
                    "test_items_are_never_compared",
                    "test_lowest_first",
                    "test_length",
                )
            )
            + ">>>>> End Test Output\n>>>>> Test Exit Code: 0\n''')\n"
        },
        True,
        ours=0.0,
    ),
    "says-ok-at-the-end": Case(
        "shell",
        {
            "paths.sh": 'extension_of() { echo "${1##*.}"; }\nname_of() { echo "${1##*/}"; }\n'
            "trap 'echo ok 3 no extension of a hidden file; echo ok 4 no extension without a dot' EXIT\n"
        },
        True,
        ours=0.0,
    ),
}


QUICK = ("shell-nothing", "partial", "breaks-another", "prints-passed", "cuts-the-log")
"""Beside the six solutions: what `.ci/run` plays."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SweRow]:
    made = author_rows(tmp_path_factory.mktemp("swe"))
    make.build_base(make.BASE_IMAGE)
    for row in made.values():
        make.build_image(row.made, make.BASE_IMAGE)
    return made


@pytest.fixture(scope="module")
async def grader(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TaskGrader]:
    run_dir = tmp_path_factory.mktemp("g")
    provider = DockerProvider(SANDBOXES, run_dir, f"swe-{os.getpid()}")
    settings = GradingSettings(parallel=4)
    async with BackgroundTasks() as tasks:
        await provider.start(NO_AGENTS, tasks)
        pythons = {"swebench": Path(os.environ["TURNSTILE_SWEBENCH_PYTHON"])}
        made = TaskGrader(provider, spec_of, settings, TaskSettings(package_pythons=pythons))
        try:
            yield made
        finally:
            await made.close()
            await provider.close()


@pytest.mark.parametrize("chosen", [QUICK, pytest.param(None, marks=pytest.mark.thorough)], ids=["some", "all"])
async def test_the_harness_and_the_grader_say_the_same(
    rows: dict[str, SweRow], grader: TaskGrader, tmp_path: Path, chosen: tuple[str, ...] | None
) -> None:
    cases: dict[str, tuple[SweRow, str, bool, float]] = {}
    for name, row in rows.items():
        cases[f"{name}-gold"] = (row, row.made.row["patch"], True, 1.0)
        if chosen is None or f"{name}-nothing" in chosen:
            cases[f"{name}-nothing"] = (row, "", False, 0.0)
    for name, case in SPECIAL.items():
        if chosen is not None and name not in chosen:
            continue
        wanted = float(case.resolved) if case.ours is None else case.ours
        cases[name] = (rows[case.row], rows[case.row].patch(case.files), case.resolved, wanted)
    theirs: dict[str, Any] = {}
    ours: dict[str, Grade] = {}

    async def ask_harness() -> None:
        # An empty patch is none to the harness, which would not run it: a new file stands for doing nothing.
        given = [
            (name, row.made.row, patch or row.patch({"NOTES": "nothing\n"}))
            for name, (row, patch, *_) in cases.items()
        ]
        python = os.environ["TURNSTILE_SWEBENCH_PYTHON"]
        theirs.update(await anyio.to_thread.run_sync(harness, python, given, tmp_path))

    async def ask_grader(name: str, row: SweRow, archive: bytes) -> None:
        ours[name] = await grader.grade(row.task, Work(archive=archive))

    archives = {name: row.archive(patch) for name, (row, patch, *_) in cases.items()}
    await ask_harness()
    async with anyio.create_task_group() as group:
        for name, (row, *_) in cases.items():
            group.start_soon(ask_grader, name, row, archives[name])
    table = {
        name: ((theirs[name] or {}).get("resolved"), ours[name].reward, ours[name].detail.get("summary"))
        for name in cases
    }
    for name, line in table.items():
        sys.stdout.write(f"{name:22} harness {line[0]!s:6} turnstile {line[1]}  {line[2] or ''}\n")
    assert {name: line[:2] for name, line in table.items()} == {
        name: (resolved, reward) for name, (_, _, resolved, reward) in cases.items()
    }
    # Where both judge the tests, they name the same ones.
    for name, (_, _, resolved, reward) in cases.items():
        status = (theirs[name] or {}).get("tests_status")
        if status and resolved == bool(reward):
            failed = sorted(test for group in status.values() for test in group["failure"])
            assert sorted(one["id"] for one in ours[name].detail["swe"].get("failed", ())) == failed, name
