"""Isolation: two episodes of one task do not see each other, and nothing of an ended one is in the next."""

from __future__ import annotations

import secrets as random_text

from turnstile_server.grading.certification.check_result import TaskFinding, judged, not_applicable
from turnstile_server.grading.certification.episode_play import CertifiedTask
from turnstile_server.grading.certification.reward_checks import NEGLIGIBLE
from turnstile_server.grading.certification.start_scan import scan
from turnstile_server.grading.proof_works import BegunEpisode, begin, collect
from turnstile_server.sandboxes.protocol import Command

_LEAVE = (
    'for d in "$PWD" "$HOME" /tmp /var/tmp /dev/shm /logs /tests /solution; do '
    '[ -d "$d" ] && echo "$1" > "$d/left-by-an-episode" 2>/dev/null; done; true'
)
_STAYS = "sleep 300; :"
_LEAVE_S = 20.0


async def check_isolation(subject: CertifiedTask) -> TaskFinding:
    """Files, processes and, where the task can be solved, the reward of one episode show in no other."""
    if not subject.task.needs_sandbox and subject.task.environment is None:
        return not_applicable("an episode of it has no state: no sandbox and no environment")
    mark = f"mark-{random_text.token_hex(16)}"
    problems: list[str] = []
    async with (
        begin(subject.task, subject.parts) as first,
        begin(subject.task, subject.parts) as second,
    ):
        left = await _leave(first, mark)
        problems += await _seen(subject, second, mark, "an episode that runs at the same time")
        reward = await _other_reward(subject, first, second)
        if reward is not None and reward > subject.most_of_a_wrong_work + NEGLIGIBLE:
            problems.append(f"an episode that did nothing earns {reward:g} while another one is solved")
    async with begin(subject.task, subject.parts) as later:
        problems += await _seen(subject, later, mark, "an episode that has ended")
    return judged(problems, sandboxes=3 if left else 0, other_reward=reward)


async def _leave(begun: BegunEpisode, mark: str) -> bool:
    if begun.sandbox is None:
        return False
    await begun.sandbox.exec(Command(("/bin/sh", "-c", _LEAVE, "sh", mark), timeout_s=_LEAVE_S))
    await begun.sandbox.start(Command(("/bin/sh", "-c", _STAYS, mark)))
    return True


async def _seen(subject: CertifiedTask, begun: BegunEpisode, mark: str, whose: str) -> list[str]:
    if begun.sandbox is None:
        return []
    found = (await scan(begun.sandbox, {mark: mark}, subject.parts.settings.grading)).found
    return [f"{place} is of {whose}" for place in found.get(mark, ())[:5]]


async def _other_reward(subject: CertifiedTask, first: BegunEpisode, second: BegunEpisode) -> float | None:
    """The reward of ``second``, in which nothing is done, when ``first`` has been solved; None: not measured."""
    if subject.ungraded is not None or subject.unsolvable is not None or subject.task.steps:
        return None
    await subject.solve(first)
    work = await collect(second, None, subject.parts.max_work_bytes, solved=False)
    return (await subject.grader.grade(second.task, work)).reward
