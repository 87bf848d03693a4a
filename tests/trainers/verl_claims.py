"""Claims about ``turnstile.exporters.verl``, played by ``test_verl`` in verl's own Python with verl's code."""

from __future__ import annotations

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import agent_loop_tq, get_trainer_cls, trainer_base
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import ActorConfig, FSDPOptimizerConfig

import turnstile.exporters.verl.trainers  # noqa: F401  (registers)
from client.trainer_types import group_of, rollout, sample
from trainers.recorded_run import recorded_rollouts
from turnstile import AsyncClient, Client, errors
from turnstile.exporters.single_rollouts import SingleRollouts
from turnstile.exporters.trained_rows import trained_rows
from turnstile.exporters.verl import RowTooLong, TurnstileAgentLoop, outputs_of, task_in, to_outputs
from turnstile.exporters.verl.advantages import ESTIMATORS
from turnstile.rollout import Rollout

KEY = os.environ["KEY"]
Worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class


class Queue:
    """verl's queue as far as rows pass it: what is put under a key is what is got."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.put: dict[str, Any] = {}

    async def async_kv_batch_put(
        self, keys: Sequence[str], fields: Any, tags: Sequence[dict[str, Any]], partition_id: str
    ) -> None:
        for i, key in enumerate(keys):
            self.rows[key] = {name: getattr(value[i], "data", value[i]) for name, value in fields.items()}
            self.rows[key] |= {n: v[i] for n, v in fields.items() if isinstance(v[i], torch.Tensor)}
            self.tags[key] = tags[i]

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        rows = [{n: self.rows[key][n] for n in select_fields if n in self.rows[key]} for key in keys]
        ragged = {
            name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
            for name, value in rows[0].items()
            if isinstance(value, torch.Tensor)
        }
        others = [{n: v for n, v in row.items() if not isinstance(v, torch.Tensor)} for row in rows]
        found = list_of_dict_to_tensordict(others)
        for name, value in ragged.items():
            found[name] = value
        return found

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any) -> Any:
        self.put = dict(zip(keys, fields["advantages"].unbind(), strict=True))
        return keys


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(agent_loop_tq, "tq", made)
    monkeypatch.setattr(trainer_base, "tq", made)
    return made


@pytest.fixture(scope="module")
def recorded() -> list[Rollout]:
    with Client(os.environ["RECORDED_URL"], key=KEY) as client:
        return recorded_rollouts(client)


def put(outputs: list[Any], uid: str, session: int) -> None:
    """Through verl's own worker into the queue."""
    worker = Worker.__new__(Worker)
    worker.processor, worker.reward_loop_worker_handles, worker.distillation_enabled = None, None, False
    row = {"uid": uid, "session_id": session, "global_steps": 3, "raw_prompt": [{"role": "user", "content": "x"}]}
    asyncio.run(worker._agent_loop_postprocess(outputs, False, **row))


def put_groups(rollouts: list[Rollout], step_of: Any = int) -> None:
    for group_id, group in enumerate(to_outputs(rollouts, step_of=step_of)):
        for session, rows in enumerate(group):
            put(rows, f"g{group_id}", session)


def advantages(queue: Queue, estimator: str, mode: str = "turnstile_sync", **algorithm: Any) -> dict[str, Any]:
    """Of each row, as verl's own v1 trainer computes them from the queue: of its first trained token, or 0."""
    trainer = get_trainer_cls(mode).__new__(get_trainer_cls(mode))
    trainer.config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": estimator,
                "use_kl_in_reward": False,
                "gamma": 1.0,
                "lam": 1.0,
                "norm_adv_by_std_in_grpo": False,
                **algorithm,
            },
            "actor_rollout_ref": {"rollout": {"n": 2}},
        }
    )
    keys = list(queue.rows)
    trainer._compute_advantage(KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id="train"), {})
    found = {}
    for key in keys:
        mask = queue.rows[key]["response_mask"].bool()
        values = set(queue.put[key][mask].tolist())
        assert len(values) <= 1
        assert not queue.put[key][~mask].any()
        found[key] = values.pop() if values else 0.0
    return found


# Rows ----------------------------------------------------


def test_every_sampled_token_of_the_recorded_run_is_in_one_row_or_listed(
    recorded: list[Rollout], queue: Queue
) -> None:
    put_groups(recorded, step_of=lambda _: 3)
    assert len(queue.rows) > len([one for one in recorded if one.reward is not None]) > 20
    rows = {row["extra_fields"]["turnstile"]["sample_id"]: row for row in queue.rows.values()}
    for one in [one for one in recorded if one.reward is not None]:
        assert one.samples is not None
        trained = 0
        for kept in trained_rows(one):
            row = rows[kept.sample_id]
            start, end = len(row["prompts"]), len(row["input_ids"])
            assert row["input_ids"].tolist() == kept.input_ids[:end].tolist()
            assert row["response_mask"].tolist() == kept.loss_mask[start:end].tolist()
            assert row["rollout_log_probs"].numpy().tobytes() == kept.logprobs[start:end].tobytes()
            assert not kept.loss_mask[:start].any()
            assert not kept.loss_mask[end:].any()
            assert row["rm_scores"].tolist() == [0.0] * (end - start - 1) + [pytest.approx(one.reward)]
            assert row["response_mask"][-1] == row["response_mask"][0] == 1
            trained += int(row["response_mask"].sum())
        spans = {span.turn_id: span.end - span.start for row in one.samples.samples for span in row.turn_spans}
        listed = sum(entry.tokens for entry in one.samples.untrained if entry.turn_id in spans)
        assert trained + listed == sum(spans.values())
    for key, tag in queue.tags.items():
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (3, 3)
        assert tag["seq_len"] == len(queue.rows[key]["input_ids"])


def test_the_main_conversation_is_last_and_each_row_has_the_reward(queue: Queue) -> None:
    rows = (sample(sample_id="a"), sample(sample_id="b", kind="subagent"))
    put(outputs_of(rollout(0.5, samples=rows, reward_components={"tests": 0.5})), "u", 1)
    assert [row["extra_fields"]["turnstile"]["kind"] for row in queue.rows.values()] == ["subagent", "main"]
    assert [float(row["rm_scores"].sum()) for row in queue.rows.values()] == [0.5, 0.5]
    assert {row["extra_fields"]["reward_extra_info"]["tests"] for row in queue.rows.values()} == {0.5}
    assert list(queue.rows) == ["u_1_0", "u_1_1"]


def test_a_rollout_without_a_reward_has_no_row(queue: Queue) -> None:
    assert outputs_of(rollout(None)) == []
    put([], "u", 0)
    assert queue.rows == {}
    assert [len(group) for group in to_outputs([*group_of(1.0, None), *group_of(None, group="h")])] == [1]


def test_a_response_ends_with_its_last_trained_token() -> None:
    (row,) = outputs_of(rollout(1.0, samples=(sample(trained=(True, False)),)))
    assert (row.prompt_ids, row.response_ids, row.response_mask) == ([100, 101, 102], [103, 104], [1, 1])
    (row,) = outputs_of(rollout(1.0, samples=(sample(trained=(False, True)),)))
    assert (len(row.prompt_ids), row.response_mask, row.extra_fields["min_global_steps"]) == (8, [1, 1], 1)


def test_the_steps_are_those_of_the_weights_and_other_names_are_refused() -> None:
    (row,) = outputs_of(rollout(1.0, samples=(sample(trained=(True, True)),)))
    assert (row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) == (0, 1)
    odd = rollout(1.0, samples=(sample(weight_version_names=("run-7",)),))
    with pytest.raises(ValueError, match=r"'run-7' have no number.*update_weights"):
        outputs_of(odd)
    (row,) = outputs_of(odd, step_of=lambda name: int(name.removeprefix("run-")))
    assert row.extra_fields["max_global_steps"] == 7


def test_routing_has_an_entry_for_each_token_or_is_left_out(queue: Queue) -> None:
    experts = np.arange(9 * 2 * 2, dtype=np.uint8).reshape(9, 2, 2)
    put(outputs_of(rollout(1.0, samples=(sample(trained=(True, True), routed_experts=experts),))), "u", 0)
    found = queue.rows["u_0_0"]["routed_experts"]
    assert found.shape == (10, 2, 2)
    assert found[:9].tolist() == experts.tolist()
    half = (sample(sample_id="a", routed_experts=experts[:4]), sample(sample_id="b"))
    assert [row.routed_experts for row in outputs_of(rollout(1.0, samples=half))] == [None, None]


def test_a_row_that_is_too_long_says_so() -> None:
    long = rollout(1.0, samples=(sample(trained=(True, True)),))
    assert outputs_of(long, prompt_length=3, response_length=7)
    with pytest.raises(RowTooLong, match=r"has 7 tokens where rollout\.response_length is 6"):
        outputs_of(long, prompt_length=3, response_length=6)
    with pytest.raises(RowTooLong, match=r"rollout\.prompt_length is 2"):
        outputs_of(long, prompt_length=2, response_length=7)


# Advantages ----------------------------------------------------


def test_three_rows_beside_one_count_once_in_every_estimator(queue: Queue) -> None:
    put_groups(group_of(1.0, 0.0, rows={0: 3}))
    a, b = ["g0_0_0", "g0_0_1", "g0_0_2"], ["g0_1_0"]
    for mode in ("turnstile_sync", "turnstile_colocate_async", "turnstile_separate_async"):
        assert advantages(queue, "turnstile_grpo", mode) == dict.fromkeys(a, 0.5) | dict.fromkeys(b, -0.5)
    assert advantages(queue, "turnstile_rloo") == dict.fromkeys(a, 1.0) | dict.fromkeys(b, -1.0)
    # verl's own: the group of four rows.
    assert advantages(queue, "rloo")["g0_0_0"] == pytest.approx(1 / 3)
    for name in ESTIMATORS:
        rows = advantages(queue, f"turnstile_{name}")
        assert len({rows[key] for key in a}) == 1
        sequences = [{"response_mask": [1] * n, "rm": r} for n, r in ((6, 1.0), (2, 0.0))]
        mask = torch.tensor([s["response_mask"] + [0] * (6 - len(s["response_mask"])) for s in sequences])
        rewards = torch.zeros(2, 6)
        rewards[:, 0] = torch.tensor([s["rm"] for s in sequences])
        config = OmegaConf.create({"norm_adv_by_std_in_grpo": False})
        more = {"norm_adv_by_std_in_grpo": False} if name in ("grpo", "grpo_vectorized", "grpo_passk") else {}
        own, _ = get_adv_estimator_fn(name)(
            token_level_rewards=rewards,
            response_mask=mask,
            index=np.array(["g", "g"], dtype=object),
            config=config,
            **more,
        )
        assert [rows[a[0]], rows[b[0]]] == pytest.approx(own[:, 0].tolist()), name


def test_verls_own_v1_grpo_agrees(queue: Queue) -> None:
    put_groups([*group_of(1.0, 0.0, 0.25, rows={0: 3, 2: 2}), *group_of(0.0, 1.0, group="h", rows={1: 2})])
    for std in (True, False):
        own = advantages(queue, "grpo", "sync", norm_adv_by_std_in_grpo=std)
        assert advantages(queue, "turnstile_grpo", norm_adv_by_std_in_grpo=std) == pytest.approx(own)


def test_a_rollout_with_nothing_to_train_counts_in_the_baseline_only(queue: Queue) -> None:
    silent = rollout(1.0, number=1, samples=(sample(trained=(False,)),))
    empty = rollout(1.0, number=2, samples=())
    put_groups([rollout(0.0), silent, empty])
    assert advantages(queue, "turnstile_grpo") == pytest.approx({"g0_0_0": -2 / 3, "g0_1_0": 0.0, "g0_2_0": 0.0})


def test_a_group_of_one_has_no_advantage_where_verl_takes_the_raw_reward(queue: Queue) -> None:
    put_groups([rollout(1.0)])
    assert advantages(queue, "grpo", "sync") == {"g0_0_0": 1.0}
    for name in ESTIMATORS:
        assert advantages(queue, f"turnstile_{name}") == {"g0_0_0": 0.0}


def test_batches_of_your_own_name_the_rollout_in_the_uid(queue: Queue) -> None:
    put_groups(group_of(1.0, 0.0, rows={0: 3}))
    data = DataProto(
        batch=queue.kv_batch_get([*queue.rows], "", ["response_mask", "rm_scores"]).to_padded_tensor()
    )
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data.non_tensor_batch["uid"] = np.array([*queue.rows], dtype=object)
    found = compute_advantage(data, "turnstile_rloo", config=OmegaConf.create({})).batch["advantages"]
    assert found.tolist() == [[1.0, 1.0]] * 3 + [[-1.0, -1.0]]
    data.non_tensor_batch["uid"] = np.array(["g0"] * 4, dtype=object)
    with pytest.raises(ValueError, match="'g0' does not say which rollout"):
        compute_advantage(data, "turnstile_rloo", config=OmegaConf.create({}))
    own = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False).batch["advantages"]
    assert own.tolist() == [[0.25, 0.25]] * 3 + [[-0.75, -0.75]], "verl counts rows"


def test_the_modes_of_verl_keep_their_options() -> None:
    seen: list[str] = []
    base = get_trainer_cls("turnstile_separate_async").__mro__[1]
    original, base.__init__ = base.__init__, lambda self, config: seen.append(config.trainer.v1.trainer_mode)
    try:
        config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "turnstile_separate_async"}}})
        get_trainer_cls("turnstile_separate_async")(config)
    finally:
        base.__init__ = original
    assert seen == ["separate_async"]


# A step ----------------------------------------------------


def test_a_step_with_verls_own_loss_moves_the_recorded_tokens_as_their_advantages_say(
    recorded: list[Rollout], queue: Queue
) -> None:
    graded = [one for one in recorded if one.reward is not None]
    groups: defaultdict[str, list[Rollout]] = defaultdict(list)
    for one in graded:
        groups[one.group_id].append(one)
    mixed = [group for group in groups.values() if len({one.reward for one in group}) > 1]
    short = min(mixed, key=lambda group: sum(len(row.input_ids) for one in group for row in trained_rows(one)))
    put_groups(short, step_of=lambda _: 3)
    assert any(advantages(queue, "turnstile_grpo").values())
    torch.manual_seed(0)
    vocabulary = 1 + max(int(row["input_ids"].max()) for row in queue.rows.values())
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=16,
        )
    )
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        optim=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
    )
    loss_of = get_policy_loss_fn("vanilla")
    rows = [(row, queue.put[key]) for key, row in queue.rows.items()]
    tokens = sum(int(row["response_mask"].sum()) for row, _ in rows)

    def logprobs(row: dict[str, Any]) -> torch.Tensor:
        start = len(row["prompts"])
        logits = model(row["input_ids"][None]).logits[0, start - 1 : -1].log_softmax(-1)
        return logits.gather(1, row["responses"][:, None])[:, 0]

    def objective() -> float:
        with torch.no_grad():
            return sum(float((logprobs(row) * a * row["response_mask"]).sum()) for row, a in rows) / tokens

    before = objective()
    actor.global_batch_info["batch_num_tokens"] = tokens
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for row, advantage in rows:
        now = logprobs(row)[None]
        loss, _ = loss_of(
            now.detach(), now, advantage[None], row["response_mask"][None], "token-mean", actor, None
        )
        loss.backward()
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0
    optimizer.step()
    assert objective() > before


# The agent loop ----------------------------------------------------


def made_loop(cls: type[TurnstileAgentLoop], response_length: int = 4096) -> TurnstileAgentLoop:
    rollout_config = {"prompt_length": 4096, "response_length": response_length}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout_config}, "data": {}})
    return cls(
        trainer_config=DictConfigWrap(config),
        server_manager=None,
        tokenizer=AutoTokenizer.from_pretrained(os.environ["MODEL"]),
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap(config.data),
        name="turnstile",
    )


SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def test_the_loop_plays_rollouts_on_a_server_and_verl_takes_their_rows(queue: Queue) -> None:
    async def played() -> tuple[list[list[Any]], Any]:
        async with AsyncClient(os.environ["PLAY_URL"], key=KEY) as client:

            class Sums(TurnstileAgentLoop):
                rollouts = SingleRollouts(client, agent="tool-loop")

                def step_of(self, version: str) -> int:
                    return 0

            row = {"task": "sum-1", "uid": "3f-a", "global_steps": 0}
            rows = [await made_loop(Sums).run(SAMPLING, **row, session_id=n) for n in range(2)]
            greedy = await made_loop(Sums).run({**SAMPLING, "temperature": 0}, **row, session_id=2)
            assert [sum(one.response_mask) for one in greedy] == [0]
            assert len(greedy[0].response_ids) > 1
            with pytest.raises(RowTooLong):
                await made_loop(Sums, response_length=1).run(SAMPLING, **row, session_id=3)
            with pytest.raises(ValueError, match="underscore"):
                await made_loop(Sums).run(SAMPLING, **{**row, "uid": "a_b"}, session_id=0)
            with pytest.raises(ValueError, match="use_v1"):
                await made_loop(Sums).run(SAMPLING, **row)
            episode_id = rows[0][-1].extra_fields["turnstile"]["episode_id"]
            return rows, await client.episode(episode_id).status()

    rows, episode = asyncio.run(played())
    for session, outputs in enumerate(rows):
        put(outputs, "3f-a", session)
    assert {key.rsplit("_", 1)[0] for key in queue.rows} == {"3f-a_0", "3f-a_1"}
    assert all(row["response_mask"].any() for row in queue.rows.values())
    assert episode.group_id == "group_3f-a"
    assert episode.sampling.temperature == 0.7
    assert episode.metadata == {"uid": "3f-a", "session_id": 0, "global_steps": 0}
    assert set(advantages(queue, "turnstile_rloo")) == set(queue.rows)


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {"URL": os.environ["PLAY_URL"], "KEY": KEY}
    loop, rows = re.findall(r"```python\n(.*?)```", Path(os.environ["PAGE"]).read_text("utf-8"), re.DOTALL)
    exec(loop, found)
    row = {"task": "sum-2", "uid": "page", "session_id": 0, "global_steps": 0}
    found["Errands"].step_of = lambda self, version: 0
    [output] = asyncio.run(made_loop(found["Errands"]).run(SAMPLING, **row))
    assert sum(output.response_mask) > 0
    exec(rows, found)
    assert [len(group) for group in found["groups"]] == [2, 2]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_task_is_a_column_or_in_the_extra_info_or_the_prompt() -> None:
    said = {"role": "user", "content": "Add."}
    assert task_in({"task": {"id": "sum-1"}, "raw_prompt": [said]}) == {"id": "sum-1"}
    assert task_in({"extra_info": {"task": "sum-2"}, "raw_prompt": [said]}) == "sum-2"
    assert task_in({"raw_prompt": [said]}) == "Add."
    with pytest.raises(errors.InvalidRequest, match="column `task`"):
        task_in({"raw_prompt": [said, said], "index": 4})
