"""Checks of the start: equal seeds give equal episodes, and other seeds others."""

from __future__ import annotations

import hashlib
import json

from turnstile_server.grading.certification.check_result import (
    TaskFinding,
    judged,
    not_applicable,
    unchecked,
)
from turnstile_server.grading.certification.episode_play import CertifiedTask
from turnstile_server.grading.certification.start_scan import scan
from turnstile_server.grading.proof_works import begin

SEED = 7
OTHER_SEEDS = (0, 1, 2, 3)


async def check_episodes(subject: CertifiedTask) -> TaskFinding:
    """Two episodes with one seed have the same instruction and the same files."""
    if not subject.task.needs_sandbox and subject.task.environment is None:
        return not_applicable("the start is the task's own text")
    seed = None if subject.task.environment is None else SEED
    starts = [await _start(subject, seed) for _ in range(2)]
    problems = [
        f"two episodes{'' if seed is None else f' with seed {seed}'} begin with another {part}"
        for part, (one, other) in {
            "instruction": (starts[0][0], starts[1][0]),
            "work folder": (starts[0][1], starts[1][1]),
        }.items()
        if one != other
    ]
    return judged(problems, starts=len(starts))


async def check_seeds(subject: CertifiedTask) -> TaskFinding:
    """Other seeds give other starts, and the same seed the same one."""
    if subject.task.environment is None:
        return not_applicable("it draws nothing: its start is the same for every seed")
    again = [await _start(subject, SEED) for _ in range(2)]
    if again[0] != again[1]:
        return judged([f"the seed does not decide the start: two episodes with seed {SEED} differ"])
    starts = {again[0], *[await _start(subject, seed) for seed in OTHER_SEEDS]}
    seeds = len(OTHER_SEEDS) + 1
    if len(starts) == 1:
        return unchecked(
            f"its instruction and files are equal for {seeds} seeds: what it draws, if anything, no agent is shown"
        )
    return judged([], seeds=seeds, different_starts=len(starts))


async def _start(subject: CertifiedTask, seed: int | None) -> tuple[str, str]:
    """Digests of the instruction, and of the files."""
    async with begin(subject.task, subject.parts, seed) as begun:
        files = "" if begun.task.base is None else json.dumps(begun.task.base.inline, sort_keys=True)
        if begun.sandbox is not None:
            files += (await scan(begun.sandbox, {}, subject.parts.settings.grading)).digest
        return _digest(begun.task.instruction), _digest(files)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
