"""The attacks of ``turnstile openenv certify`` are no straw men: a naive grader pays each of them.

The naive grader is that of ``test_reward_attacks.py``; ``tests/openenv/test_certify.py`` has what Turnstile pays.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from grading_support import Watched, spec_of, tar
from naive_grader import NaiveGrader, pytest_mount
from reward_attacks.judged import judged_task

from turnstile_server.grading.certification.attacks import AttackedPart, GeneralAttack, file_attacks
from turnstile_server.sandboxes.protocol import Command, Mount
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.tarball import pack
from turnstile_server.tasks.workspace import prepare_workspace

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.thorough]

TASK = judged_task("module")


@pytest.fixture(scope="module")
def naive_pytest() -> Iterator[Mount]:
    folder = Path(tempfile.mkdtemp(prefix="tg-pytest-"))
    try:
        yield pytest_mount(folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "attack", [pytest.param(each, id=each.name) for each in file_attacks(TASK) if each.part is AttackedPart.TESTS]
)
async def test_a_naive_grader_pays_it(provider: Watched, attack: GeneralAttack, naive_pytest: Mount) -> None:
    sandbox = await provider.create(replace(spec_of(TASK), mounts=(naive_pytest,)))
    naive = NaiveGrader(TASK)
    try:
        await prepare_workspace(sandbox, TASK, lambda files: pack(files, TaskSettings()))
        if attack.files:
            await sandbox.upload(tar(attack.files), sandbox.workdir)
        if attack.script:
            done = await sandbox.exec(Command(("/bin/sh", "-c", attack.script), timeout_s=20))
            assert (done.exit_code, done.stderr) == (0, b""), done
        assert await naive.grade(sandbox)
    finally:
        await sandbox.destroy()
