"""Leakage: the solution, the hidden tests and the expected answer are in nothing that the agent is given.

Texts are recognised by their lines (``grading/leaks.py``), in the instruction, in variables and in files. An
answer is short and may stand anywhere by chance, or by right, where an agent must find it in a file. So it counts
as leaked where it is labelled as the answer, where a file is nothing else, and, from ``LEAST_LINE`` characters on,
in the instruction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import anyio.to_thread

from turnstile_server.grading.certification.check_result import TaskFinding, judged, not_applicable
from turnstile_server.grading.certification.episode_play import CertifiedTask
from turnstile_server.grading.certification.start_scan import scan
from turnstile_server.grading.leaks import (
    HIDDEN_TESTS,
    LEAST_LINE,
    LEAST_LINES,
    SOLUTION,
    SecretText,
    find_leaks,
    patch_texts,
    secret_texts,
    telling_lines,
)
from turnstile_server.grading.proof_works import BegunEpisode, begin
from turnstile_server.tasks.files import Files, FilesOptions
from turnstile_server.tasks.model import Gold, Task
from turnstile_server.tasks.tarball import read_files

ANSWER = "the expected answer"
ALONE_CHARS = 3
"""A shorter answer may be a whole file by chance."""
_LABEL = r"(?:answer|solution|expected|gold|ground[ _-]?truth)"


async def check_leakage(subject: CertifiedTask) -> TaskFinding:
    """Nothing secret can be read at the start of an episode."""
    secrets = await secret_texts_of(subject)
    answers = tuple(dict.fromkeys(_answers(subject.task)))
    in_base = await _hidden_in_base(subject)
    if not secrets and not answers and not in_base:
        return not_applicable("it has no solution, hidden tests or answer as text that could be recognised")
    async with begin(subject.task, subject.parts) as begun:
        problems = [*in_base, *_in_text(begun.task.instruction, "the instruction", secrets)]
        for name, value in begun.task.env.items():
            problems += _in_text(value, f"the variable {name}", secrets)
        problems += _answers_in_instruction(begun.task.instruction, answers)
        notes = await _in_sandbox(subject, begun, secrets, answers, problems)
    lines = sum(len(text.lines) for text in secrets)
    finding = judged(list(dict.fromkeys(problems)), lines_searched=lines, answers_searched=len(answers))
    return finding if problems or not notes else replace(finding, evidence=tuple(notes))


async def _in_sandbox(
    subject: CertifiedTask,
    begun: BegunEpisode,
    secrets: Sequence[SecretText],
    answers: Sequence[str],
    problems: list[str],
) -> list[str]:
    """Adds to ``problems``. Returns why not all was searched."""
    if begun.sandbox is None:
        return []
    settings = subject.parts.settings.grading
    own_image = await subject.parts.provider.image_facts(subject.task.image) is not None
    report = await find_leaks(begun.sandbox, secrets, settings, own_image=own_image)
    problems += report.leaks
    patterns = {answer: f"{_labelled(answer)}|{_alone(answer)}" for answer in answers}
    looked = await scan(begun.sandbox, patterns, settings)
    problems += [
        f"{ANSWER} {answer!r} can be read in the agent's sandbox: {', '.join(places[:3])}"
        for answer, places in looked.found.items()
    ]
    notes = [] if report.note is None or not secrets else [f"texts: {report.note}"]
    return notes if looked.whole else [*notes, "the answer was not looked for in all files: there are too many"]


async def secret_texts_of(subject: CertifiedTask) -> tuple[SecretText, ...]:
    """The lines of the task's solution and hidden tests, of all its steps."""
    found: list[SecretText] = []
    steps = [subject.task.at_step(index) for index in range(len(subject.task.steps))] or [subject.task]
    base = await _read(subject.task.base, subject)
    for task in steps:
        gold = task.gold or Gold()
        hidden: dict[str, bytes] = {}
        for entry in task.options:
            if isinstance(entry, FilesOptions):
                hidden |= await _read(entry.files, subject)
        found += secret_texts(base, await _read(gold.files, subject), hidden)
        found += patch_texts(gold.patch, reverse=gold.reverse)
        if gold.script is not None:
            program = secret_texts(base, {}, await _read(gold.script.files, subject))
            found += [replace(text, what=SOLUTION, path=None) for text in program]
    return tuple(dict.fromkeys(found))


async def _hidden_in_base(subject: CertifiedTask) -> list[str]:
    """Tests of which every telling line stands in the task's own files hide nothing. Visible tests may have some
    of them."""
    base = {line.strip() for data in (await _read(subject.task.base, subject)).values() for line in _lines(data)}
    hidden: list[str] = []
    for entry in subject.task.options:
        if isinstance(entry, FilesOptions):
            hidden += [line for data in (await _read(entry.files, subject)).values() for line in _lines(data)]
    lines = telling_lines(hidden)
    if len(lines) < LEAST_LINES or not base.issuperset(lines):
        return []
    return [f"{HIDDEN_TESTS} stand in the task's own files: all of their {len(lines)} telling lines"]


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="replace").splitlines()


async def _read(files: Files | None, subject: CertifiedTask) -> dict[str, bytes]:
    if files is None:
        return {}
    return await anyio.to_thread.run_sync(read_files, files, subject.parts.settings.tasks)


def _answers(task: Task) -> Iterator[str]:
    checked = task.answer is not None or (task.tests is not None and task.tests.reads_answer)
    if checked and task.gold is not None and task.gold.answer is not None:
        yield task.gold.answer.strip()
    if task.answer is not None and task.answer.kind != "regex":
        value = task.answer.value
        yield f"{value:g}" if isinstance(value, float) else value.strip()


def _labelled(answer: str) -> str:
    """``answer: X``, ``"expected": "X"``, ``the answer is X``."""
    return rf"{_LABEL}[\"']?\s*(?:[:=]|\bis\b)\s*[\"'`]?{re.escape(answer)}(?![\w.])"


def _alone(answer: str) -> str:
    """A file, or the value of a variable, that is nothing else."""
    if len(answer) < ALONE_CHARS:
        return r"(?!)"
    return rf"\A(?:\w+=)?\s*{re.escape(answer)}\s*\Z"


def _answers_in_instruction(instruction: str, answers: Sequence[str]) -> Iterator[str]:
    for answer in answers:
        long = len(answer) >= LEAST_LINE and answer.casefold() in instruction.casefold()
        if long or re.search(_labelled(answer), instruction, re.IGNORECASE):
            yield f"{ANSWER} {answer!r} stands in the instruction"


def _in_text(text: str, where: str, secrets: Sequence[SecretText]) -> Iterator[str]:
    """The same rule as for files: at least half of the lines of a kind."""
    for what in (SOLUTION, HIDDEN_TESTS):
        lines = {line for secret in secrets if secret.what == what for line in secret.lines}
        held = sum(line in text for line in lines)
        if len(lines) >= LEAST_LINES and held >= (len(lines) + 1) // 2:
            yield f"{what} can be read in {where}: it has {held} of its {len(lines)} telling lines"
