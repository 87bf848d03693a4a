"""Runs one piece of grading code and prints one JSON object. A program of its own: standard library at the start.

Reads JSON from stdin: ``kind`` (``function``, ``rubric``, ``schema``), ``path`` (``sys.path``; null: this
interpreter's own), and what the kind takes. Prints ``{"value": …}`` or ``{"components": …}``, with ``extra``
(further numbers); or ``{"failed": why}`` for code that raised, ``{"unavailable": why}`` where the reason passes,
``{"wrong": […]}`` for a text that does not fit its schema. What the code itself prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
import traceback
from numbers import Real
from typing import Any

MAX_WRITTEN = 64 << 20
MAX_COMPONENTS = 100
_PASSING = (ConnectionError, TimeoutError)


def main() -> int:
    request = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_WRITTEN, MAX_WRITTEN))
    sys.path[:] = request["path"] or sys.path
    kinds = {"function": _function, "rubric": _rubric, "schema": _schema}
    try:
        found = kinds[request["kind"]](request)
    except _PASSING as error:
        found = {"unavailable": _said(error)}
    except BaseException as error:  # noqa: BLE001 - the boundary to code of the task's author, which may also exit
        traceback.print_exc()
        found = {"failed": _said(error)}
    json.dump(found, answer)
    answer.close()
    os._exit(0)  # threads of the code do not keep the process


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _function(request: dict[str, Any]) -> dict[str, Any]:
    function = _loaded(request["target"])
    if not callable(function):
        raise TypeError(f"{request['target']} is not callable")
    found = function(
        task=request["task"],
        answer=request["answer"],
        files=_files(request),
        facts=request["facts"],
        **request["arguments"],
    )
    if inspect.isawaitable(found):
        found = asyncio.run(_awaited(found))
    if not isinstance(found, dict):
        return {"value": _number(found, "it returned")}
    if not found or len(found) > MAX_COMPONENTS:
        raise ValueError(f"it returned {len(found)} components; 1 to {MAX_COMPONENTS} are taken")
    return {
        "components": {str(name): _number(value, f"it returned for {name!r}") for name, value in found.items()}
    }


def _rubric(request: dict[str, Any]) -> dict[str, Any]:
    try:
        from openenv.core.env_server.types import Action, Observation  # noqa: PLC0415 - 2 s, for rubrics only
        from openenv.core.rubrics import LLMJudge, Rubric  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            f"{error}. Rubrics need OpenEnv in {sys.executable}: install `openenv` there, or name a Python that "
            "has it in the setting grading.python"
        ) from error

    class Submission(Action):
        """The agent's answer, as OpenEnv's action."""

        answer: str | None = None

        def __str__(self) -> str:
            return self.answer or ""

    class GradedWork(Observation):
        """The last observation of an episode: the work with its task."""

        answer: str | None = None
        files: dict[str, str | None]
        task: dict[str, Any]
        facts: dict[str, Any]

        def __str__(self) -> str:
            return str(self.task.get("instruction", ""))

    rubric = _loaded(request["target"])
    if not isinstance(rubric, Rubric):
        if not callable(rubric):
            raise TypeError(f"{request['target']} is neither a Rubric nor makes one")
        rubric = rubric(**request["arguments"])
    elif request["arguments"]:
        raise TypeError(f"{request['target']} is a Rubric, which takes no `arguments`")
    if not isinstance(rubric, Rubric):
        raise TypeError(f"{request['target']} made a {type(rubric).__name__}, not a Rubric")
    named = dict(rubric.named_rubrics())
    judges = [one for one in (rubric, *named.values()) if isinstance(one, LLMJudge)]
    for judge in judges:
        judge.default_score = math.nan  # else a reply without a number would be a 0
    files = {
        path: None if data is None else data.decode(errors="replace") for path, data in _files(request).items()
    }
    action = Submission(answer=request["answer"])
    observation = GradedWork(
        done=True, answer=request["answer"], files=files, task=request["task"], facts=request["facts"]
    )
    try:
        found = asyncio.run(_called(rubric, action, observation))
    except Exception as error:
        if judges:  # whatever their client raised: a judge that is down is no fault of the task
            traceback.print_exc()
            return {"unavailable": _said(error)}
        raise
    if any(isinstance(judge.last_score, float) and math.isnan(judge.last_score) for judge in judges):
        return {"unavailable": "an LLMJudge got a reply without a score"}
    scores: dict[str, Any] = {name: one.last_score for name, one in named.items()}
    extra = {
        name: float(score)
        for name, score in list(scores.items())[:MAX_COMPONENTS]
        if isinstance(score, Real) and math.isfinite(score)
    }
    return {"value": _number(found, "the rubric gave"), "extra": extra}


async def _called(rubric: Any, action: Any, observation: Any) -> Any:
    found = rubric(action, observation)
    return await found if inspect.isawaitable(found) else found


async def _awaited(found: Any) -> Any:
    return await found


def _schema(request: dict[str, Any]) -> dict[str, Any]:
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - for schemas only

    try:
        value = json.loads(request["text"], parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return {"wrong": [f"it is not JSON: {error}"]}
    checker = Draft202012Validator(request["schema"])
    try:
        wrong = [
            f"{error.json_path}: {error.message}"[:500]
            for error, _ in zip(checker.iter_errors(value), range(request["most"]), strict=False)
        ]
    except (RecursionError, OverflowError) as error:
        list(checker.iter_errors(None))  # a schema that has no end for this either is at fault, and it raises
        return {"wrong": [f"it cannot be checked, by its depth or a number in it: {_said(error)}"]}
    return {"wrong": wrong} if wrong else {"value": 1.0}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _files(request: dict[str, Any]) -> dict[str, bytes | None]:
    return {path: None if data is None else base64.b64decode(data) for path, data in request["files"].items()}


def _loaded(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("turnstile_grading_code", place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["turnstile_grading_code"] = module  # dataclasses and pydantic look their module up
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if name not in vars(module):
        raise ImportError(f"{place} has no {name!r}")
    return vars(module)[name]


def _number(value: Any, what: str) -> float:
    if value is None or not isinstance(value, Real):
        raise TypeError(f"{what} a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, which is not finite")
    return number


if __name__ == "__main__":
    sys.exit(main())
