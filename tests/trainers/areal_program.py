"""Rollouts in AReaL's own code (in the Python of scripts/trainers/verl.txt): its check of what a workflow returns,
its concatenation, its actor's advantages and its loss. What it logs to is not installed."""

# ruff: noqa: E402

from __future__ import annotations

import asyncio
import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

for logger in ("swanlab", "tensorboardX", "trackio", "wandb"):
    sys.modules[logger] = ModuleType(logger)
    sys.modules[logger].__spec__ = ModuleSpec(logger, None)
sys.modules["tensorboardX"].SummaryWriter = object  # type: ignore[attr-defined]

from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.infra import workflow_context
from areal.infra.workflow_executor import check_trajectory_format
from areal.trainer.ppo.actor import PPOActor, grpo_loss_fn
from areal.utils import stats_tracker
from areal.utils.data import Normalization, concat_padded_tensors

from client.trainer_types import group_of, rollout, sample
from trainers.recorded_run import recorded_rollouts
from turnstile import Client, errors
from turnstile.exporters.areal import TurnstileWorkflow, task_in, to_tensors
from turnstile.exporters.trained_rows import trained_rows
from turnstile.rollout import Rollout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers" / "areal.md"


class NoModel:
    """The engine of an actor that only computes advantages."""

    device = torch.device("cpu")


def actor() -> PPOActor:
    """AReaL's, as its page of ours says to configure it."""
    return PPOActor(PPOActorConfig(kl_ctl=0.0, reward_norm=None, adv_norm=None, use_decoupled_loss=False,
                                   recompute_logprob=False), NoModel())  # fmt: skip


def advantages(rollouts: list[Rollout]) -> list[list[float]]:
    """By row: the different advantages of its trained tokens, by AReaL's actor."""
    tensors = to_tensors(rollouts)
    assert tensors is not None
    assert check_trajectory_format(tensors)
    made = actor()._compute_advantages({name: value.clone() for name, value in tensors.items()})
    return [
        sorted({round(float(value), 6) for value in row[mask.bool()]})
        for row, mask in zip(made["advantages"], made["loss_mask"], strict=True)
    ]


def refusal(call: Any) -> str:
    try:
        call()
    except (ValueError, errors.TurnstileError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def cases() -> dict[str, Any]:
    three = group_of(1.0, 0.0, rows={0: 3})
    tail = rollout(1.0, samples=(sample(trained=(True, False)),))
    other = rollout(0.0, number=1, samples=(sample(trained=(True, True)),))
    cut = to_tensors([tail, other])
    assert cut is not None
    # What AReaL makes of the row as it is, with its reward on a masked token.
    whole = {"input_ids": torch.arange(10)[None], "attention_mask": torch.ones(1, 10).long(),
             "loss_mask": torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, 0, 0]]), "logprobs": torch.zeros(1, 10),
             "rewards": torch.tensor([0.5])}  # fmt: skip
    slices = Normalization(NormConfig(mean_level="group", std_level=None, group_size=2))
    both = concat_padded_tensors([made for made in (to_tensors(group_of(1.0, 0.0)), cut) if made is not None])
    odd = rollout(1.0, samples=(sample(weight_version_names=("run-7",)),))
    return {
        "three": advantages(three),
        "ungraded": advantages(group_of(1.0, None, 0.0)),
        "one": advantages(group_of(1.0)),
        "nothing": advantages([rollout(0.0), rollout(1.0, number=1, samples=(sample(trained=(False,)),))]),
        "none graded": to_tensors(group_of(None, None)),
        "tail": advantages([tail, other]),
        "tail lengths": cut["attention_mask"].sum(-1).tolist(),
        "tail whole": float(actor()._compute_advantages(whole)["advantages"].abs().max()),
        "its slices": slices(torch.tensor([1.0, 1.0, 1.0, 0.0])).tolist(),
        "concatenated": list(both["input_ids"].shape),
        "versions": cut["versions"].tolist(),
        "odd": refusal(lambda: to_tensors([odd])),
        "no task": refusal(lambda: task_in({"answer": "4"})),
        "dtypes": {name: str(value.dtype) for name, value in cut.items()},
    }


def loss() -> dict[str, float]:
    """AReaL's loss of recorded log-probabilities against themselves: ratios of 1, so minus the mean advantage."""
    tensors = to_tensors(group_of(1.0, 0.0, rows={0: 3}))
    made = actor()._compute_advantages(tensors)
    logprobs = made["logprobs"].clone().requires_grad_()
    entropy = torch.zeros_like(logprobs)
    found = grpo_loss_fn(logprobs, entropy, made, eps_clip=0.2, eps_clip_higher=None, c_clip=None)
    found.backward()
    mask = made["loss_mask"].bool()
    return {
        "loss": float(found),
        "wanted": -float((made["advantages"] * mask).sum() / mask.sum()),
        "outside": float(logprobs.grad[~mask].abs().max()),
        "inside": float(logprobs.grad[mask].abs().min()),
    }


def recorded(url: str, key: str) -> dict[str, Any]:
    """Every trained token of the recorded run of real agents, bit by bit."""
    with Client(url, key=key) as client:
        rollouts = recorded_rollouts(client)
    exact, rows, trained, listed = 0, 0, 0, 0
    for one in rollouts:
        kept = trained_rows(one)
        listed += sum(int(row.loss_mask.sum()) for row in kept)
        tensors = to_tensors([one], version_of=lambda _: 3)
        assert (tensors is None) == (not kept)
        for index, row in enumerate(kept):
            assert tensors is not None
            length = int(tensors["attention_mask"][index].sum())
            rows += 1
            trained += int(tensors["loss_mask"][index].sum())
            exact += (
                tensors["input_ids"][index, :length].tolist() == row.input_ids[:length].tolist()
                and tensors["loss_mask"][index, :length].tolist() == row.loss_mask[:length].tolist()
                and tensors["logprobs"][index, :length].numpy().tobytes() == row.logprobs[:length].tobytes()
                and tensors["versions"][index, :length].eq(3).tolist()
                == (row.weight_version[:length] >= 0).tolist()
                and not row.loss_mask[length:].any()
            )
    return {"rows": rows, "exact": exact, "trained": trained, "listed": listed}


def played(url: str, key: str) -> dict[str, Any]:
    """The workflow of the page, on a live server."""
    code, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"URL": url, "KEY": key}
    exec(compile(code, str(PAGE), "exec"), names)
    workflow: TurnstileWorkflow = names["workflow"]
    workflow.version_of = lambda name: 0  # type: ignore[method-assign]
    workflow_context.set(workflow_context.WorkflowContext(is_eval=False, task_id=1))

    async def both() -> list[dict[str, torch.Tensor] | None]:
        return [await workflow.arun_episode(None, {"task": task}) for task in ("sum-1", "sum-2")]

    found = asyncio.run(both())
    assert all(check_trajectory_format(made) for made in found)
    stats = stats_tracker.export_all()
    return {
        "groups": len(found),
        "rows": [len(made["rewards"]) for made in found if made is not None],
        "sums": [float(made["rewards"].sum()) for made in found if made is not None],
        "stats": sorted(stats),
        "tokens": [int(np.asarray(made["loss_mask"]).sum()) for made in found if made is not None],
    }


def main() -> None:
    given = json.load(sys.stdin)
    found = {
        "cases": cases(),
        "loss": loss(),
        "recorded": recorded(given["recorded_url"], given["key"]),
        "played": played(given["url"], given["key"]),
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
