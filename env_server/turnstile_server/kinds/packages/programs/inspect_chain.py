"""An Inspect task's solvers around the agent: they run as written, and the agent's answer is what they generate.

What must hold: a task is played only where nothing of it is dropped. So its chain is formatting, then one
generation (``PROMPTING``, ``GENERATING``); a solver that nobody here knows may have tools, a simulated user or a
box of its own, and is refused by name, as are the other parts of a task that only Inspect's own loop would use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inspect_ai import Task
from inspect_ai._util.registry import is_registry_object, registry_info, registry_params
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageUser,
    ContentText,
    ModelName,
    ModelOutput,
)
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState
from inspect_ai.solver._chain import unroll

PROMPTING = ("system_message", "user_message", "prompt_template", "chain_of_thought")
"""Solvers of Inspect's own that only format messages."""

GENERATING = ("generate", "multiple_choice")
"""Solvers of Inspect's own that call the model once, when there are no tools."""

_SAMPLING = frozenset(
    [
        "max_retries",
        "timeout",
        "attempt_timeout",
        "stream_idle_timeout",
        "max_connections",
        "adaptive_connections",
        "max_tokens",
        "top_p",
        "temperature",
        "best_of",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "top_k",
        "parallel_tool_calls",
        "internal_tools",
        "max_tool_output",
        "cache_prompt",
        "fallback_models",
        "fail_on_refusal",
        "verbosity",
        "effort",
        "reasoning_effort",
        "reasoning_mode",
        "reasoning_tokens",
        "reasoning_summary",
        "reasoning_history",
        "extra_headers",
        "cache",
        "batch",
    ]
)
"""Parameters of generating that are the server's, and its engine's: neither what the model is shown, nor the form
of what it writes."""

_DROPPED = (
    "cleanup",
    "approval",
    "review",
    "sentinel",
    "token_limit",
    "cost_limit",
    "working_limit",
)
"""Parts of a task that an episode here does not have."""

_MODEL = "turnstile/agent"
_KNOWN = ", ".join(PROMPTING) + ", then " + " or ".join(GENERATING)


class NotPlayable(ValueError):
    """``str`` says which part of a sample, or task, cannot be played."""


class _Shown(BaseException):
    """The chain calls the model: the prompt is whole. No Exception: a solver must not catch it."""


def solvers_of(task: Task) -> list[Any]:
    """Set-up and solver, without the chains that hold them."""
    return [*(unroll(task.setup) if task.setup is not None else ()), *unroll(task.solver)]


def refusals(task: Task) -> list[str]:
    """Reasons why the task cannot be played, each in words."""
    found = list(_refused_solvers(solvers_of(task)))
    if found:
        found[-1] += (
            f". Known are {_KNOWN}. Only where the agent's own tools do what these do: name a function of your "
            "own that returns task_with(task, solver=generate(), setup=None)"
        )
    found.extend(
        f"it has {name}, which an episode here has not: leave it out by task_with(task, {name}=None)"
        for name in _DROPPED
        if vars(task)[name] is not None
    )
    if task.sample_source is not None:
        found.append("its samples are made while it runs (SampleSource), and tasks here are listed first")
    found.extend(_refused_config("its config", task.config.model_dump(exclude_none=True)))
    return found


def _refused_solvers(solvers: list[Any]) -> Iterator[str]:
    names = [_name(solver) for solver in solvers]
    unknown = [name for name in names if name not in (*PROMPTING, *GENERATING)]
    if unknown:
        yield f"its solver cannot be played: {', '.join(unknown)} may have tools, users or state of their own"
        return
    generating = [name for name in names if name in GENERATING]
    if len(generating) != 1 or names[-1] not in GENERATING:
        yield f"its solver cannot be played: {', '.join(names) or 'nothing'} does not generate once, at its end"
        return
    given = registry_params(solvers[-1])
    if given.get("shuffle"):
        yield "its solver cannot be played: multiple_choice(shuffle=…) has another order in each process"
    own = ("tool_calls", "template", "cot", "multiple_correct", "shuffle")
    yield from _refused_config(names[-1], {name: value for name, value in given.items() if name not in own})


def _refused_config(whose: str, given: dict[str, Any]) -> Iterator[str]:
    named = sorted(name for name, value in given.items() if value is not None and name not in _SAMPLING)
    if named:
        yield f"{whose} sets {', '.join(named)}, which an episode here does not do"


def _name(solver: Any) -> str:
    """Its name, without a package only where it is Inspect's own: so nobody else's passes for one."""
    if not is_registry_object(solver):
        return str(getattr(solver, "__qualname__", type(solver).__name__))
    name = registry_info(solver).name
    package, slash, own = name.partition("/")
    if package == "inspect_ai":
        return own
    return name if slash else f"{name} (of the task's own)"


def new_state(sample: Sample, number: int) -> TaskState:
    """The state in which Inspect begins the sample. ``number``: from 1, its id where it has none."""
    sample = sample.model_copy(deep=True)
    text = sample.input
    return TaskState(
        model=ModelName(_MODEL),
        sample_id=sample.id if sample.id is not None else number,
        epoch=1,
        input=text,
        messages=[ChatMessageUser(content=text)] if isinstance(text, str) else list(text),
        target=Target(sample.target),
        choices=sample.choices,
        metadata=sample.metadata,
    )


async def prompt_of(task: Task, sample: Sample, number: int) -> str:
    """The text of the messages that the chain has the model answer. Raises NotPlayable."""
    state = new_state(sample, number)

    async def generate(state: TaskState, **_: Any) -> TaskState:
        raise _Shown

    try:
        for solver in solvers_of(task):
            state = await solver(state, generate)
    except _Shown:
        pass
    except Exception as error:
        raise NotPlayable(f"its solver fails: {type(error).__name__}: {error}") from error
    for message in state.messages:
        if not isinstance(message, (ChatMessageSystem, ChatMessageUser)):
            raise NotPlayable(f"its prompt has a message of role {message.role}, and an agent gets one text")
        if not isinstance(message.content, str):
            others = sorted({part.type for part in message.content if not isinstance(part, ContentText)})
            if others:
                raise NotPlayable(f"its prompt has {', '.join(others)}, and an agent gets text alone")
    return "\n\n".join(message.text for message in state.messages if message.text)


async def answered(task: Task, sample: Sample, number: int, answer: str) -> TaskState:
    """The state after the chain, whose model has said ``answer``."""
    state = new_state(sample, number)

    async def generate(state: TaskState, **_: Any) -> TaskState:
        state.messages.append(ChatMessageAssistant(content=answer))
        state.output = ModelOutput.from_content(_MODEL, answer)
        return state

    for solver in solvers_of(task):
        state = await solver(state, generate)
    state.completed = True
    return state
