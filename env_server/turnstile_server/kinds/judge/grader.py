"""The grader ``judge``: a component from the votes of a language model.

What must hold: a vote is a verdict or there is no component at all (GraderUnavailable), so a judge that is down,
slow or talks nonsense makes no 0; votes that were given are not asked for again by a retry; what the judge says
goes into the trainer's evidence and nowhere else.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

import anyio.to_thread

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.verdict import printable
from turnstile_server.grading.work_files import WorkFiles, WorkReader
from turnstile_server.kinds.judge.judges import Judge, Judges, JudgeSpending
from turnstile_server.kinds.judge.options import JudgeOptions
from turnstile_server.kinds.judge.prompt import JudgePrompt, ShownText, build_prompt, cache_key
from turnstile_server.kinds.judge.verdict import MAX_REASON_CHARS, read_verdict, reply_rule
from turnstile_server.tasks.model import Task

NOT_SUBMITTED = "(nothing was submitted)"


class JudgeGrader(ComponentGrader):
    """Made for one grading: it keeps the votes that it has."""

    Options = JudgeOptions

    def __init__(self, tools: GradingTools, name: str, options: JudgeOptions) -> None:
        self._tools = tools
        self._name = name
        self._options = options
        self._files: WorkFiles | None = None
        self._votes: dict[tuple[int, bool], dict[str, Any]] = {}

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        options = self._options
        tools = self._tools
        judges = tools.of_server.get(Judges, lambda: Judges(tools.settings, tools.data_dir))
        judge = judges.get(options.judge)
        if judge is None:
            raise TaskFailed(f"grading.{self._name}.judge: the server has no judge {options.judge!r}")
        if work.answer is None and not options.files:
            return Component(
                0.0, {self._name: {"note": "nothing was submitted"}}, (f"{self._name}: nothing was submitted",)
            )
        if self._files is None:
            self._files = await WorkReader(self._tools).read(
                task, work, options.files, self._name, start=options.files_as == "diff"
            )
        if self._files.spoiled is not None:
            return self._files.spoiled
        orders = (False, True) if options.compare and options.swap else (False,)
        # In a thread: a diff of files takes seconds where their lines repeat.
        make = partial(self._prompt, task, work, self._files, judge)
        prompts = {swapped: await anyio.to_thread.run_sync(make, swapped) for swapped in orders}
        for vote in range(options.votes):
            for swapped, prompt in prompts.items():
                if (vote, swapped) not in self._votes:
                    self._votes[vote, swapped] = await self._vote(judge, prompt, vote, swapped)
        return self._component(judge, prompts[False])

    async def _vote(self, judge: Judge, prompt: JudgePrompt, vote: int, swapped: bool) -> dict[str, Any]:
        settings = judge.settings
        about = {
            "url": settings.url,
            "model": settings.model,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "extra": settings.extra_body,
            "vote": vote,
        }
        read = partial(read_verdict, options=self._options, swapped=swapped)

        def check(reply: str) -> None:
            read(reply)

        key, spent = cache_key(prompt.digest, about), self._tools.of_grading.get(JudgeSpending, JudgeSpending)
        reply, cached = await judge.ask(key, prompt.messages, spent, check)
        return {
            "value": read(reply.text),
            "reply": reply.text[:MAX_REASON_CHARS],
            "model": reply.model,
            "cached": cached,
            "tokens": reply.tokens,
            **({"swapped": swapped} if self._options.compare else {}),
        }

    def _component(self, judge: Judge, prompt: JudgePrompt) -> Component:
        options = self._options
        values = [
            fmean(found["value"] for (of, _), found in self._votes.items() if of == vote)
            for vote in range(options.votes)
        ]
        value = fmean(values)
        if options.combine == "majority" and options.votes > 1:
            value = float(value > 0.5)
        evidence = {
            "judge": options.judge,
            "model": judge.settings.model,
            "temperature": judge.settings.temperature,
            "prompt": prompt.digest,
            "votes": [self._votes[key] for key in sorted(self._votes)],
        }
        shown = printable(f"{self._name}: the judge gives {value:g}: {self._votes[0, False]['reply']}")
        return Component(value, {self._name: evidence}, () if value == 1.0 else (shown,))

    def _prompt(self, task: Task, work: Work, files: WorkFiles, judge: Judge, swapped: bool) -> JudgePrompt:
        options = self._options
        texts = [ShownText("the instruction that the work was given", task.instruction)]
        texts = texts if "instruction" in options.show else []
        of_work = [ShownText("answer", NOT_SUBMITTED if work.answer is None else work.answer)]
        of_work = of_work if "answer" in options.show else []
        for path in options.files:
            text = files.diff(path) if options.files_as == "diff" else files.work[path].text
            of_work.append(ShownText(f"file {path}", text))
        reference = [] if options.reference is None else [ShownText("reference", options.reference)]
        question = options.question
        if options.compare:
            first, second = (reference, of_work) if swapped else (of_work, reference)
            texts += [ShownText("first candidate", _joined(first)), ShownText("second candidate", _joined(second))]
            question += "\n\nTwo candidates are shown. Say which one is better, by the question above."
        else:
            texts += [*([ShownText("a right answer", options.reference)] if options.reference else []), *of_work]
        return build_prompt(question, texts, reply_rule(options), judge.settings.max_text_chars)


def _joined(texts: list[ShownText]) -> str:
    return texts[0].text if len(texts) == 1 else "\n\n".join(f"{text.name}:\n{text.text}" for text in texts)
