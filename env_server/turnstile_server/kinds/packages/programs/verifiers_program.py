"""Tasks of a verifiers taskset (0.4), and their rewards. Runs in the Python that has verifiers.

``list NAME JSON`` writes each task; ``serve`` scores: a request has ``name``, ``config``, ``index``, ``answer``,
``sandbox`` (whether there is one, with the work in it) and ``workdir``. The package's own ``Task.score`` runs the
rewards, metrics and judges; its runtime is the server's sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../integrations/programs"))

import verifiers.v1 as vf
from program_lines import Line, list_tasks, load_module, serve
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime
from verifiers.v1.state import state_cls
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import _plugin_class, taskset_class


class ServerRuntime(Runtime):
    """The sandbox in which the server has the work."""

    def __init__(self, line: Line, workdir: str) -> None:
        super().__init__("turnstile")
        self._line = line
        self._workdir = workdir
        self.info = BaseRuntimeInfo(id="turnstile")

    @property
    def type(self) -> str:
        return "turnstile"

    async def start(self) -> None:
        """The server has started it."""

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        said = self._line.ask("exec", argv=argv, env=self.process_env(env))
        return ProgramResult(said["exit_code"], said["stdout"], said["stderr"])

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        said = self._line.ask("read", path=os.path.join(self._workdir, path))
        return base64.b64decode(said["data"])[:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        self._line.ask("write", path=os.path.join(self._workdir, path), data=base64.b64encode(data).decode())


class Tasksets:
    """Those that were asked for, each with the tasks that were read of it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Iterator[vf.Task], list[vf.Task]]] = {}

    def open(self, name: str, config: dict[str, Any]) -> vf.Taskset:
        kind = (
            _plugin_class(load_module(name), vf.Taskset, "taskset")
            if name.endswith(".py")
            else taskset_class(name)
        )
        config_type = concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        return kind(config_type.model_validate({"id": os.path.basename(name).removesuffix(".py"), **config}))

    def task(self, name: str, config: dict[str, Any], index: int) -> vf.Task:
        key = json.dumps([name, config], sort_keys=True)
        if key not in self._known:
            self._known[key] = (iter(self.open(name, config)), [])
        rest, read = self._known[key]
        read.extend(itertools.islice(rest, max(0, index + 1 - len(read))))
        if index >= len(read):
            raise IndexError(f"the taskset has no task {index} any more")
        return read[index]


def described(task: vf.Task, index: int) -> dict[str, Any]:
    """Description of a task for the server: the task, or a problem."""
    data = task.data
    prompt = data.prompt_text
    if not prompt:
        return {"problem": f"task {index}: it has no prompt: its user opens the conversation"}
    hooks = [*task.hooks("reward"), *task.hooks("metric")]
    needs = any(
        (given := inspect.signature(hook).parameters.get("runtime")) is not None and given.default is given.empty
        for hook in hooks
    )
    rewards = {hook.__name__: float(getattr(hook, "_vf_weight", 1.0)) for hook in task.hooks("reward")}
    rewards |= {judge.reward_name: float(judge.config.weight) for judge in task.plugged_judges()}
    toolsets = type(task).toolsets(task.config)
    refused = None
    if toolsets:
        refused = "it has tool servers of its own, which an episode here does not start"
    elif type(task).setup is not vf.Task.setup or type(task).finalize is not vf.Task.finalize:
        refused = "it prepares or finishes its own box (setup, finalize), which an episode here does not have"
    elif not rewards:
        refused = "it has no reward"
    if refused is not None:
        return {"problem": f"task {data.id or data.name or index}: {refused}"}
    text = f"{data.system_prompt}\n\n{prompt}" if data.system_prompt else prompt
    return {
        "task": {
            "index": index,
            "id": data.id or data.name,
            "instruction": text,
            "image": data.image,
            "workdir": data.workdir,
            "timeout_s": data.timeout.agent,
            "memory_mb": None if data.resources.memory is None else round(data.resources.memory * 1000),
            "cpus": data.resources.cpu,
            "needs_work": needs,
            "rewards": rewards,
        }
    }


async def scored(line: Line, tasksets: Tasksets, request: dict[str, Any]) -> dict[str, Any]:
    task = tasksets.task(request["name"], request["config"], request["index"])
    data = task.data
    nodes = []
    if data.system_prompt:
        nodes.append(vf.MessageNode(message=vf.SystemMessage(content=data.system_prompt)))
    nodes.append(
        vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=vf.UserMessage(content=data.prompt_text))
    )
    if request["answer"] is not None:
        reply = vf.AssistantMessage(content=request["answer"])
        nodes.append(vf.MessageNode(parent=len(nodes) - 1, message=reply, sampled=True))
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )
    runtime = ServerRuntime(line, request["workdir"]) if request["sandbox"] else None
    await task.score(trace, runtime)
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise ValueError(f"no score for {', '.join(unscored)}")
    return {
        "components": {name: reward.value for name, reward in trace.rewards.items()},
        "evidence": {"metrics": trace.metrics, "info": trace.info},
    }


def main() -> int:
    line = Line()
    tasksets = Tasksets()
    if sys.argv[1] == "list":
        name, config = sys.argv[2], json.loads(sys.argv[3])

        def tasks() -> Iterator[dict[str, Any]]:
            taskset = tasksets.open(name, config)
            if not taskset.bounded:
                yield {"problem": "the taskset is infinite: bound it by an option of its own"}
                return
            for index, task in enumerate(taskset):
                yield described(task, index)

        return list_tasks(line, tasks)
    score = lambda request: scored(line, tasksets, request)  # noqa: E731
    return serve(line, version("verifiers"), score, lambda function, request: asyncio.run(function(request)))


if __name__ == "__main__":
    sys.exit(main())
