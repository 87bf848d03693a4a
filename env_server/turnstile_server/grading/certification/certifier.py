"""All checks of one task, one after the other, within a time of its own.

A check that fails with an error of the task's is a failed check; one that the machine prevented, or an image that
is not there or cannot be built, is an error. What a check has made is released before the next one begins, and
when the whole is cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType

import anyio

from turnstile.models import Fault
from turnstile_server.errors import TurnstileError
from turnstile_server.grading.certification.check_result import (
    CheckedTask,
    CheckId,
    CheckStatus,
    TaskFinding,
    failed,
)
from turnstile_server.grading.certification.episode_play import CertifiedTask
from turnstile_server.grading.certification.isolation_check import check_isolation
from turnstile_server.grading.certification.leak_check import check_leakage
from turnstile_server.grading.certification.reward_checks import (
    check_attacks,
    check_canaries,
    check_floor,
    check_oracle,
    check_verifier,
)
from turnstile_server.grading.certification.start_checks import check_episodes, check_seeds
from turnstile_server.tasks.images import TaskImages

Check = Callable[[CertifiedTask], Awaitable[TaskFinding]]

TASK_CHECKS: Mapping[CheckId, Check] = MappingProxyType(
    {
        CheckId.ORACLE: check_oracle,
        CheckId.FLOOR: check_floor,
        CheckId.VERIFIER: check_verifier,
        CheckId.CANARIES: check_canaries,
        CheckId.LEAKAGE: check_leakage,
        CheckId.EPISODES: check_episodes,
        CheckId.SEEDS: check_seeds,
        CheckId.ISOLATION: check_isolation,
        CheckId.ATTACKS: check_attacks,
    }
)
"""The checks that are made of each task, in their order: a later one uses the grades of an earlier one."""


async def certify_task(
    subject: CertifiedTask, images: TaskImages, timeout_s: float, check_ids: Iterable[CheckId]
) -> tuple[CheckedTask, ...]:
    """``timeout_s``: for all of these checks together. Does not raise for a task that is wrong."""
    deadline = anyio.current_time() + timeout_s
    checked = []
    for check_id in check_ids:
        began = time.monotonic()
        finding = TaskFinding(CheckStatus.ERROR, (f"not done within the {timeout_s:g} s of a task (--timeout)",))
        with anyio.move_on_at(deadline):
            finding = await _checked(subject, images, TASK_CHECKS[check_id])
        checked.append(CheckedTask(subject.task.id, check_id, finding, time.monotonic() - began))
    return tuple(checked)


async def _checked(subject: CertifiedTask, images: TaskImages, check: Check) -> TaskFinding:
    try:
        await images.ensure(subject.task, subject.parts.provider.name)
    except TurnstileError as error:  # whosever fault: it says nothing of what the check asks
        return TaskFinding(CheckStatus.ERROR, (error.message,))
    try:
        return await check(subject)
    except TurnstileError as error:
        if error.fault is Fault.INFRASTRUCTURE:
            return TaskFinding(CheckStatus.ERROR, (f"the machine prevented it: {error.message}",))
        return failed(error.message)
