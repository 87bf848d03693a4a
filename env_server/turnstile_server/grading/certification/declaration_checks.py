"""The tools and the numbers of tasks that a manifest declares, against those of the task set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from turnstile_server.grading.certification.check_result import REMEDIES, CheckId, CheckResult, CheckStatus
from turnstile_server.own_tools.names import BUILT_IN
from turnstile_server.settings.own_tools import ALL, OwnToolSpecs
from turnstile_server.tasks.model import Task

NO_MANIFEST = "no manifest was given: name one with --manifest"
_ALWAYS = frozenset({"submit"})


def check_declared_tools(
    declared: Sequence[str] | None, tasks: Iterable[Task], server: OwnToolSpecs
) -> CheckResult:
    """Every declared tool is a tool of some task, and every tool of a task is declared. ``server``: the settings'
    own tools. ``declared`` None: there is no manifest."""
    if not declared:
        reason = (
            NO_MANIFEST if declared is None else "the manifest declares no tools (capabilities.declared_tools)"
        )
        return _skipped(CheckId.TOOLS, reason, applies=declared is None)
    names: dict[str, str] = {}
    unknown: set[str] = set()
    for task in tasks:
        for name in _names(task, server):
            names.setdefault(name, task.id)
        unknown |= set(_unknown(task, server))
    wanted = set(declared)
    problems = [f"{name} is declared, and no task has it" for name in sorted(wanted - names.keys())]
    problems += [f"{name} of task {names[name]} is not declared" for name in sorted(names.keys() - wanted)]
    measured = {"declared": sorted(wanted), "found": sorted(names)}
    if unknown:  # what is declared may be among them
        return CheckResult(CheckId.TOOLS, CheckStatus.SKIP, measured, (*sorted(unknown), *problems))
    return _judged(CheckId.TOOLS, problems, measured)


def check_declared_tasks(declared: Mapping[str, int] | None, splits: Mapping[str, Sequence[str]]) -> CheckResult:
    """Every split has as many tasks as are declared."""
    if not declared:
        what = "the manifest declares no numbers (capabilities.declared_task_count)"
        return _skipped(CheckId.TASKS, NO_MANIFEST if declared is None else what, applies=declared is None)
    found = {name: len(ids) for name, ids in splits.items()}
    problems = [
        f"the split {name!r} has {found.get(name, 0)} tasks; {count} are declared"
        for name, count in sorted(declared.items())
        if found.get(name, 0) != count
    ]
    problems += [f"the split {name!r} is not declared" for name in sorted(found.keys() - declared.keys())]
    return _judged(CheckId.TASKS, problems, {"declared": dict(declared), "found": found})


def _names(task: Task, server: OwnToolSpecs) -> set[str]:
    """The tools of an episode of the task, as far as they are known before one."""
    found = set(BUILT_IN) if task.needs_sandbox and task.offers_sandbox else set(_ALWAYS)
    if task.environment is not None:
        found |= set(task.environment.tool_names)
    for specs in (server, task.tools):
        found |= {each.name or each.function.rpartition(":")[2] for each in specs.functions}
        found |= {each.prefix + name for each in specs.servers for name in each.allow if name != ALL}
    return found


def _unknown(task: Task, server: OwnToolSpecs) -> list[str]:
    """The tools that are known in an episode only, in words."""
    found = [
        f"the tools of the MCP server {each.name!r} are known when it has started"
        for specs in (server, task.tools)
        for each in specs.servers
        if ALL in each.allow
    ]
    if (grader := task.tools_grader) is not None:
        found.append(f"the tools of {grader.tools_of} are known when an episode has begun")
    return found


def _skipped(check_id: CheckId, reason: str, *, applies: bool) -> CheckResult:
    return CheckResult(check_id, CheckStatus.SKIP, {}, (reason,), applies=applies)


def _judged(check_id: CheckId, problems: Sequence[str], measured: Mapping[str, object]) -> CheckResult:
    if not problems:
        return CheckResult(check_id, CheckStatus.PASS, measured)
    return CheckResult(check_id, CheckStatus.FAIL, measured, tuple(problems), REMEDIES[check_id])
