"""Inspect tasks and verifiers tasksets with parts that an episode lacks, or that are made anew each time."""

from __future__ import annotations

INSPECT_CHAINS = """\
import random

from inspect_ai import Epochs, Task, task
from inspect_ai.agent import agent, as_solver
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, ContentImage, GenerateConfig
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import (
    chain, chain_of_thought, generate, multiple_choice, prompt_template, self_critique, solver, system_message,
    use_tools, user_message,
)
from inspect_ai.tool import tool

SECRET = "You are the customer. Never say that your code is 4711."


@tool
def cancel_flight():
    async def execute(code: str):
        "Cancel a flight."
        return "done"

    return execute


@agent
def customer_and_agent():
    async def execute(state):
        return state

    return execute


@solver
def seeds_the_store():
    async def solve(state, generate):
        state.store.set("poison", True)
        return state

    return solve


@solver
def generate_for_myself():
    async def solve(state, generate):
        return await generate(state)

    return solve


def one(given="Cancel it.", **fields):
    return [Sample(id="a", input=given, target="4", **fields)]


def plain(**fields):
    return Task(**{"dataset": one(), "solver": generate(), "scorer": includes(), **fields})


@task
def airline():
    return plain(dataset=one(SECRET), solver=as_solver(customer_and_agent()))


@task
def threat():
    return plain(solver=[system_message("Be safe."), use_tools(cancel_flight()), generate()])


@task
def prepared():
    return plain(setup=seeds_the_store())


@task
def own_generate():
    return plain(solver=generate_for_myself())


@task
def twice():
    return plain(solver=[generate(), user_message("Are you sure?"), generate()])


@task
def after():
    return plain(solver=[generate(), user_message("Thanks.")])


@task
def never():
    return plain(solver=system_message("x"))


@task
def criticised():
    return plain(solver=[generate(), self_critique()])


@task
def configured():
    return plain(config=GenerateConfig(system_message="Say 4.", temperature=0.5))


@task
def stopped():
    return plain(solver=generate(stop_seqs=["."], max_tokens=5))


@task
def limited():
    return plain(token_limit=50)


@task
def cleaned():
    async def cleanup(state):
        return None

    return plain(cleanup=cleanup)


@task
def approved():
    return plain(approval="human")


@task
def prefilled():
    return plain(dataset=one([ChatMessageUser(content="2+2?"), ChatMessageAssistant(content="It is")]))


@task
def pictured():
    return plain(dataset=one([ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])]))


@task
def no_choices():
    return plain(solver=multiple_choice(), scorer=choice())


@task
def shuffled_letters():
    return plain(dataset=one(choices=["1", "4"]), solver=multiple_choice(shuffle=True), scorer=choice())


@task
def other_box():
    return plain(dataset=one(files={"victim:/x": "y"}), sandbox="local")


@task
def nobodys_setup():
    return plain(dataset=one(setup="#! \\necho 1"), sandbox="local")


@task
def set_up():
    scripts = {
        "sh": "echo $0 > sh.txt",
        "python": "#!/usr/bin/env python3\\nopen('python.txt', 'w').write('made')",
        "bash": "#!/bin/bash -e\\na=(1 2)\\necho ${#a[@]} > bash.txt\\nfalse\\necho 3 > bash.txt\\n",
    }
    samples = [Sample(id=name, input="x", setup=script) for name, script in scripts.items()]
    return plain(dataset=samples, sandbox="local")


@task
def linked_file():
    return plain(dataset=one(files={"x": "https://example.org/x"}), sandbox="local")


@task
def binary_file():
    return plain(dataset=one(files={"x": "blob"}), sandbox="local")


@task
def composed():
    return plain(sandbox=("docker", "compose.yaml"))


@task
def beside():
    return plain(sandbox="docker")


@task
def formatted():
    messages = [ChatMessageSystem(content="One."), ChatMessageUser(content="2+2?")]
    return Task(
        dataset=[Sample(id="a", input=messages, target="4", metadata={"tone": "kind"})],
        setup=system_message("Two, {tone}."),
        solver=chain(prompt_template("prompt.txt", n=3), chain_of_thought("{prompt} Think."), generate(top_k=9)),
        scorer=includes(),
        epochs=Epochs(4, "max"),
        message_limit=20,
        time_limit=77,
    )


@task
def lettered():
    samples = [Sample(id="even", input="Which is even?", choices=["1", "2", "3"], target="B")]
    return plain(dataset=samples, solver=[system_message("Quiz."), multiple_choice(cot=True)], scorer=choice())


def numbered(count):
    return [Sample(input=f"Say {n}.", target=str(n), metadata={"of": {"b", "a", "c"}}) for n in range(count)]


@task
def shuffled(named: bool = False):
    samples = numbered(30)
    if named:
        samples = [sample.model_copy(update={"id": f"n{sample.target}"}) for sample in samples]
    random.shuffle(samples)
    return plain(dataset=MemoryDataset(samples))


@task
def reshuffled_choices():
    letters = ["0", "1", "2", "3", "4", "5"]
    data = MemoryDataset([Sample(id=n, input="Which is 0?", choices=letters, target="A") for n in range(9)])
    data.shuffle_choices()
    return plain(dataset=data, solver=multiple_choice(), scorer=choice())


@task
def twins():
    return plain(dataset=[*numbered(2), *numbered(1)])
"""

MORE_TASKSETS = """\
import random

import verifiers.v1 as vf


class Plain(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.prompt)


class Stops(Plain):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


class Staged(Plain):
    async def stage_verifier(self, trace, runtime):
        return None


class Config(vf.TasksetConfig):
    how: str = "shuffles"


class Many(vf.Taskset[vf.Task, Config]):
    @classmethod
    def toolsets(cls, config):
        return ["a server"] if config.how == "tools" else []

    def load(self):
        how, kind = self.config.how, Plain
        data = [{"prompt": f"Say {n}."} for n in range(30)]
        if how == "shuffles":
            random.shuffle(data)
        elif how == "draws":
            data = [{"id": str(n), "prompt": f"Say {random.random()}."} for n in range(5)]
        elif how == "turns":
            said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It"}]
            data = [{"id": "a", "prompt": said}]
        elif how == "network":
            data = [{"id": "a", "prompt": "x", "network_allow": ["example.org"], "agent_user": "nobody"}]
        elif how in ("stops", "staged"):
            data, kind = [{"id": "a", "prompt": "x"}], {"stops": Stops, "staged": Staged}[how]
        for one in data:
            yield kind(vf.TaskData.model_validate(one), self.config.task)


__all__ = ["Many"]
"""

TASKSET_WITH_ENV = """\
import verifiers.v1 as vf
from many import Many


class Customer(vf.Env[vf.EnvConfig]):
    async def run(self, task, agents):
        raise NotImplementedError


__all__ = ["Customer", "Many"]
"""
