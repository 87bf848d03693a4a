"""TRL's weight transfer: the folders it makes, and that a real engine has what was sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from control_support import Door
from turnstile import Client, ServerUnavailable, TurnstileError
from turnstile.exporters.trl import TurnstileServers, TurnstileWeightTransfer
from turnstile.exporters.trl.weights import WrongWeights, write_model_folder

pytestmark = pytest.mark.trainers

BIG = 2**30


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def changed(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor + 0.5 for name, tensor in weights_of(folder).items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# Folders


@pytest.mark.parametrize("shard_bytes", [BIG, 50_000], ids=["one-file", "shards"])
def test_a_folder_loads_as_a_model_with_the_weights_that_were_sent(
    tiny_model: Path, tmp_path: Path, shard_bytes: int
) -> None:
    sent = changed(tiny_model)
    write_model_folder(tmp_path / "v1", tiny_model, iter(sent.items()), shard_bytes=shard_bytes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v1", dtype=torch.float32)
    assert same(dict(model.named_parameters()), sent)
    assert AutoTokenizer.from_pretrained(tmp_path / "v1").chat_template
    assert (len(list((tmp_path / "v1").glob("*.safetensors"))) > 1) == (shard_bytes != BIG)
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_weights_that_the_trainer_does_not_send_are_those_of_the_model(tiny_model: Path, tmp_path: Path) -> None:
    sent = changed(tiny_model)
    frozen = {name: sent.pop(name) for name in list(sent)[:3]}
    write_model_folder(tmp_path / "v1", tiny_model, iter(sent.items()), shard_bytes=BIG)
    own = weights_of(tiny_model)
    assert same(weights_of(tmp_path / "v1"), sent | {name: own[name] for name in frozen})


def test_a_weight_that_the_model_does_not_have_is_refused_and_nothing_is_left(
    tiny_model: Path, tmp_path: Path
) -> None:
    sent = {**changed(tiny_model), "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2)}
    with pytest.raises(WrongWeights, match=r"experts\.gate_up_proj"):
        write_model_folder(tmp_path / "v1", tiny_model, iter(sent.items()), shard_bytes=BIG)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_the_embedding_in_the_model_is_not_kept_as_the_head(tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "tied"
    base.mkdir()
    config = json.loads((tiny_model / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save_file(weights_of(tiny_model), base / "model.safetensors", metadata={"format": "pt"})
    sent = changed(tiny_model)
    del sent["lm_head.weight"]  # named_parameters() gives a tied weight once
    write_model_folder(tmp_path / "v1", base, iter(sent.items()), shard_bytes=BIG)
    assert same(weights_of(tmp_path / "v1"), sent)


# Engines


@contextmanager
def transferring(door: Door, tiny_model: Path, folder: Path, **options: Any) -> Iterator[TurnstileWeightTransfer]:
    servers = TurnstileServers(door.url, key=door.key)
    transfer = TurnstileWeightTransfer(servers, model=tiny_model, folder=folder, **options)
    transfer.init_weight_transfer()
    try:
        yield transfer
    finally:
        transfer.destroy()


def send(transfer: TurnstileWeightTransfer, weights: dict[str, torch.Tensor]) -> None:
    """As the trainer does."""
    transfer.pause()
    transfer.send_weights(iter(weights.items()))
    transfer.resume()


def test_the_engine_has_what_was_sent_under_trls_number(
    door: Door, client: Client, tiny_model: Path, tmp_path: Path
) -> None:
    with transferring(door, tiny_model, tmp_path, keep=2) as transfer:
        names = []
        for number in (1, 2, 3):
            send(transfer, changed(tiny_model))
            (engine,) = client.engine().values()
            assert engine.weight_version is not None
            assert engine.weight_version.endswith(f"-{number}")
            assert transfer.version == number
            assert engine.paused is False
            names.append(engine.weight_version)
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]


def test_two_runs_on_one_server_do_not_share_names(door: Door, tiny_model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with transferring(door, tiny_model, tmp_path) as transfer:
            send(transfer, weights_of(tiny_model))
    assert len(list(tmp_path.iterdir())) == 2


def test_the_engine_may_see_the_folder_under_another_path(
    door: Door, client: Client, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "seen").symlink_to(tmp_path / "made")
    options = {"engine_folder": tmp_path / "seen"}
    with transferring(door, tiny_model, tmp_path / "made", **options) as transfer:
        send(transfer, weights_of(tiny_model))
    (engine,) = client.engine().values()
    assert engine.weight_version is not None
    assert engine.weight_version.endswith("-1")


def test_weights_that_an_engine_refuses_are_an_error_and_no_engine_is_left_paused(
    door: Door, client: Client, tiny_model: Path, tmp_path: Path
) -> None:
    wrong = {name: torch.zeros(3) for name in weights_of(tiny_model)}
    with transferring(door, tiny_model, tmp_path) as transfer:
        transfer.pause()
        with pytest.raises(TurnstileError):
            transfer.send_weights(iter(wrong.items()))
        assert transfer.version == 0
    (engine,) = client.engine().values()
    assert engine.paused is False


def test_a_server_that_does_not_answer_and_a_model_that_is_none_are_told_at_the_start(
    door: Door, tiny_model: Path, tmp_path: Path
) -> None:
    nobody = TurnstileServers("http://127.0.0.1:9", key="k" * 20)
    with pytest.raises(ServerUnavailable):
        TurnstileWeightTransfer(nobody, model=tiny_model, folder=tmp_path).init_weight_transfer()
    with pytest.raises(WrongWeights, match="no model folder"), transferring(door, tmp_path, tmp_path):
        pass
