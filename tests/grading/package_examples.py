"""A verifiers taskset and Inspect tasks, as their users write them, and the Pythons that have the packages."""

from __future__ import annotations

import os
from pathlib import Path

TASKSET = """\
from collections.abc import Iterable

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TasksetConfig):
    count: int = 3


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.8)
    async def correct(self, task, trace) -> float:
        print("a package may print whatever it likes")
        return float(trace.last_reply.strip() == task.answer)

    @vf.reward(weight=0.2)
    async def short(self, trace) -> float:
        return float(0 < len(trace.last_reply) < 10)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterable[SumTask]:
        for a in range(self.config.count):
            yield SumTask(SumData(id=f"sum-{a}", prompt=f"What is {a}+2?", answer=str(a + 2)), self.config.task)


__all__ = ["SumTaskset"]
"""

BOXED_TASKSET = """\
from collections.abc import Iterable

import verifiers.v1 as vf


class FileTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def prints_42(self, runtime) -> float:
        await runtime.write("check.sh", b"test \\"$(sh out.sh)\\" = 42")
        done = await runtime.run(["sh", "check.sh"], {})
        text = await runtime.read("out.sh")
        return float(done.exit_code == 0 and b"42" in text)


class FileTaskset(vf.Taskset[FileTask]):
    def load(self) -> Iterable[FileTask]:
        yield FileTask(vf.TaskData(id="prints", prompt="Write out.sh, which prints 42."), self.config.task)


__all__ = ["FileTaskset"]
"""

UNPLAYABLE_TASKSET = """\
import verifiers.v1 as vf


class SetUp(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime):
        await runtime.run(["true"], {})

    @vf.reward
    async def one(self) -> float:
        return 1.0


class SetUpTaskset(vf.Taskset[SetUp]):
    def load(self):
        yield SetUp(vf.TaskData(id="a", prompt="x"), self.config.task)
        yield SetUp(vf.TaskData(id="b"), self.config.task)


__all__ = ["SetUpTaskset"]
"""

INSPECT_TASKS = """\
import time

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, choice, includes, scorer
from inspect_ai.solver import generate, multiple_choice
from inspect_ai.util import sandbox


@task
def capitals(extra: int = 0):
    france = Sample(id="fr", input="Capital of France?", target="Paris")
    samples = [france, Sample(input="Of Peru?", target="Lima")]
    more = [Sample(id=f"more {n}", input=f"Number {n}?", target=str(n)) for n in range(extra)]
    return Task(dataset=samples + more, solver=generate(), scorer=includes())


@task
def letters():
    one = Sample(id="even", input="Which is even?", choices=["1", "2", "3"], target="B")
    return Task(dataset=[one], solver=multiple_choice(), scorer=choice())


@scorer(metrics=[accuracy()])
def file_says():
    async def score(state, target):
        text = await sandbox().read_file("out.txt")
        done = await sandbox().exec(["cat", "out.txt"])
        return Score(value="C" if text.strip() == target.text and done.stdout == text else "I", answer=text)

    return score


@task
def files():
    one = Sample(id="hello", input="Copy in.txt to out.txt", target="hello", files={"in.txt": "hello\\n"})
    return Task(dataset=[one], solver=generate(), scorer=file_says(), sandbox="local")


@scorer(metrics=[accuracy()])
def odd(how: str):
    async def score(state, target):
        if how == "nan":
            return Score(value=float("nan"), explanation="nobody looked")
        if how == "sleeps":
            time.sleep(60)
        if how == "dies":
            import os
            os._exit(3)
        raise RuntimeError("the scorer is broken")

    return score


@task
def odd_scores(how: str = "raises"):
    return Task(dataset=[Sample(id="x", input="?", target="y")], solver=generate(), scorer=odd(how))
"""


def pythons() -> dict[str, Path]:
    """By kind; a package that no variable names is not there."""
    named = {kind: os.environ.get(f"TURNSTILE_{kind.upper()}_PYTHON") for kind in ("verifiers", "inspect")}
    return {kind: Path(path) for kind, path in named.items() if path}
