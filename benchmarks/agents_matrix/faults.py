"""What the scripted model does to an agent: one small task, and one thing that goes wrong on the way.

The task is two shell commands. What has been done is read off the prompt: each command prints a mark that is not
in its own text, so a history that was rewritten, summed up or handed to a sub-agent still says how far it is. Each
episode's fault happens at one place and is over; from then on all goes well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agents_matrix import hands
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
"""Every conversation that holds it is about the task itself; a sub-agent's holds its own."""

COMMANDS = (
    "printf '%s\\n' 'print(\"hello\")' > hello.py; python3 hello.py; printf 'MARK-%s\\n' 1",
    "cat hello.py; printf 'MARK-%s\\n' 2",
)
LONG_COMMAND = "printf 'MARK-%s\\n' {mark}; seq {start} {end} | xargs -n 100; printf 'MARK-%s\\n' {mark}"
"""Numbers are many tokens and few bytes. The mark stands at both ends: agents that sum up cut long results."""
LONG_STEPS, LONG_LINES = 8, 4000
SUBTASK = "Count the files in the current folder, and report their number. This is errand number {number} of two."
ERRAND = re.compile(r"This is errand number (\d) of two")
SUB_COMMAND = "ls | wc -l; printf 'SUBMARK-%s\\n' {number}"
SUMMED = ("compaction", "context_full")
SUMMARY_WANTED = re.compile(r"(?i)summar|compact|checkpoint|condense|continuation")
FRAMED = re.compile(r"<(summary|state_snapshot)>")
"""Agents ask for the summary itself in a frame, beside an analysis that they throw away."""
SUMMED_UP = "What was done so far has printed these marks"
THOUGHT = "The next step is plain."
WRITTEN = 'Here it is.\n\nhello.py\n```python\nprint("hello")\n```\n'
"""For agents that have no tools and take files from the text."""
CHATTER = " ".join(
    f"Then comes step {number} of what I have in mind, about {number * 7} of it." for number in range(99)
)
"""Without repetition: some agents break off a model that repeats itself."""


@dataclass
class Act:
    """One episode: what has happened in it so far."""

    fault: str
    calls: int = 0
    fired: int = 0
    finished: bool = False
    offered: bool = False
    """The agent has tools: a call without any is not about the task, then."""
    errands: set[str] = field(default_factory=set)


Says = Step | FailedStep
Fault = Callable[[PolicyInput, Act], Says | None]
"""What goes wrong in this call; None: nothing."""


class Stagehand:
    """A policy for many episodes, each with the fault that it was given by ``cast``."""

    def __init__(self) -> None:
        self._acts: dict[str, Act] = {}

    def cast(self, episode_id: str, fault: str) -> Act:
        act = self._acts[episode_id] = Act(fault)
        return act

    def __call__(self, scene: PolicyInput) -> Says:
        act = self._acts.get(scene.episode_id) or self.cast(scene.episode_id, "ok")
        act.offered |= bool(scene.tools)
        wrong = FAULTS[act.fault](scene, act)
        act.calls += 1
        return wrong or right(scene, act)


def right(scene: PolicyInput, act: Act) -> Step:
    """The next step of whatever this conversation is about."""
    if act.fault in SUMMED and _summary_wanted(scene):
        act.fired += act.fault == "compaction"
        return Step(text=_summary(scene))
    errand = ERRAND.search(_heard(scene))
    if TASK not in scene.prompt and errand is not None:
        return _errand(scene, errand[1])
    if not scene.tools:
        act.finished |= not act.offered
        return Step(text="A greeting in Python" if act.offered else WRITTEN)
    use = hands.shell(scene.tools, _command(act, _progress(scene)) or "")
    if _command(act, _progress(scene)) is not None and use is not None:
        return Step(reasoning=THOUGHT, text="I go on.", calls=(use,))
    act.finished = True
    ending = hands.end(scene)
    return Step(reasoning=THOUGHT, text="It is done.", calls=() if ending is None else (ending,))


def _errand(scene: PolicyInput, number: str) -> Step:
    use = hands.shell(scene.tools, SUB_COMMAND.format(number=number))
    if f"SUBMARK-{number}" not in _heard(scene) and use is not None:
        return Step(reasoning=THOUGHT, text="I count.", calls=(use,))
    ending = hands.end(scene)
    said = f"There is one file. SUBMARK-{number} is reported."
    return Step(text=said, calls=() if ending is None else (ending,))


def _command(act: Act, done: int) -> str | None:
    if act.fault != "compaction":
        return COMMANDS[done] if done < len(COMMANDS) else None
    if done >= LONG_STEPS:
        return None
    start = 100_000 + done * LONG_LINES
    return LONG_COMMAND.format(start=start, end=start + LONG_LINES, mark=done + 1)


def _progress(scene: PolicyInput) -> int:
    """How many commands have been run, by the marks they print."""
    shown = scene.prompt.replace("SUBMARK", "")
    done = 0
    while f"MARK-{done + 1}" in shown:
        done += 1
    return done


def _summary_wanted(scene: PolicyInput) -> bool:
    """Whether the last words, or those to a model without tools, ask for a summary. One that is at hand to go on
    with is not asked for."""
    last = scene.messages[-1].text if scene.messages and scene.messages[-1].role == "user" else ""
    if not scene.tools:
        return SUMMARY_WANTED.search(f"{scene.text_of('system')}\n{last}") is not None
    return SUMMARY_WANTED.search(last) is not None and SUMMED_UP not in last


def _summary(scene: PolicyInput) -> str:
    marks = " ".join(f"MARK-{number + 1}" for number in range(_progress(scene)))
    text = f"The task is: {TASK} {SUMMED_UP}: {marks or 'none'}."
    frame = FRAMED.search(scene.prompt)
    if frame is None:
        return text
    return f"<analysis>\nThe numbers matter little.\n</analysis>\n\n<{frame[1]}>\n{text}\n</{frame[1]}>"


def _heard(scene: PolicyInput) -> str:
    return "\n".join(message.text for message in scene.messages if message.role != scene.own_role)


def _nothing(scene: PolicyInput, act: Act) -> None:
    return None


def _refused_first(*errors: Callable[[], TurnstileError]) -> Fault:
    """The first calls of the episode are refused before a token."""

    def fault(scene: PolicyInput, act: Act) -> Says | None:
        return FailedStep(errors[act.calls]()) if act.calls < len(errors) else None

    return fault


def _once(after: int, say: Callable[[PolicyInput, Act], Says | None]) -> Fault:
    """What ``say`` says, in the main conversation, as soon as ``after`` commands have been run; once."""

    def fault(scene: PolicyInput, act: Act) -> Says | None:
        reached = _progress(scene) == after if scene.tools else not act.offered
        if act.fired or TASK not in scene.prompt or not reached:
            return None
        says = say(scene, act)
        act.fired += says is not None
        return says

    return fault


def _cut(scene: PolicyInput, act: Act) -> Says:
    error = EngineUnavailable("the engine was lost in the middle of a reply", retry_after_s=1.0)
    return FailedStep(error, Step(reasoning=THOUGHT, text=CHATTER), after=60)


def _malformed(scene: PolicyInput, act: Act) -> Says:
    use = hands.shell(scene.tools, "true")
    name = "bash" if use is None else use.tool
    return Step(text=f'I try.\n<tool_call>\n{{"name": "{name}", "arguments": {{"command": "ls \n</tool_call>')


def _bad_arguments(scene: PolicyInput, act: Act) -> Says | None:
    use = hands.misused_shell(scene.tools)
    return None if use is None else Step(reasoning=THOUGHT, text="I try.", calls=(use,))


def _empty(scene: PolicyInput, act: Act) -> Says:
    return Step()


def _too_long(scene: PolicyInput, act: Act) -> Says:
    return Step(reasoning=THOUGHT, text=CHATTER)


def _context_full(scene: PolicyInput, act: Act) -> Says:
    return FailedStep(ContextOverflow("the prompt is longer than the model's context: shorten the history"))


def _subagents(scene: PolicyInput, act: Act) -> Says | None:
    """Two at once; where they work in the background, the main conversation waits for them."""
    if TASK not in scene.prompt:
        return None
    if act.fired == 0:
        uses: list[ToolUse] = []
        for number in (1, 2):
            use = hands.subagent(scene, SUBTASK.format(number=number))
            uses += [] if use is None else [use]
        act.fired += bool(uses)
        return Step(reasoning=THOUGHT, text="Two errands first.", calls=tuple(uses)) if uses else None
    if act.fired < 3 and scene.tools and _heard(scene).count("SUBMARK-") < 2:
        use = hands.waiting(scene)
        act.fired += 1
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
"""Tokens of one reply, where the fault is that there are no more; elsewhere ``ENOUGH_TOKENS``."""
ENOUGH_TOKENS = 8192
