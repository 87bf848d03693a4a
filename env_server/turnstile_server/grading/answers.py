"""Grades by a submitted answer: exact text, a number, or a pattern.

What must hold: an answer is only text; a number is one number and finite; a pattern, which an answer can make
arbitrarily slow to match, is matched in a process of its own that is killed in time.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from subprocess import DEVNULL, CalledProcessError

import anyio

from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.tasks.answer import Answer
from turnstile_server.tasks.model import Task

NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d{1,3})?")
MAX_NUMBER_CHARS = 100
_MATCH = (
    "import json, re, sys\n"
    "pattern, text, ignore_case = json.load(sys.stdin)\n"
    "flags = re.IGNORECASE if ignore_case else 0\n"
    "sys.exit(0 if re.fullmatch(pattern, text, flags) else 1)\n"
)
_MATCHED, _NOT_MATCHED = 0, 1


@dataclass(frozen=True, slots=True)
class AnswerVerdict:
    """Verdict on an answer."""

    right: bool
    note: str
    """Reason why it is wrong, for the trainer."""


class AnswerGrader(ComponentGrader):
    """The component ``answer``: 1 when the submitted answer is the wanted one, else 0."""

    Options = Answer

    def __init__(self, tools: GradingTools, name: str, options: Answer) -> None:
        self._regex_timeout_s = tools.settings.bounds_of(GradingBounds).regex_timeout_s

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        if task.answer is None:
            return Component(0.0)
        verdict = await judge_answer(task.answer, work.answer, self._regex_timeout_s)
        detail = {"answer": {"right": verdict.right, "note": verdict.note}}
        return Component(float(verdict.right), detail, () if verdict.right else (f"answer: {verdict.note}",))


async def judge_answer(wanted: Answer, given: str | None, regex_timeout_s: float) -> AnswerVerdict:
    """Compare the answer ``given`` with ``wanted``. ``given`` None: nothing was submitted, so it is wrong."""
    if given is None:
        return AnswerVerdict(False, "nothing was submitted")
    text = given.strip()
    match wanted.kind:
        case "exact":
            return _verdict(_same_text(str(wanted.value).strip(), text, wanted.ignore_case), "another text")
        case "numeric":
            number = parse_number(text)
            if number is None:
                return AnswerVerdict(False, "not one finite number")
            distance = abs(number - Decimal(str(wanted.value)))
            return _verdict(distance <= Decimal(str(wanted.tolerance)), "another number")
        case "regex":
            return await _match(str(wanted.value), text, wanted.ignore_case, regex_timeout_s)


def parse_number(text: str) -> Decimal | None:
    """``42``, ``-1.5``, ``1,234.5``, ``1e-3``; None for anything else, also for ``nan`` and ``inf``."""
    if len(text) > MAX_NUMBER_CHARS or not NUMBER.fullmatch(text) or not any(c.isdigit() for c in text):
        return None
    if text.lstrip("+-")[:1].lower() == "e" or text.lstrip("+-").startswith((".e", ".E")) or not text.isascii():
        return None
    return Decimal(text.replace(",", ""))


def _same_text(wanted: str, given: str, ignore_case: bool) -> bool:
    return wanted.casefold() == given.casefold() if ignore_case else wanted == given


def _verdict(right: bool, note: str) -> AnswerVerdict:
    return AnswerVerdict(right, "" if right else note)


async def _match(pattern: str, text: str, ignore_case: bool, timeout_s: float) -> AnswerVerdict:
    question = json.dumps([pattern, text, ignore_case]).encode()
    with anyio.move_on_after(timeout_s):
        done = await anyio.run_process(
            [sys.executable, "-I", "-S", "-c", _MATCH], input=question, stdout=DEVNULL, check=False, env={}
        )
        if done.returncode not in (_MATCHED, _NOT_MATCHED):
            raise CalledProcessError(done.returncode, "match")
        return _verdict(done.returncode == _MATCHED, "does not match")
    return AnswerVerdict(False, f"not matched within {timeout_s:g} s")
