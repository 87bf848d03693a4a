"""The code of docs/exporters.md, section TRL: it runs as it stands there, up to what needs a GPU and hours."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trl
from trl.experimental import async_grpo

from control_support import Door
from turnstile import Client
from turnstile.exporters.trl import TurnstileServers

pytestmark = pytest.mark.trainers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exporters.md"


def examples() -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition("\n## TRL\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


class Fitted:
    """In the place of a trainer: takes what the real one takes, and begins the parts as that does."""

    real: type
    made: list[dict[str, Any]]

    def __init__(self, **given: Any) -> None:
        inspect.signature(self.real.__init__).bind(self, **given)
        self.made.append(given)

    def train(self) -> None:
        given = self.made[-1]
        if "environment_factory" in given:
            given["environment_factory"]()
            return
        assert given["args"].token_budget > 0
        transfer = given["weight_transfer"]
        transfer.init_weight_transfer()
        transfer.destroy()
        given["rollout_worker"].stop()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    found: list[dict[str, Any]] = []
    for home, name in ((async_grpo, "AsyncGRPOTrainer"), (trl, "GRPOTrainer")):
        fitted = type(name, (Fitted,), {"real": getattr(home, name), "made": found})
        monkeypatch.setattr(home, name, fitted)
    for home, name in ((async_grpo, "AsyncGRPOConfig"), (trl, "GRPOConfig")):
        monkeypatch.setattr(home, name, partial(getattr(home, name), use_cpu=True))
    return found


def test_both_examples_fit_trl_and_turnstile(door: Door, tiny_model: Path, made: list[dict[str, Any]]) -> None:
    first, second = examples()
    names: dict[str, Any] = {"URL": door.url, "KEY": door.key, "MODEL": str(tiny_model), "__name__": "__main__"}
    exec(compile(first, str(PAGE), "exec"), names)
    assert isinstance(names["servers"], TurnstileServers)
    exec(compile(second, str(PAGE), "exec"), names)
    with Client(door.url, key=door.key) as client:
        ids = [task.id for task in client.tasks()]
    assert [list(given["train_dataset"]["task_id"]) for given in made] == [ids, ids]
