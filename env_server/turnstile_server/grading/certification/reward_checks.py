"""Checks of the reward: the solution earns the most, nothing and tricks earn no more than the floor, always."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence

from turnstile_server.grading.certification.attacks import (
    ANSWER_ATTACKS,
    CONSTANTS,
    EMPTIED,
    AttackedPart,
    GeneralAttack,
    file_attacks,
)
from turnstile_server.grading.certification.check_result import (
    TaskFinding,
    judged,
    not_applicable,
    unchecked,
)
from turnstile_server.grading.certification.episode_play import CertifiedTask
from turnstile_server.grading.proof_works import BegunEpisode
from turnstile_server.grading.protocol import Grade
from turnstile_server.grading.validation import outcome
from turnstile_server.sandboxes.protocol import Command

SCRIPT_S = 30.0
"""For the script of an attack."""
NEGLIGIBLE = 1e-9
NO_FLOOR = "doing nothing was given no reward, so there is no floor to compare with"
_REASONS = 5
_REASON_CHARS = 300


async def check_oracle(subject: CertifiedTask) -> TaskFinding:
    """The task's own solution earns the declared maximum, each time."""
    if (reason := subject.ungraded or subject.unsolvable) is not None:
        return unchecked(reason)
    grades = await subject.gold_grades()
    rewards = rewards_of(grades)
    least = subject.maximum - subject.declared.oracle_tolerance
    worst = min(rewards, default=None)
    problems: list[str] = []
    if worst is None or worst < least - NEGLIGIBLE:
        shown = "no reward" if worst is None else f"{worst:g}"
        problems.append(f"its own solution earns {shown}, and must earn at least {least:g}")
        problems += _reasons(grades[0])
        problems += subject.solution_said[:1]
    return judged(problems, oracle_reward=worst, maximum=subject.maximum)


async def check_floor(subject: CertifiedTask) -> TaskFinding:
    """An agent that does nothing earns less than the maximum by the margin."""
    if subject.ungraded is not None:
        return unchecked(subject.ungraded)
    if (floor := await _floor(subject)) is None:
        return unchecked(NO_FLOOR)
    problems = [] if _low(floor, subject) else [f"doing nothing earns {floor:g}{_bound(subject)}"]
    return judged(problems, floor_reward=floor, floor_gap=subject.maximum - floor)


async def check_canaries(subject: CertifiedTask) -> TaskFinding:
    """Answers and works that take no look at the task earn less than the maximum by the margin."""
    if subject.ungraded is not None:
        return unchecked(subject.ungraded)
    canaries: list[GeneralAttack] = []
    if subject.reads_answers:
        answers = (*CONSTANTS, subject.task.instruction)
        canaries += [GeneralAttack(f"the answer {_short(a)}", AttackedPart.ANSWER, answer=a) for a in answers]
    if subject.reads_files:
        canaries.append(EMPTIED)
    if not canaries:
        return not_applicable("neither an answer nor files are graded")
    rewards = await _rewards(subject, canaries)
    if not rewards:
        return unchecked(f"none of its {len(canaries)} canaries was given a reward")
    problems = [
        f"{name} earns {reward:g}{_bound(subject)}" for name, reward in rewards if not _low(reward, subject)
    ]
    highest, unrewarded = max(reward for _, reward in rewards), len(canaries) - len(rewards)
    return judged(problems, canaries=len(canaries), unrewarded=unrewarded, canary_reward=highest)


async def check_attacks(subject: CertifiedTask) -> TaskFinding:
    """Attacks on the grader earn no more than doing nothing."""
    if subject.ungraded is not None:
        return unchecked(subject.ungraded)
    attacks = [*(ANSWER_ATTACKS if subject.reads_answers else ())]
    if subject.reads_files:
        attacks += file_attacks(subject.task)
    if not attacks:
        return not_applicable("neither an answer nor files are graded")
    if (floor := await _floor(subject)) is None:
        return unchecked(NO_FLOOR)
    rewards = await _rewards(subject, attacks)
    if not rewards:
        return unchecked(f"none of its {len(attacks)} attacks was given a reward")
    problems = [
        f"{name} earns {reward:g}; doing nothing earns {floor:g}"
        for name, reward in rewards
        if reward > floor + NEGLIGIBLE
    ]
    unrewarded = len(attacks) - len(rewards)
    return judged(problems, attacks=len(attacks), unrewarded=unrewarded, attacks_paid=len(problems))


async def check_verifier(subject: CertifiedTask) -> TaskFinding:
    """The same work is graded the same every time."""
    if subject.ungraded is not None:
        return unchecked(subject.ungraded)
    works = {"doing nothing": await subject.nothing_grades()}
    if subject.unsolvable is None:
        works["the solution"] = await subject.gold_grades()
    if not any(map(rewards_of, works.values())):
        return unchecked("neither doing nothing nor a solution was given a reward")
    problems, widest = [], 0.0
    allowed = subject.declared.variance_tolerance
    for name, grades in works.items():
        rewards = rewards_of(grades)
        spread = max(rewards, default=0.0) - min(rewards, default=0.0)
        widest = max(widest, spread)
        other = not allowed and any(outcome(grade) != outcome(grades[0]) for grade in grades)
        if other or spread > allowed or len(rewards) not in (0, len(grades)):
            shown = ", ".join("none" if grade.reward is None else f"{grade.reward:g}" for grade in grades)
            problems.append(f"{name} was graded {len(grades)} times, and earned {shown}{_differing(grades)}")
    return judged(problems, runs=subject.runs, reward_spread=widest)


async def _floor(subject: CertifiedTask) -> float | None:
    """The most that doing nothing earned; None: it was given no reward, which is not 0."""
    return max(rewards_of(await subject.nothing_grades()), default=None)


async def _rewards(subject: CertifiedTask, attacks: Sequence[GeneralAttack]) -> list[tuple[str, float]]:
    """Name and reward of each attack that was given one."""
    found = [(attack.name, await _earned(subject, attack)) for attack in attacks]
    return [(name, reward) for name, reward in found if reward is not None]


async def _earned(subject: CertifiedTask, attack: GeneralAttack) -> float | None:
    if attack.answer is not None:
        return (await subject.answer(attack.answer)).reward

    async def act(begun: BegunEpisode) -> str | None:
        if begun.sandbox is not None:
            if attack.files:
                await begun.sandbox.upload(_tar_of(attack), begun.sandbox.workdir)
            if attack.script:
                await begun.sandbox.exec(Command(("/bin/sh", "-c", attack.script), timeout_s=SCRIPT_S))
        return None

    return (await subject.play(act)).reward


def _tar_of(attack: GeneralAttack) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, text in attack.files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data := text.encode())
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def rewards_of(grades: Sequence[Grade]) -> list[float]:
    return [grade.reward for grade in grades if grade.reward is not None]


def _low(reward: float, subject: CertifiedTask) -> bool:
    return reward <= subject.most_of_a_wrong_work + NEGLIGIBLE


def _bound(subject: CertifiedTask) -> str:
    return (
        f"; at most {subject.most_of_a_wrong_work:g} is allowed (the maximum {subject.maximum:g} less the margin "
        f"{subject.declared.floor_margin:g})"
    )


def _reasons(grade: Grade) -> list[str]:
    """The grade's own reasons, shortened."""
    return [str(line)[:_REASON_CHARS] for line in list(grade.detail.get("summary", ()))[:_REASONS]]


def _differing(grades: Sequence[Grade]) -> str:
    """Where the rewards are equal, what else differs."""
    if len({grade.reward for grade in grades}) > 1:
        return ""
    return "; its components or failed tests differ"


def _short(answer: str) -> str:
    return repr(answer) if len(answer) <= 20 else f"{answer[:20]!r}…"
