"""Tasks of a verifiers taskset (0.4), and their rewards. Runs in the Python that has verifiers.

``list NAME JSON`` writes each task; ``serve`` scores: a request has ``name``, ``config``, ``digest`` (or
``index``) of the task, ``answer``, ``sandbox`` (whether there is one, with the work in it) and ``workdir``. The
package's own ``Task.score`` runs the rewards, metrics and judges; its runtime is the server's sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../integrations/programs"))

import verifiers.v1 as vf
from program_lines import Line, digest_of, list_tasks, load_module, serve, steady
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import _plugin_class, import_taskset


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
        self._known: dict[str, tuple[Iterator[vf.Task], list[vf.Task], dict[str, vf.Task]]] = {}

    def open(self, name: str, config: dict[str, Any]) -> vf.Taskset:
        kind = _plugin_class(module_of(name), vf.Taskset, "taskset")
        config_type = concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        return kind(config_type.model_validate({"id": os.path.basename(name).removesuffix(".py"), **config}))

    def task(self, request: dict[str, Any]) -> vf.Task:
        """The task that is asked for. Raises LookupError."""
        name, config, digest = request["name"], request["config"], request["digest"]
        key = json.dumps([name, config], sort_keys=True)
        if key not in self._known:
            self._known[key] = (iter(self.open(name, config)), [], {})
        rest, read, places = self._known[key]
        while digest not in places if digest is not None else len(read) <= request["index"]:
            found = next(rest, None)
            if found is None:
                raise LookupError(
                    "the taskset has no such task any more: its data, or what draws them, is not what was listed"
                )
            read.append(found)
            places.setdefault(task_digest(found), found)
        return places[digest] if digest is not None else read[request["index"]]


def module_of(name: str) -> ModuleType:
    return load_module(name) if name.endswith(".py") else import_taskset(name)


def task_digest(task: vf.Task) -> str:
    """Of all that the task says, whatever its place in the taskset."""
    return digest_of(task.data.model_dump(exclude={"idx"}))


def refusals(name: str, taskset: vf.Taskset) -> Iterator[str]:
    """Reasons why no task of the taskset can be played."""
    if not taskset.bounded:
        yield "the taskset is infinite: bound it by an option of its own"
    if type(taskset).toolsets(taskset.config):
        yield "the taskset has tool servers of its own, which an episode here does not start"
    exported = [vars(module_of(name)).get(own) for own in module_of(name).__all__]
    for own in exported:
        for base, what in ((vf.Env, "environment"), (vf.Harness, "harness")):
            if isinstance(own, type) and issubclass(own, base):
                yield (
                    f"its package has its own {what} ({own.__name__}), which may have users, tools or turns that "
                    "an episode here does not have. Where an agent alone can play the tasks, export the taskset "
                    "from a file of your own without it"
                )


_OWN = (
    (("setup", "finalize"), "prepares or finishes its own box"),
    (("stage_verifier", "runtime_env"), "prepares the box of its grading, or that of its agent"),
)
"""Methods whose work would be left out, and what they do."""

_DATA = {
    "skills": [],
    "agent_user": None,
    "network_allow": ["*"],
    "network_block": [],
    "artifacts": [],
}
"""Fields of a task's data that an episode here does not have, with what they are where nobody sets them."""


def refused(task: vf.Task, rewards: dict[str, float]) -> str | None:
    """The reason why the task cannot be played."""
    data = task.data
    if type(task).toolsets(task.config):
        return "it has tool servers of its own, which an episode here does not start"
    for names, does in _OWN:
        found = [own for own in names if getattr(type(task), own) is not getattr(vf.Task, own)]
        if found:
            return f"it {does} ({', '.join(found)}), which an episode here does not have"
    hooks = [*discover_decorated(task, "intercept"), *task.hooks("stop")]
    if hooks:
        named = ", ".join(hook.__name__ for hook in hooks)
        return f"it acts between the agent's turns ({named}), and nothing here does"
    fields = [field for field, plain in _DATA.items() if vars(data)[field] != plain]
    if data.resources.gpu:
        fields.append("resources.gpu")
    if fields:
        return f"it sets {', '.join(fields)}, which an episode here does not have"
    for message in [] if isinstance(data.prompt, str) else data.prompt or []:
        if message.role not in ("system", "user"):
            return f"its prompt has a message of role {message.role}, and an agent gets one text"
        if not isinstance(message.content, str) and any(part.type != "text" for part in message.content):
            return "its prompt has more than text, and an agent gets text alone"
    return None if rewards else "it has no reward"


def described(task: vf.Task, index: int) -> dict[str, Any]:
    """Description of a task for the server: the task, or a problem."""
    data = task.data
    whose = f"task {data.id or data.name or index}"
    prompt = data.prompt_text
    if not prompt:
        return {"problem": f"{whose}: it has no prompt: its user opens the conversation"}
    hooks = [*task.hooks("reward"), *task.hooks("metric")]
    needs = any(
        (given := inspect.signature(hook).parameters.get("runtime")) is not None and given.default is given.empty
        for hook in hooks
    )
    rewards = {hook.__name__: float(getattr(hook, "_vf_weight", 1.0)) for hook in task.hooks("reward")}
    rewards |= {judge.reward_name: float(judge.config.weight) for judge in task.plugged_judges()}
    reason = refused(task, rewards)
    if reason is not None:
        return {"problem": f"{whose}: {reason}"}
    text = f"{data.system_prompt}\n\n{prompt}" if data.system_prompt else prompt
    return {
        "task": {
            "index": index,
            "digest": task_digest(task),
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
    task = tasksets.task(request)
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
            wrong = [{"problem": text} for text in refusals(name, taskset)]
            yield from wrong or (described(task, index) for index, task in enumerate(taskset))

        return list_tasks(line, lambda: steady(tasks))
    score = lambda request: scored(line, tasksets, request)  # noqa: E731
    return serve(line, version("verifiers"), score, lambda function, request: asyncio.run(function(request)))


if __name__ == "__main__":
    sys.exit(main())
