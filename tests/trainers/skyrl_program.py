"""Rollouts in SkyRL's own code (TURNSTILE_SKYRL_PYTHON): its validator, its batch of tensors, its advantages.

SkyRL asks for Python 3.12 because pydantic refuses ``typing.TypedDict`` below it. The torch of the public index
for 3.12 is a CUDA build, so the tests take 3.11, with the TypedDict of typing_extensions, which pydantic takes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # before SkyRL's modules are made

import numpy as np  # noqa: E402
import torch  # noqa: E402
from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402
from skyrl.train.dataset.preprocess import (  # noqa: E402
    compute_prompt_mini_batch_boundaries,
    convert_prompts_responses_to_batch_tensors,
)
from skyrl.train.generators.base import BatchMetadata, GeneratorInterface, GeneratorOutput, TrajectoryID  # noqa: E402
from skyrl.train.generators.utils import (  # noqa: E402
    concatenate_generator_outputs,
    get_metrics_from_generator_output,
)
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402

from client.trainer_types import group_of, rollout, sample  # noqa: E402
from trainers.recorded_run import recorded_rollouts  # noqa: E402
from turnstile import AsyncClient, Client, errors  # noqa: E402
from turnstile.exporters.skyrl import NothingGraded, TurnstileGenerator, to_generator_output  # noqa: E402
from turnstile.exporters.trained_rows import trained_rows  # noqa: E402
from turnstile.models import EpisodeStatus  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers" / "skyrl.md"


def trained(output: Any, *, norm_by_std: bool = False) -> dict[str, Any]:
    """The batch as the trainer makes it: validated, as tensors, with GRPO's advantages of the last rows."""
    validate_generator_output(99, output, step_wise=True)
    per_token = [
        [0.0] * (len(ids) - 1) + [reward]
        for ids, reward in zip(output["response_ids"], output["rewards"], strict=True)
    ]
    sequences, _, response_mask, rewards, loss_mask, logprobs, *_ = convert_prompts_responses_to_batch_tensors(
        0, output["prompt_token_ids"], output["response_ids"], per_token, output["loss_masks"],
        output["rollout_logprobs"],
    )  # fmt: skip
    last = torch.tensor(output["is_last_step"])
    uids = np.array([name.instance_id for name in output["trajectory_ids"]])
    advantages, _ = ppo_utils.compute_grpo_outcome_advantage(
        rewards[last], torch.ones_like(response_mask[last], dtype=torch.float), uids[last.numpy()],
        grpo_norm_by_std=norm_by_std,
    )  # fmt: skip
    trajectory = torch.cat([torch.tensor([False]), last[:-1]]).int().cumsum(dim=0)
    return {
        "advantages": [round(value, 6) for value in advantages[trajectory][:, 0].tolist()],
        "sequences": sequences,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "uids": uids.tolist(),
    }


def refused(call: Any, *kinds: type[Exception]) -> str:
    try:
        call()
    except kinds as error:
        return str(error)
    return "nothing"


def silent_cases() -> dict[str, Any]:
    """What SkyRL takes without a word."""
    three = to_generator_output(group_of(1.0, 0.0, rows={0: 3}))
    ungraded = to_generator_output(group_of(1.0, None, 0.0, group="h"))
    nothing = to_generator_output([rollout(0.0), rollout(1.0, number=1, samples=(sample(trained=(False,)),))])
    lost = to_generator_output([*group_of(1.0, 0.0, group="a"), *group_of(None, None, group="b")])
    lengths = to_generator_output([rollout(1.0, samples=(sample(trained=(True, False, True)),)), *group_of(0.0)])
    short = {**lengths, "rollout_logprobs": [row[:-1] for row in lengths["rollout_logprobs"]]}
    return {
        "three": [three["is_last_step"], three["rewards"], trained(three)["advantages"]],
        "ungraded": [ungraded["rewards"], trained(ungraded)["advantages"], ungraded["rollout_metrics"]],
        "nothing": [nothing["loss_masks"][1], nothing["rewards"], trained(nothing)["advantages"]],
        "one_left": trained(to_generator_output(group_of(1.0, None, None)))["advantages"],
        "one": trained(to_generator_output(group_of(1.0)))["advantages"],
        "lost": [lost["rewards"], lost["loss_masks"][-1], trained(lost)["advantages"]],
        "lost_boundaries": compute_prompt_mini_batch_boundaries(trained(lost)["uids"], 1, 2, True, 2),
        "lost_mean": get_metrics_from_generator_output(lost, trained(lost)["uids"])["avg_score"],
        "short": refused(lambda: validate_generator_output(2, short, step_wise=True), AssertionError),
        "rows_without_step_wise": refused(
            lambda: to_generator_output(group_of(1.0, rows={0: 2}), step_wise=False), ValueError
        ),
        "ungraded_without_step_wise": refused(
            lambda: to_generator_output(group_of(1.0, None), step_wise=False), ValueError
        ),
        "none": refused(lambda: to_generator_output(group_of(None, None)), NothingGraded),
        "cut": to_generator_output([rollout(1.0, status=EpisodeStatus.TRUNCATED)])["stop_reasons"],
        "joined": concatenate_generator_outputs([three, ungraded], step_wise=True)["rollout_metrics"],
    }


def recorded(url: str, key: str) -> dict[str, Any]:
    """The recorded run, compared bit by bit with what the trainer's tensors hold."""
    with Client(url, key=key) as client:
        rollouts = recorded_rollouts(client)
    graded = [one for one in rollouts if one.reward is not None]
    output = to_generator_output(rollouts)
    batch = trained(output)
    rows = {row.sample_id: row for one in graded for row in trained_rows(one)}
    by_ids = {tuple(row.input_ids.tolist()): row for row in rows.values()}
    exact = tokens = 0
    for index, (prompt, response) in enumerate(
        zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    ):
        row = by_ids.get(tuple(prompt + response))
        if row is None:
            continue
        start, length = len(prompt), len(response)
        mask = batch["loss_mask"][index][-length:].numpy().astype(np.uint8)
        logprobs = batch["logprobs"][index][-length:].numpy().astype(np.float32)
        exact += bool(
            np.array_equal(mask, row.loss_mask[start:])
            and logprobs.tobytes() == row.logprobs[start:].tobytes()
            and batch["sequences"][index][-start - length :].tolist() == row.input_ids.tolist()
        )
        tokens += int(mask.sum())
    return {
        "rollouts": len(rollouts),
        "graded": len(graded),
        "rows": [len(output["response_ids"]), len(rows), exact],
        "tokens": [tokens, int(batch["loss_mask"].sum()), sum(int(row.loss_mask.sum()) for row in rows.values())],
        "trajectories": sum(output["is_last_step"]),
    }


async def played(url: str, key: str) -> dict[str, Any]:
    """The generator as the trainer calls it, against a server."""
    names = [TrajectoryID(uid, number) for uid in ("p1", "p2") for number in (0, 1)]

    def batch(phase: Any, temperature: float, tasks: list[Any]) -> Any:
        return {
            "prompts": [[{"role": "user", "content": "?"}]] * len(names),
            "env_classes": ["turnstile"] * len(names),
            "env_extras": tasks,
            "sampling_params": {"temperature": temperature, "top_p": 1.0, "top_k": -1, "max_generate_length": 64},
            "trajectory_ids": names,
            "batch_metadata": BatchMetadata(3, phase),
        }

    tasks = [{"task": f"sum-{n}"} for n in (1, 1, 2, 2)]

    async def breaks(_: object) -> None:
        raise RuntimeError("no")

    async with AsyncClient(url, key=key) as client:
        generator = TurnstileGenerator(client, agent="tool-loop", max_concurrent=2)
        output = await generator.generate(batch("train", 0.7, tasks))
        episodes = [await client.episode(more["turnstile/episode_id"]).status() for more in output["env_metrics"]]
        greedy = await generator.generate(batch("eval", 0.0, tasks))
        validate_generator_output(4, greedy, step_wise=True)
        try:
            await generator.generate(batch("train", 0.7, [{"task": "unknown"}] * 4))
        except errors.InvalidRequest as error:
            unknown = str(error)
        try:
            await TurnstileGenerator(client, agent=breaks, replacements=0).generate(
                batch("train", 0.7, [{"task": "one two"}] * 4)
            )
        except NothingGraded as error:
            failing = str(error)
    shortest = min(map(len, greedy["response_ids"]))
    ends = zip(output["trajectory_ids"], output["is_last_step"], strict=True)
    order = [name.to_string() for name, last in ends if last]
    return {
        "fields": sorted(set(GeneratorOutput.__annotations__) ^ set(output)),
        "order": order,
        "advantages": len(trained(output)["advantages"]),
        "trained": [sum(mask) for mask in output["loss_masks"]],
        "groups": len({episode.group_id for episode in episodes}),
        "temperature": sorted({episode.sampling.temperature for episode in episodes}),
        "metadata": episodes[0].metadata,
        "greedy": [len(greedy["rewards"]), sum(map(sum, greedy["loss_masks"])), shortest],
        "unknown": unknown,
        "failing": failing,
    }  # fmt: skip


def example(url: str, key: str) -> list[str]:
    """The example of the page, as far as it goes without a cluster."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"URL": url, "KEY": key, "__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    made = names["TurnstileExp"].get_generator(None, None, None, None)
    return [type(made).__name__, str(hasattr(GeneratorInterface, "generate"))]


def main() -> None:
    given = json.load(sys.stdin)
    found = {
        "silent": silent_cases(),
        "recorded": recorded(given["recorded_url"], given["key"]),
        "played": asyncio.run(played(given["url"], given["key"])),
        "example": example(given["url"], given["key"]),
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
