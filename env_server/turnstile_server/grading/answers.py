"""Whether a submitted answer is the wanted one.

What must hold: an answer is only text; a number is one number and finite; matching a pattern, which an answer can
make arbitrarily slow, is done in a process of its own that is ended in time.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from subprocess import DEVNULL, CalledProcessError

import anyio

from turnstile_server.tasks.model import Answer

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
class Verdict:
    right: bool
    note: str
    """Why it is not, for the trainer."""


async def judge_answer(wanted: Answer, given: str | None, regex_timeout_s: float) -> Verdict:
    """``given`` None: nothing was submitted, which is wrong whatever was wanted."""
    if given is None:
        return Verdict(False, "nothing was submitted")
    text = given.strip()
    match wanted.kind:
        case "exact":
            return _verdict(_same_text(str(wanted.value).strip(), text, wanted.ignore_case), "another text")
        case "numeric":
            number = parse_number(text)
            if number is None:
                return Verdict(False, "not one finite number")
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


def _verdict(right: bool, note: str) -> Verdict:
    return Verdict(right, "" if right else note)


async def _match(pattern: str, text: str, ignore_case: bool, timeout_s: float) -> Verdict:
    question = json.dumps([pattern, text, ignore_case]).encode()
    with anyio.move_on_after(timeout_s):
        done = await anyio.run_process(
            [sys.executable, "-I", "-S", "-c", _MATCH], input=question, stdout=DEVNULL, check=False, env={}
        )
        if done.returncode not in (_MATCHED, _NOT_MATCHED):
            raise CalledProcessError(done.returncode, "match")
        return _verdict(done.returncode == _MATCHED, "does not match")
    return Verdict(False, f"not matched within {timeout_s:g} s")
