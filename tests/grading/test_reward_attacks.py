"""Attacks on the reward by an agent that lives in a sandbox: each earns 0 here, and 1 of a naive grader.

What the agent does is run in its own sandbox, then its work is collected and graded by the parts that do it for
every episode. docs/attacks.md lists the attacks; ``TURNSTILE_WRITE_DOCS=1`` writes its tables.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from grading_support import Watched, grader, spec_of, tar
from naive_grader import READINGS, NaiveGrader, pytest_mount
from reward_attacks import REWARD_ATTACKS, SORTS
from reward_attacks.attack import ALL, Kind, Reading, RewardAttack
from reward_attacks.judged import GOLD, judged_task

from turnstile.models import EpisodeStatus, Limits
from turnstile_server.backends import Backends, build_backends
from turnstile_server.episodes.grading import EpisodeGrading
from turnstile_server.episodes.outcome import Outcome
from turnstile_server.episodes.plan import Plan
from turnstile_server.episodes.sandbox import EpisodeSandbox
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.grading.protocol import Grade
from turnstile_server.sandboxes.protocol import Command, Mount, Sandbox
from turnstile_server.settings import EpisodeSettings, Settings, TaskSettings
from turnstile_server.spans import SpanRecorder
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import pack
from turnstile_server.tasks.workspace import prepare_workspace

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "attacks.md"
HEAD = ["| attack | what it does | what stops it here | earns 1 elsewhere by |", "|---|---|---|---|"]
QUICK = ("conftest.py", "a race with the submit", "an object that equals everything", "os._exit", "the check read")
"""Played by every run; the others where grading changed."""


@pytest.fixture(scope="session")
def naive_pytest() -> Iterator[Mount]:
    folder = Path(tempfile.mkdtemp(prefix="tg-pytest-"))
    try:
        yield pytest_mount(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Backends:
    """As the server builds them, but for the sandboxes."""
    return build_backends(Settings(data_dir=tmp_path_factory.mktemp("data")))


async def acted(sandbox: Sandbox, attack: RewardAttack) -> None:
    """What the agent does."""
    if attack.files:
        await sandbox.upload(tar(attack.files), sandbox.workdir)
    if attack.agent:
        done = await sandbox.exec(Command(("sh", "-c", attack.agent), timeout_s=20))
        assert done.exit_code == 0, done


async def judged_here(built: Backends, provider: Watched, task: Task, attack: RewardAttack) -> Grade:
    """By the parts that take an episode to its reward; its agent is external, and acts by its tools."""
    plan = Plan(task, None, spec_of(task), Limits(), "")
    backends = replace(built, sandboxes=provider, grader=grader(provider))
    works = WorkStore(Path("nothing-is-kept"), EpisodeSettings(keep_work="none"), 0, lambda _: None)
    spans = SpanRecorder(0.0, 0)
    sandbox = EpisodeSandbox("e-attack", plan, spec_of(task), backends, Settings(), spans)
    try:
        await sandbox.prepare(task)
        assert sandbox.for_tools is not None
        await acted(sandbox.for_tools, attack)
        graded = EpisodeGrading("e-attack", sandbox, None, None, backends, works, spans)
        outcome = await graded.graded(Outcome(EpisodeStatus.COMPLETED), task, None)
    finally:
        await sandbox.destroy()
    assert outcome.grade is not None, outcome
    return outcome.grade


async def judged_naively(provider: Watched, task: Task, attack: RewardAttack, mount: Mount) -> frozenset[Reading]:
    sandbox = await provider.create(replace(spec_of(task), mounts=(mount,)))
    naive = NaiveGrader(task)
    try:
        await prepare_workspace(sandbox, task, lambda files: pack(files, TaskSettings()))
        if attack.tests_first:
            await naive.bring_tests(sandbox)
        await acted(sandbox, attack)
        return await naive.grade(sandbox)
    finally:
        await sandbox.destroy()


async def both(
    built: Backends, provider: Watched, attack: RewardAttack, mount: Mount, trust: str
) -> tuple[Grade, frozenset[Reading]]:
    task = judged_task(attack.kind, trust)
    found: dict[str, Any] = {}

    async def here() -> None:
        found["here"] = await judged_here(built, provider, task, attack)

    async def naively() -> None:
        found["naively"] = await judged_naively(provider, task, attack, mount)

    async with anyio.create_task_group() as group:
        group.start_soon(here)
        group.start_soon(naively)
    return found["here"], found["naively"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(each, id=each.name, marks=() if each.name in QUICK else pytest.mark.cheats)
        for each in REWARD_ATTACKS
    ],
)
async def test_an_attack_earns_nothing_here_and_1_of_a_naive_grader(
    provider: Watched, attack: RewardAttack, naive_pytest: Mount, backends: Backends
) -> None:
    if attack.needs_git and provider.inner.name == "docker":
        pytest.skip("the image has no git")
    first, *others = attack.trust
    grade, fooled = await both(backends, provider, attack, naive_pytest, first)
    assert grade.reward == 0.0, grade.detail
    assert fooled >= attack.fools, (sorted(fooled), attack.name)
    for trust in others:
        grade = await judged_here(backends, provider, judged_task(attack.kind, trust), attack)
        assert grade.reward == 0.0, grade.detail


@pytest.mark.slow
@pytest.mark.parametrize("kind", GOLD)
async def test_a_solution_earns_1_of_both_and_nothing_earns_0(
    provider: Watched, kind: Kind, naive_pytest: Mount, backends: Backends
) -> None:
    for files, reward, readings in ((GOLD[kind], 1.0, ALL), ({}, 0.0, frozenset())):
        control = RewardAttack("control", "", "", ALL, files, kind=kind)
        grade, earned = await both(backends, provider, control, naive_pytest, "boundary")
        assert (grade.reward, earned) == (reward, readings), grade.detail


def test_no_two_attacks_have_one_name() -> None:
    assert len({attack.name for attack in REWARD_ATTACKS}) == len(REWARD_ATTACKS)
    assert all(attack.fools for attack in REWARD_ATTACKS)


def table(attacks: tuple[RewardAttack, ...]) -> list[str]:
    def elsewhere(attack: RewardAttack) -> str:
        return "any reading" if attack.fools == ALL else ", ".join(sorted(attack.fools))

    rows = [(each.name, each.what, each.stopped_by, elsewhere(each)) for each in attacks]
    return [*HEAD, *("| " + " | ".join(row) + " |" for row in rows)]


def test_the_page_lists_every_attack_and_no_other() -> None:
    shown = ["<!-- attacks: written by tests/grading/test_reward_attacks.py -->"]
    for sort, attacks in SORTS.items():
        shown += ["", f"### {sort}", "", *table(attacks)]
    shown += ["", "<!-- end of attacks -->"]
    lines = PAGE.read_text().splitlines()
    start, end = lines.index(shown[0]), lines.index(shown[-1])
    if os.environ.get("TURNSTILE_WRITE_DOCS"):
        PAGE.write_text("\n".join([*lines[:start], *shown, *lines[end + 1 :]]) + "\n")
        return
    assert lines[start : end + 1] == shown
    assert all(f"| `{reading}` | {words} |" in lines for reading, words in READINGS.items())
