"""The faults of the matrix: a scripted policy that plays one small task and lets one thing go wrong in it.

The task is two shell commands. The policy reads from the prompt which are done: each command prints a mark that is
not in its own text, so a history that was rewritten, summarised or given to a sub-agent still shows the progress.
Each episode's fault happens at one place; from then on the policy goes on with the task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agents_matrix import tool_use
from turnstile_server.errors import (
    ContextOverflow,
    EngineProtocolError,
    EngineUnavailable,
    TooManyCalls,
    TurnstileError,
)
from turnstile_server.testing.policy import FailedStep, PolicyInput, Step, ToolUse

TASK = (
    "Create hello.py, a program that prints hello, in the current folder. Run it, and read it once more. "
    "Then finish with one sentence."
)
"""A conversation that contains it is about the task itself; a sub-agent's contains another text."""


@dataclass(frozen=True)
class Job:
    """What the main conversation is about. The n-th command prints ``MARK-n``, which its own text does not have.
    ``said``: what the model says with the n-th command."""

    task: str
    commands: tuple[str, ...]
    said: tuple[str, ...] = ()


HELLO = Job(
    TASK,
    (
        "printf '%s\\n' 'print(\"hello\")' > hello.py; python3 hello.py; printf 'MARK-%s\\n' 1",
        "cat hello.py; printf 'MARK-%s\\n' 2",
    ),
)
LONG_COMMAND = "printf 'MARK-%s\\n' {mark}; seq {start} {end} | xargs -n 100; printf 'MARK-%s\\n' {mark}"
"""Numbers are many tokens and few bytes. The mark is at both ends, because agents that summarise cut long
results."""
LONG_STEPS, LONG_LINES = 8, 4000
SUBTASK = "Count the files in the current folder, and report their number. This is errand number {number} of two."
ERRAND = re.compile(r"This is errand number (\d) of two")
SUB_COMMAND = "ls | wc -l; printf 'SUBMARK-%s\\n' {number}"
SUMMED = ("compaction", "context_full")
SUMMARY_WANTED = re.compile(r"(?i)summar|compact|checkpoint|condense|continuation")
FRAMED = re.compile(r"<(summary|state_snapshot)>")
"""Agents want the summary in a frame, beside an analysis that they drop."""
SUMMED_UP = "What was done so far has printed these marks"
THOUGHT = "The next step is plain."
WRITTEN = 'Here it is.\n\nhello.py\n```python\nprint("hello")\n```\n'
"""For agents that have no tools and take files from the text."""
CHATTER = " ".join(
    f"Then comes step {number} of what I have in mind, about {number * 7} of it." for number in range(99)
)
"""Without repetition, because some agents stop a model that repeats itself."""


@dataclass
class FaultProgress:
    """One episode's fault, and what has happened so far. ``fired``: how often the fault has happened."""

    fault: str
    job: Job = HELLO
    calls: int = 0
    fired: int = 0
    finished: bool = False
    offered: bool = False
    """The agent has offered tools, so a call without any is not about the task."""
    errands: set[str] = field(default_factory=set)


Answer = Step | FailedStep
Fault = Callable[[PolicyInput, FaultProgress], Answer | None]
"""The faulty answer to this call; None if nothing goes wrong in it."""


class FaultPolicy:
    """A policy for many episodes, each with the fault that ``assign`` gave it."""

    def __init__(self) -> None:
        self._progress_of: dict[str, FaultProgress] = {}

    def assign(self, episode_id: str, fault: str, job: Job = HELLO) -> FaultProgress:
        progress = self._progress_of[episode_id] = FaultProgress(fault, job)
        return progress

    def __call__(self, call: PolicyInput) -> Answer:
        progress = self._progress_of.get(call.episode_id) or self.assign(call.episode_id, "ok")
        progress.offered |= bool(call.tools)
        wrong = FAULTS[progress.fault](call, progress)
        progress.calls += 1
        return wrong or right(call, progress)


def right(call: PolicyInput, progress: FaultProgress) -> Step:
    """The next correct step of this conversation."""
    if progress.fault in SUMMED and _summary_wanted(call):
        progress.fired += progress.fault == "compaction"
        return Step(text=_summary(call, progress.job.task))
    errand = ERRAND.search(_heard(call))
    if progress.job.task not in call.prompt and errand is not None:
        return _errand(call, errand[1])
    if not call.tools:
        progress.finished |= not progress.offered
        return Step(text="A greeting in Python" if progress.offered else WRITTEN)
    done, said = _progress(call), progress.job.said
    use = tool_use.shell(call.tools, _command(progress, done) or "")
    if _command(progress, done) is not None and use is not None:
        return Step(reasoning=THOUGHT, text=said[done] if done < len(said) else "I go on.", calls=(use,))
    progress.finished = True
    ending = tool_use.end(call)
    return Step(reasoning=THOUGHT, text="It is done.", calls=() if ending is None else (ending,))


def _errand(call: PolicyInput, number: str) -> Step:
    use = tool_use.shell(call.tools, SUB_COMMAND.format(number=number))
    if f"SUBMARK-{number}" not in _heard(call) and use is not None:
        return Step(reasoning=THOUGHT, text="I count.", calls=(use,))
    ending = tool_use.end(call)
    said = f"There is one file. SUBMARK-{number} is reported."
    return Step(text=said, calls=() if ending is None else (ending,))


def _command(progress: FaultProgress, done: int) -> str | None:
    if progress.fault != "compaction":
        commands = progress.job.commands
        return commands[done] if done < len(commands) else None
    if done >= LONG_STEPS:
        return None
    start = 100_000 + done * LONG_LINES
    return LONG_COMMAND.format(start=start, end=start + LONG_LINES, mark=done + 1)


def _progress(call: PolicyInput) -> int:
    """How many commands have been run, by the marks that they print."""
    shown = call.prompt.replace("SUBMARK", "")
    done = 0
    while f"MARK-{done + 1}" in shown:
        done += 1
    return done


def _summary_wanted(call: PolicyInput) -> bool:
    """Whether the last user message (without tools: or the system message) asks for a summary. A message that
    already brings one does not."""
    last = call.messages[-1].text if call.messages and call.messages[-1].role == "user" else ""
    if not call.tools:
        return SUMMARY_WANTED.search(f"{call.text_of('system')}\n{last}") is not None
    return SUMMARY_WANTED.search(last) is not None and SUMMED_UP not in last


def _summary(call: PolicyInput, task: str) -> str:
    marks = " ".join(f"MARK-{number + 1}" for number in range(_progress(call)))
    text = f"The task is: {task} {SUMMED_UP}: {marks or 'none'}."
    frame = FRAMED.search(call.prompt)
    if frame is None:
        return text
    return f"<analysis>\nThe numbers matter little.\n</analysis>\n\n<{frame[1]}>\n{text}\n</{frame[1]}>"


def _heard(call: PolicyInput) -> str:
    return "\n".join(message.text for message in call.messages if message.role != call.own_role)


def _nothing(call: PolicyInput, progress: FaultProgress) -> None:
    return None


def _refused_first(*errors: Callable[[], TurnstileError]) -> Fault:
    """Refuses the first calls of the episode before a token."""

    def fault(call: PolicyInput, progress: FaultProgress) -> Answer | None:
        return FailedStep(errors[progress.calls]()) if progress.calls < len(errors) else None

    return fault


def _once(after: int, say: Callable[[PolicyInput, FaultProgress], Answer | None]) -> Fault:
    """The answer of ``say``, once, in the main conversation, when ``after`` commands have been run."""

    def fault(call: PolicyInput, progress: FaultProgress) -> Answer | None:
        reached = _progress(call) == after if call.tools else not progress.offered
        if progress.fired or progress.job.task not in call.prompt or not reached:
            return None
        says = say(call, progress)
        progress.fired += says is not None
        return says

    return fault


def _cut(call: PolicyInput, progress: FaultProgress) -> Answer:
    error = EngineUnavailable("the engine was lost in the middle of a reply", retry_after_s=1.0)
    return FailedStep(error, Step(reasoning=THOUGHT, text=CHATTER), after=60)


def _malformed(call: PolicyInput, progress: FaultProgress) -> Answer:
    use = tool_use.shell(call.tools, "true")
    name = "bash" if use is None else use.tool
    return Step(text=f'I try.\n<tool_call>\n{{"name": "{name}", "arguments": {{"command": "ls \n</tool_call>')


def _bad_arguments(call: PolicyInput, progress: FaultProgress) -> Answer | None:
    use = tool_use.misused_shell(call.tools)
    return None if use is None else Step(reasoning=THOUGHT, text="I try.", calls=(use,))


def _empty(call: PolicyInput, progress: FaultProgress) -> Answer:
    return Step()


def _too_long(call: PolicyInput, progress: FaultProgress) -> Answer:
    return Step(reasoning=THOUGHT, text=CHATTER)


def _context_full(call: PolicyInput, progress: FaultProgress) -> Answer:
    return FailedStep(ContextOverflow("the prompt is longer than the model's context: shorten the history"))


def _subagents(call: PolicyInput, progress: FaultProgress) -> Answer | None:
    """Starts two sub-agents at once. If they work in the background, the main conversation waits for them."""
    if progress.job.task not in call.prompt:
        return None
    if progress.fired == 0:
        uses: list[ToolUse] = []
        for number in (1, 2):
            use = tool_use.subagent(call, SUBTASK.format(number=number))
            uses += [] if use is None else [use]
        progress.fired += bool(uses)
        return Step(reasoning=THOUGHT, text="Two errands first.", calls=tuple(uses)) if uses else None
    if progress.fired < 3 and call.tools and _heard(call).count("SUBMARK-") < 2:
        use = tool_use.waiting(call)
        progress.fired += 1
        return None if use is None else Step(text="I wait.", calls=(use,))
    return None


FAULTS: Mapping[str, Fault] = {
    "ok": _nothing,
    "rate_limit": _refused_first(lambda: TooManyCalls("the server is busy", retry_after_s=1.0)),
    "server_error": _refused_first(
        lambda: EngineProtocolError("the engine's answer cannot be recorded"),
        lambda: EngineUnavailable("the engine cannot be reached", retry_after_s=1.0),
    ),
    "internal_error": _refused_first(lambda: TurnstileError("the gate failed; the server's log says why")),
    "cut": _once(1, _cut),
    "malformed": _once(0, _malformed),
    "bad_arguments": _once(0, _bad_arguments),
    "empty": _once(1, _empty),
    "too_long": _once(1, _too_long),
    "context_full": _once(1, _context_full),
    "subagent": _subagents,
    "compaction": _nothing,
}

MAX_COMPLETION_TOKENS = {"too_long": 600}
"""Token limit of one reply, by fault; ``ENOUGH_TOKENS`` for the others."""
ENOUGH_TOKENS = 8192
