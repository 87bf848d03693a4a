"""Forests as verifiers' own traces and back (in the Python of scripts/trainers/skyrl.txt)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from verifiers.v1.trace import Trace

from client.trainer_types import rollout
from trainers.recorded_run import recorded_rollouts
from turnstile import Client
from turnstile.exporters.verifiers import from_trace, to_trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers" / "verifiers.md"


def refusal(trace: Trace) -> str:
    try:
        from_trace(trace)
    except ValueError as error:
        return str(error)
    return "nothing"


def branch_is_a_row(branch: Any, forest: Any) -> bool:
    """True if verifiers' branch has the ids of a flat row, and log-probabilities where its mask is set."""
    rows = {tuple(row.input_ids.tolist()) for row in forest.to_samples().samples}
    lengths = {len(branch.token_ids), len(branch.sampled_mask), len(branch.logprobs)}
    masked = all(
        value == 0.0 for value, mask in zip(branch.logprobs, branch.sampled_mask, strict=True) if not mask
    )
    return len(lengths) == 1 and masked and tuple(branch.token_ids) in rows


def recorded(url: str, key: str) -> dict[str, Any]:
    same = packed = branches = of_rows = trained = expected = several = 0
    with Client(url, key=key) as client:
        rollouts = recorded_rollouts(client)
        forests = [client.episode(one.episode.episode_id).tree() for one in rollouts if one.episode]
    graded = [(one, forest) for one, forest in zip(rollouts, forests, strict=True) if one.reward is not None]
    assert all(
        to_trace(one, tree) is None for one, tree in zip(rollouts, forests, strict=True) if one.reward is None
    )
    for one, forest in graded:
        trace = to_trace(one, forest)
        assert isinstance(trace, Trace)
        assert (trace.reward, trace.has_error) == (one.reward, False)
        same += equal(from_trace(trace), forest)
        # As it goes over verifiers' wire, which keeps every digit.
        packed += equal(from_trace(type(trace).model_validate(trace.model_dump(mode="python"))), forest)
        branches += len(trace.branches)
        several += len(trace.branches) > 1
        of_rows += sum(branch_is_a_row(branch, forest) for branch in trace.branches)
        trained += sum(sum(node.mask) for node in trace.nodes)
        expected += int(forest.loss_mask.sum())
    return {
        "graded": len(graded),
        "same": same,
        "packed": packed,
        "branches": [branches, of_rows],
        "several": several,
        "trained": [trained, expected],
    }


def equal(one: Any, other: Any) -> bool:
    arrays = ("input_ids", "loss_mask", "logprobs", "weight_version", "parents", "offsets", "completion_starts")
    return bool(
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and one.logprobs.tobytes() == other.logprobs.tobytes()
        and one.model_dump(mode="json") == other.model_dump(mode="json")
    )


def cases(url: str, key: str) -> dict[str, Any]:
    with Client(url, key=key) as client:
        one = next(found for found in recorded_rollouts(client) if found.reward is not None)
        assert one.episode is not None
        forest = client.episode(one.episode.episode_id).tree()
    short = to_trace(one, forest)
    assert short is not None
    next(node for node in short.nodes if node.logprobs).logprobs.pop()
    foreign = to_trace(one, forest)
    assert foreign is not None
    foreign.info = {}
    return {
        "ungraded": to_trace(rollout(None), forest),
        "zero": to_trace(rollout(0.0), forest).reward,
        "short": refusal(short),
        "foreign": refusal(foreign),
    }


def example(url: str, key: str) -> int:
    """The example of the page."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"URL": url, "KEY": key}
    exec(compile(code, str(PAGE), "exec"), names)
    return len(names["trace"].branches)


def evaluated(url: str, key: str) -> dict[str, Any]:
    """``vf-eval``, verifiers' own command, on the tasks of a server; and with an agent that there is not."""
    [code] = re.findall(r"```python title=[^\n]*\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    Path("turnstile_tasks.py").write_text(code, "utf-8")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path.cwd())])
    environment = {**os.environ, "PYTHONPATH": path, "TURNSTILE_CONTROL_KEY": key}
    command = [str(Path(sys.executable).with_name("vf-eval")), "turnstile_tasks", "-n", "2", "-r", "2"]
    options = ["--env.taskset.url", url, "--output-dir", "out", "--no-rich", "--no-push"]
    found = {}
    for agent in ("tool-loop", "no-such-agent"):
        line = [*command, "--env.launch", agent, *options, "--run.name", agent]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=200, check=False)
        file = Path("out", agent, "traces.jsonl")
        records = file.read_text("utf-8").splitlines() if file.exists() else []
        found[agent] = {
            "code": done.returncode,
            "said": (done.stdout + done.stderr)[-2000:],
            "episodes": [json.loads(record) for record in records],
        }
    return found


def main() -> None:
    given = json.load(sys.stdin)
    where = given["recorded_url"], given["key"]
    found = {
        "recorded": recorded(*where),
        "cases": cases(*where),
        "example": example(given["url"], given["key"]),
        "evaluated": evaluated(given["url"], given["key"]),
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
