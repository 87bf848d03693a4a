"""Rollouts as Tinker's own ``Datum``s and the cookbook's groups (in the Python of scripts/trainers/skyrl.txt)."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker_cookbook.rl.data_processing import compute_advantages, trajectory_to_data
from tinker_cookbook.rl.types import TrajectoryGroup

from client.trainer_types import group_of, rollout, sample
from trainers.recorded_run import recorded_rollouts
from turnstile import Client
from turnstile.exporters.tinker import datum, to_data, to_trajectory_groups
from turnstile.exporters.trained_rows import trained_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers" / "tinker.md"


def values(one: tinker.Datum, name: str) -> Any:
    return one.loss_fn_inputs[name].to_numpy()


def shifts_back(one: tinker.Datum, row: Any) -> bool:
    """True if the positions are those of the row, each one to the left, bit by bit."""
    return bool(
        one.model_input.to_ints() == row.input_ids[:-1].tolist()
        and values(one, "target_tokens").tolist() == row.input_ids[1:].tolist()
        and values(one, "logprobs").astype(np.float32).tobytes() == row.logprobs[1:].tobytes()
        and values(one, "mask").astype(np.uint8).tobytes() == row.loss_mask[1:].tobytes()
    )


def cases() -> dict[str, Any]:
    three = to_data(group_of(1.0, 0.0, rows={0: 3}), scale="none")
    nothing = to_data([rollout(0.0), rollout(1.0, number=1, samples=(sample(trained=(False,)),))], scale="none")
    weighed = to_data(group_of(1.0, 0.0, rows={0: 3}), scale="none", per_rollout=True)
    long = sample(trained=(True, False, True))
    made = datum(long, 0.5)
    groups = to_trajectory_groups(group_of(1.0, None, 0.0, rows={0: 2}))
    assert all(isinstance(group, TrajectoryGroup) for group in groups)
    again = trajectory_to_data(groups[0].trajectories_G[1], 1.0)
    return {
        "three": [[one.advantage, len(one.data)] for one in three],
        "nothing": [[one.advantage, len(one.data)] for one in nothing],
        "ungraded": [one.advantage for one in to_data(group_of(1.0, None, 0.0), scale="none")],
        "one": [[one.advantage, len(one.data)] for one in to_data(group_of(1.0))],
        "sums": [
            math.fsum(float(values(part, "advantages").sum()) for part in one.data) for one in weighed
        ],
        "long": [made.model_input.to_ints(), values(made, "target_tokens").tolist(),
                 values(made, "advantages").tolist(), values(made, "logprobs").tolist()],
        "keys": sorted(made.loss_fn_inputs),
        "groups": [[len(group.trajectories_G), group.get_total_rewards()] for group in groups],
        "cookbook": [found.tolist() for found in compute_advantages(groups)],
        "again": [again[0].model_input.to_ints(), values(again[0], "target_tokens").tolist()],
    }  # fmt: skip


def recorded(url: str, key: str) -> dict[str, Any]:
    with Client(url, key=key) as client:
        rollouts = recorded_rollouts(client)
    rows = [row for one in rollouts for row in trained_rows(one)]
    made = [datum(row, 1.0, with_mask=True) for row in rows]
    return {
        "rows": len(rows),
        "exact": sum(shifts_back(one, row) for one, row in zip(made, rows, strict=True)),
        "trained": [int(sum(values(one, "advantages").sum() for one in made)),
                    sum(int(row.loss_mask.sum()) for row in rows)],
        "groups": sum(len(group.trajectories_G) for group in to_trajectory_groups(rollouts)),
        "graded": sum(one.reward is not None for one in rollouts),
    }  # fmt: skip


def example(url: str, key: str) -> list[str]:
    """The example of the page."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"URL": url, "KEY": key}
    exec(compile(code, str(PAGE), "exec"), names)
    return [str(len(names["found"])), *{type(one).__name__ for one in names["data"]}]


def main() -> None:
    given = json.load(sys.stdin)
    found = {
        "cases": cases(),
        "recorded": recorded(given["recorded_url"], given["key"]),
        "example": example(given["url"], given["key"]),
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
