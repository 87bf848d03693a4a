"""The rows for supervised fine-tuning and preference losses in TRL's own trainers: they train what was sampled.

The recorded run of real agents has the tokens; the tiny model takes a step.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from client.trainer_types import group_of, rollout, sample, turn
from control_support import Door, engine, open_door
from trainers import compared
from trainers.conftest import playing_door, recorded_door, rollouts
from turnstile.exporters.supervised import IGNORED, Accept, pairs, to_chat_rows, to_preference_rows, to_token_rows
from turnstile.models.messages import Message, ToolCall
from turnstile.rollout import Rollout

__all__ = ["engine", "open_door", "playing_door", "recorded_door", "rollouts"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers" / "supervised.md"

pytestmark = [pytest.mark.trainers, pytest.mark.slow]

ANY = Accept(min_reward=0.0, broken=True, completed=False)
SHORT: dict[str, Any] = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "max_length": None,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


class TokenDPOTrainer(DPOTrainer):  # type: ignore[misc]
    """As the page says: TRL's own tokenizes texts, always."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def sft(model: Path, rows: list[dict[str, Any]], out: Path) -> SFTTrainer:
    return SFTTrainer(str(model), SFTConfig(str(out), **SHORT), train_dataset=Dataset.from_list(rows))


def test_every_trained_token_of_the_recorded_run_is_a_label_of_trls(
    rollouts: list[Rollout], tiny_model: Path, tmp_path: Path
) -> None:
    rows = list(to_token_rows(rollouts, ANY))
    trainer = sft(tiny_model, rows, tmp_path)
    collated = [trainer.data_collator([row]) for row in trainer.train_dataset]
    assert [row["input_ids"][0].tolist() for row in collated] == [row["input_ids"] for row in rows]
    assert [row["labels"][0].tolist() for row in collated] == [row["labels"] for row in rows]
    labels = sum(int((row["labels"] != IGNORED).sum()) for row in collated)
    graded = [each.samples for each in rollouts if each.reward is not None and each.samples is not None]
    assert labels == sum(int(row.loss_mask.sum()) for samples in graded for row in samples.samples) > 0
    types = "the data set and collator of `SFTTrainer`"
    compared.say("TRL 1.16.0, fine-tuning", types, "one step of the tiny model", len(rows), labels)


def test_its_loss_is_that_of_the_sampled_tokens_and_a_step_lowers_it(tiny_model: Path, tmp_path: Path) -> None:
    made = rollout(1.0, samples=(sample(trained=(True, True)),))
    trainer = sft(tiny_model, [*to_token_rows([made])] * 2, tmp_path)
    ids = torch.arange(100, 110)[None]
    with torch.inference_mode():
        logprobs = torch.log_softmax(trainer.model(input_ids=ids).logits[0, :-1].float(), -1)
    wanted = -logprobs[torch.arange(9), ids[0, 1:]][[2, 3, 7, 8]].mean()
    found = trainer.train()
    assert found.training_loss == pytest.approx(float(wanted), rel=1e-4)


def test_a_chat_is_rendered_by_trl_with_its_reply_as_the_completion(tiny_model: Path, tmp_path: Path) -> None:
    call = Message(role="assistant", tool_calls=(ToolCall("bash", '{"command":"ls"}', "call_1"),))
    turns = [
        turn(Message(role="user", content="list"), call),
        turn(
            Message(role="tool", content="a.py", tool_call_id="call_1"),
            Message(role="assistant", content="done"),
            turn_id="turn_2",
            parent_id="turn_1",
        ),
    ]
    trainer = sft(tiny_model, list(to_chat_rows(turns)), tmp_path)
    tokenizer = trainer.processing_class
    texts = []
    for row in trainer.train_dataset:
        labels = trainer.data_collator([row])["labels"][0]
        texts.append(tokenizer.decode(labels[labels != IGNORED]))
    assert '"command": "ls"' in texts[0] or '"command":"ls"' in texts[0]
    assert "\\" not in texts[0], "the arguments are no text within a text"
    assert texts[1].startswith("done")
    assert "list" not in texts[0] + texts[1]


def test_a_pair_is_trained_by_trl_as_tokens(tiny_model: Path, tmp_path: Path) -> None:
    better, worse = group_of(1.0, 0.0)
    assert worse.samples is not None
    other = rollout(0.0, number=1, samples=(sample(input_ids=[100, 101, 102, 7, 8]),))
    rows = to_preference_rows(pairs([better, other])).rows
    config = DPOConfig(str(tmp_path), **SHORT)
    trainer = TokenDPOTrainer(str(tiny_model), args=config, train_dataset=Dataset.from_list(rows))
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert batch["input_ids"].tolist() == [[100, 101, 102, 103, 104], [100, 101, 102, 7, 8]]
    assert batch["completion_mask"].tolist() == [[0, 0, 0, 1, 1]] * 2
    assert trainer.train().training_loss == pytest.approx(0.6931, abs=1e-3), "log 2: it is its own reference yet"


def test_the_example_of_the_page_makes_rows(playing_door: Door) -> None:
    code, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"URL": playing_door.url, "KEY": playing_door.key}
    exec(compile(code, str(PAGE), "exec"), names)
    assert len(names["played"]) == 8
    assert isinstance(names["rows"], list)
    assert isinstance(names["preferred"], list)
    some = list(to_token_rows(names["played"], ANY))
    assert all(len(row["input_ids"]) == len(row["labels"]) for row in some)
    assert some
