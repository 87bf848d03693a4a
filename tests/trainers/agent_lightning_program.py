"""Rollouts in Agent Lightning's own code (in the Python of scripts/trainers/verl.txt): the batch that its adapter
makes, its advantages over rollouts and its losses, and a step of its trainer without a model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from agentlightning.verl import trainer as its_trainer
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
from agentlightning.verl.dataset import LoadedDataset
from agentlightning.verl.per_rollout_loss import (
    CISPO_PER_ROLLOUT_MEAN_LOSS_MODE,
    PER_ROLLOUT_MEAN_LOSS_MODE,
    normalize_advantages_by_rollout,
)
from agentlightning.verl.rollout_adapter import RolloutAdapter
from agentlightning.verl.rollout_level_advantage import compute_rollout_level_advantage
from hydra import compose, initialize_config_dir
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.config import ActorConfig, FSDPOptimizerConfig

from client.trainer_types import group_of, rollout, sample
from trainers.recorded_run import recorded_rollouts
from turnstile import Client, errors
from turnstile.exporters.agent_lightning import to_batch
from turnstile.exporters.trained_rows import response_start, trained_rows
from turnstile.rollout import Rollout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers" / "agent-lightning.md"
LENGTHS = {"max_prompt_length": 6, "max_response_length": 12, "pad_token_id": 9}
"""The tests' longest row, and room on both sides."""


def kept(batch: DataProto) -> DataProto:
    """What its trainer keeps of a batch, with what it adds before the advantages."""
    batch = batch[(~batch.batch["is_drop_mask"]).nonzero(as_tuple=True)[0].tolist()]
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["data_id_list"]
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    return batch


def advantages_in(batch: DataProto, estimator: str = "grpo", by_rollout: bool = True) -> DataProto:
    batch = kept(batch)
    given: dict[str, Any] = {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0, "num_repeat": 2}
    given |= {"norm_adv_by_std_in_grpo": False, "config": AlgoConfig()}
    return compute_rollout_level_advantage(batch, **given)[0] if by_rollout else compute_advantage(batch, **given)


def advantages(rollouts: list[Rollout], estimator: str = "grpo", by_rollout: bool = True) -> list[list[float]]:
    """By row: the different advantages of its trained tokens."""
    made = advantages_in(to_batch(rollouts, **LENGTHS), estimator, by_rollout)
    return [
        sorted({round(float(value), 6) for value in row[mask.bool()]})
        for row, mask in zip(made.batch["advantages"], made.batch["response_mask"], strict=True)
    ]


def its_own() -> dict[str, Any]:
    """Where our batch differs from its adapter's, of the same rollouts: two, of two turns and of one."""
    two, one = sample(trained=(True, True)), sample()
    ours = to_batch([rollout(0.5, samples=(two,)), rollout(0.0, number=1, samples=(one,))], **LENGTHS)

    def turn(row: Any, start: int, end: int) -> Triplet:
        ids, logprobs = row.input_ids.tolist(), row.logprobs.tolist()
        reply = {"token_ids": ids[start:end], "log_probs": logprobs[start:end]}
        return Triplet(prompt={"token_ids": ids[:start]}, response=reply)

    def completed(number: int, reward: float, turns: list[Triplet]) -> CompletedRollout:
        return CompletedRollout(rollout_id=f"g-{number}", data_id="g", step=1, sample_idx_in_step=0,
                                enqueue_time=0.0, final_reward=reward, triplets=turns)  # fmt: skip

    adapter = RolloutAdapter(**LENGTHS, device=torch.device("cpu"), trace_aggregator_level="trajectory")
    theirs, _ = adapter.get_train_data_batch(
        [completed(0, 0.5, [turn(two, 3, 5), turn(two, 8, 10)]), completed(1, 0.0, [turn(one, 3, 5)])]
    )
    names = sorted({*ours.batch.keys(), *theirs.batch.keys()})
    pairs = {name: (ours.batch[name], theirs.batch[name]) for name in names}
    return {
        "names": names,
        "differ": [name for name, (our, its) in pairs.items() if not torch.equal(our, its.to(our.dtype))],
        "dtypes": {
            name: [str(our.dtype), str(its.dtype)] for name, (our, its) in pairs.items() if our.dtype != its.dtype
        },
        "texts": {name: values.tolist() for name, values in ours.non_tensor_batch.items()}
        == {name: values.tolist() for name, values in theirs.non_tensor_batch.items()},
    }


def refusal(**lengths: int) -> str:
    try:
        to_batch([rollout(1.0, samples=(sample(trained=(True, True)),))], **{**LENGTHS, **lengths})
    except ValueError as error:
        return str(error)
    return "none"


def cases() -> dict[str, Any]:
    three = group_of(1.0, 0.0, rows={0: 3})
    bare = rollout(1.0, number=2, samples=(sample(trained=(False,)),))
    tail = rollout(1.0, samples=(sample(trained=(True, False)),))
    cut = to_batch([tail, rollout(0.0, number=1)], **LENGTHS)
    lonely = to_batch([*three, *group_of(1.0, group="h"), *group_of(1.0, None, group="i")], **LENGTHS)
    return {
        "grpo": advantages(three),
        "rloo": advantages(three, "rloo"),
        "grpo over rows": advantages(three, by_rollout=False),
        "ungraded": advantages(group_of(1.0, None, 0.0)),
        "nothing": advantages([*group_of(1.0, 0.0), bare]),
        "lengths": advantages([rollout(1.0, samples=(sample(trained=(True, True)),)), rollout(0.0, number=1)]),
        "dropped": lonely.batch["is_drop_mask"].tolist(),
        "none": {name: list(value.shape) for name, value in to_batch(group_of(None), **LENGTHS).batch.items()},
        "tail": cut.batch["attention_mask"].sum(-1).tolist(),
        "tail rewards": cut.batch["token_level_scores"][:, :2].tolist(),
        "long prompt": refusal(max_prompt_length=2),
        "long response": refusal(max_response_length=6),
    }


def loss(mode: str) -> dict[str, Any]:
    """Its loss of recorded log-probabilities against themselves, for a rollout of three rows beside one of two
    turns: what each rollout's tokens get of the gradient."""
    batch = advantages_in(
        to_batch([rollout(1.0, 3), rollout(0.0, number=1, samples=(sample(trained=(True, True)),))], **LENGTHS)
    )
    ids = batch.non_tensor_batch["rollout_id_list"]
    mask = batch.batch["response_mask"]
    weighed = normalize_advantages_by_rollout(batch.batch["advantages"], mask, ids, num_trained_rows=len(batch))
    old = batch.batch["rollout_log_probs"]
    logprobs = old.clone().requires_grad_()
    optim = FSDPOptimizerConfig(lr=1e-3, total_training_steps=1)
    actor = ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, optim=optim)
    found, _ = get_policy_loss_fn(mode)(old, logprobs, weighed, mask, "token-mean", actor)
    found.backward()
    return {
        "loss": float(found.detach()),
        "by rollout": {name: float(logprobs.grad[ids == name].sum()) for name in sorted(set(ids))},
        "outside": float(logprobs.grad[mask == 0].abs().max()),
    }


def recorded(url: str, key: str) -> dict[str, Any]:
    """Every trained token of the recorded run of real agents, bit by bit, and its advantages."""
    with Client(url, key=key) as client:
        rollouts = recorded_rollouts(client)
    rows = [(one, row) for one in rollouts for row in trained_rows(one)]
    prompts, length = max(response_start(row) for _, row in rows), max(len(row.input_ids) for _, row in rows)
    batch = to_batch(rollouts, max_prompt_length=prompts, max_response_length=length)
    tensors, exact = batch.batch, 0
    for line, (one, row) in enumerate(rows):
        attended = tensors["attention_mask"][line].bool()
        start, end = response_start(row), int(attended.sum())
        exact += (
            tensors["input_ids"][line][attended].tolist() == row.input_ids[:end].tolist()
            and tensors["prompts"][line, prompts - start :].tolist() == row.input_ids[:start].tolist()
            and tensors["responses"][line, : end - start].tolist() == row.input_ids[start:end].tolist()
            and tensors["position_ids"][line][attended].tolist() == list(range(end))
            and tensors["response_mask"][line, : end - start].tolist() == row.loss_mask[start:end].tolist()
            and tensors["rollout_log_probs"][line, : end - start].numpy().tobytes()
            == row.logprobs[start:end].tobytes()
            and not row.loss_mask[:start].any()
            and not row.loss_mask[end:].any()
            and float(tensors["token_level_scores"][line, end - start - 1]) == np.float32(one.reward)
            and batch.non_tensor_batch["rollout_id_list"][line] == one.rollout_id
        )
    made = advantages_in(batch)
    trained = made.batch["response_mask"].bool()
    found = made.batch["advantages"]
    return {
        "rows": len(batch),
        "exact": exact,
        "trained": int(tensors["response_mask"].sum()),
        "listed": sum(int(row.loss_mask.sum()) for _, row in rows),
        "advantages": [bool(found[trained].any()), bool(found[~trained].any())],
    }


class Weights:
    """The place of verl's checkpoint manager."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def sleep_replicas(self) -> None:
        pass

    def update_weights(self, step: int) -> None:
        self.updates.append(step)


class Engines:
    """The place of verl's manager of engines, with one engine."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def get_addresses(self) -> list[str]:
        return ["127.0.0.1:1"]

    def get_replicas(self) -> list[Engines]:
        return [self]

    async def abort_all_requests(self) -> None:
        self.told.append("abort")

    async def resume_generation(self) -> None:
        self.told.append("resume")


class NoModel:
    """What verl's trainer does with engines and models, left out of the trainer of the page."""

    use_reference_policy = use_critic = False

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        return DataProto.from_dict({"old_log_probs": batch.batch["rollout_log_probs"]}), 0.0

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.trained = batch
        return DataProto(meta_info={"metrics": {}})


def started(trainer_type: Any, *overrides: str) -> Any:
    """With the configuration of Agent Lightning itself."""
    with initialize_config_dir(str(Path(its_trainer.__file__).parent), version_base=None):
        batches = ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "trainer.balance_batch=false"]
        wanted = ["actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo"]
        config = compose("config", [*batches, *wanted, *overrides])

    def begun(self: Any, config: Any) -> None:
        self.config, self.tokenizer = config, SimpleNamespace(pad_token_id=0, eos_token_id=0)

        self.global_steps, self.checkpoint_manager, self.llm_server_manager = 3, Weights(), Engines()
        data = LoadedDataset([{"task": task} for task in ("sum-1", "sum-2")])
        self.train_dataloader = self.val_dataloader = [collate_fn([data[0], data[1]])]

    original, RayPPOTrainer.__init__ = RayPPOTrainer.__init__, begun
    try:
        return type("WithoutModel", (NoModel, trainer_type), {})(config)
    finally:
        RayPPOTrainer.__init__ = original


def refused(trainer_type: Any, *overrides: str) -> str:
    try:
        started(trainer_type, *overrides)
    except ValueError as error:
        return str(error)
    return "none"


def played(url: str, key: str) -> dict[str, Any]:
    """A step and a validation of the trainer of the page, on a live server."""
    module, elsewhere = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"URL": url, "KEY": key}
    exec(compile(module, str(PAGE), "exec"), names)
    names["setup"]()
    made = started(names["Errands"])
    metrics, batch = made._train_step({}, False)
    try:
        made.task({"answer": "4"})
    except errors.InvalidRequest as error:
        no_task = str(error)
    ungraded = started(names["Errands"])
    ungraded.play = lambda tasks, n: group_of(*(None for _ in range(n * len(tasks))))
    exec(compile(elsewhere, str(PAGE), "exec"), names)
    return {
        "used": its_trainer.AgentLightningRayPPOTrainer is names["Errands"],
        "metrics": metrics,
        "groups": len(set(batch.non_tensor_batch["uid"])),
        "rollouts": len(set(batch.non_tensor_batch["rollout_id_list"])),
        "shapes": {name: list(batch.batch[name].shape[1:]) for name in ("prompts", "responses", "advantages")},
        "trained": made.trained is batch,
        "updates": made.checkpoint_manager.updates,
        "validation": made._validate(),
        "told": made.llm_server_manager.told,
        "ungraded": ungraded._train_step({}, False),
        "no task": no_task,
        "elsewhere": len(names["batch"]),
        "async": refused(names["Errands"], "agentlightning.async_rollout.enabled=true",
                         "agentlightning.async_rollout.async_train_batch_size=2048"),
        "transition": refused(names["Errands"], "agentlightning.trace_aggregator.level=transition"),
    }  # fmt: skip


def main() -> None:
    given = json.load(sys.stdin)
    found = {
        "cases": cases(),
        "its own": its_own(),
        "losses": [loss(mode) for mode in (PER_ROLLOUT_MEAN_LOSS_MODE, CISPO_PER_ROLLOUT_MEAN_LOSS_MODE)],
        "recorded": recorded(given["recorded_url"], given["key"]),
        "played": played(given["url"], given["key"]),
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
