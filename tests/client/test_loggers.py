"""The loggers of rollouts, with the real packages: what they say is what ``statistics_by`` says, read back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX import SummaryWriter
from test_hostile_text import ALL, harmless
from wandb.proto import wandb_internal_pb2

from client.trainer_types import rollout
from control_support import Door
from turnstile import Client
from turnstile.loggers.base import EpisodeLine, RolloutLogger
from turnstile.loggers.tensorboard import TEXT, TensorBoardLogger
from turnstile.loggers.wandb import STEP, TABLE, WandbLogger
from turnstile.models import EpisodeStats, EpisodeStatus, ErrorInfo, Fault, TaskRef, statistics_by, summary_of
from turnstile.rollout import Rollout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loggers.md"
VIEWER = "http://127.0.0.1:8000"
HOSTILE = f"<script>alert(1)</script> | [x](javascript:alert(1)) **b** {ALL}"


def stats(**more: Any) -> EpisodeStats:
    return EpisodeStats(sampled_tokens=10, trained_tokens=8, turns=2, **more)


def rollouts_of_step(step: int) -> list[Rollout]:
    """Two groups of two, one flat; a rollout that failed and one that never began."""
    untrained = {"tool_call_invalid": 2}
    made = [
        rollout(1.0, group="g", number=0, stats=stats(untrained=untrained, breaks={"history_edited": 1})),
        rollout(0.0, group="g", number=1, stats=stats(untrained=untrained)),
        rollout(0.0, group="h", number=0),
        rollout(0.0, group="h", number=1),
    ]
    failed = ErrorInfo(type="sandbox_failed", message=HOSTILE, fault=Fault.INFRASTRUCTURE)
    if step == 0:
        made.append(rollout(None, group="i", status=EpisodeStatus.FAILED, error=failed))
        made.append(Rollout(TaskRef(id="t"), "j", 0, "r", None, None, failed, 3, 1.0))
    return made


class Kept(RolloutLogger):
    """Writes nowhere."""

    lines: list[EpisodeLine]

    def write(self, figures: Mapping[str, float], lines: list[EpisodeLine], step: int) -> None:
        self.lines = lines


def test_the_figures_are_those_of_statistics_by() -> None:
    given = rollouts_of_step(0)
    figures = Kept().log(given, step=0)
    total = statistics_by([summary_of(each.episode) for each in given if each.episode is not None]).total
    assert figures["turnstile/reward/mean"] == total.reward_mean == 0.25
    assert figures["turnstile/reward/std"] == total.reward_std
    assert {name: value for name, value in figures.items() if "pass_at" in name} == {
        f"turnstile/pass_at/{each.k}": each.value for each in total.pass_at_k
    }
    assert figures["turnstile/tokens/trained_share"] == total.trained_share == 0.8
    assert figures["turnstile/untrained/tool_call_invalid"] == 4
    assert figures["turnstile/breaks"] == figures["turnstile/breaks/history_edited"] == 1
    assert (figures["turnstile/episodes"], figures["turnstile/graded"], figures["turnstile/solved"]) == (5, 4, 1)
    assert figures["turnstile/errors/sandbox_failed"] == figures["turnstile/faults/infrastructure"] == 1
    assert figures["turnstile/rollouts/never_begun"] == 1
    assert figures["turnstile/rollouts/further_attempts"] == 2
    assert set(figures) >= {f"turnstile/seconds_mean/{part}" for part in total.seconds}


def test_a_count_goes_on_as_zero_and_a_mean_of_nothing_is_left_out() -> None:
    logger = Kept()
    logger.log(rollouts_of_step(0), step=0)
    assert logger.log(rollouts_of_step(1), step=1)["turnstile/errors/sandbox_failed"] == 0
    nothing = logger.log([], step=2)
    assert "turnstile/reward/mean" not in nothing
    assert nothing["turnstile/episodes"] == 0


def test_episodes_and_summaries_do_as_well_as_rollouts() -> None:
    episodes = [each.episode for each in rollouts_of_step(0) if each.episode is not None]
    found = Kept().log(episodes, step=0)
    assert found == Kept().log(map(summary_of, episodes), step=0)
    assert found.items() <= Kept().log(rollouts_of_step(0), step=0).items()


def test_as_many_episodes_are_shown_as_asked_for_and_lead_to_the_viewer() -> None:
    logger = Kept(viewer=f"{VIEWER}/", episodes=2)
    logger.log(rollouts_of_step(0), step=0)
    assert [(each.reward, each.link) for each in logger.lines] == [
        (1.0, f"{VIEWER}/ui/episodes/ep_g-0"),
        (0.0, f"{VIEWER}/ui/episodes/ep_g-1"),
    ]
    assert all(harmless(each.why) for each in logger.lines)


# TensorBoard


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    with TensorBoardLogger(tmp_path, viewer=VIEWER) as logger:
        logged = [logger.log(rollouts_of_step(step), step) for step in range(2)]
    found = events(tmp_path)
    assert set(found.Tags()["scalars"]) == set(logged[0])
    for name in logged[0]:
        scalars = [(each.step, each.value) for each in found.Scalars(name)]
        assert scalars == [(step, pytest.approx(each[name])) for step, each in enumerate(logged) if name in each]
    first, _ = found.Tensors(f"{TEXT}/text_summary")
    text = first.tensor_proto.string_val[0].decode()
    assert f"[ep\\_g\\-0](<{VIEWER}/ui/episodes/ep_g-0>)" in text
    assert len(text.splitlines()) == 2 + 5
    assert not re.search(r"(?<!\\)\]\(javascript|<script|(?<!\\)\*\*", text)
    assert harmless(text)


def test_a_writer_that_was_given_stays_open(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    with TensorBoardLogger(writer) as logger:
        logger.log(rollouts_of_step(0), step=3)
    writer.add_scalar("trainer/loss", 1.0, 4)
    writer.close()
    assert {"trainer/loss", "turnstile/reward/mean"} <= set(events(tmp_path).Tags()["scalars"])


# Weights & Biases


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the run's files; nothing is sent."""
    for name, value in {
        "MODE": "offline",
        "DIR": str(tmp_path),
        "ERROR_REPORTING": "false",
        "SILENT": "true",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


def records(file: bytes) -> Iterator[bytes]:
    """Of an offline run's file: a head of 7 bytes, then LevelDB's log format (blocks of 32 KiB, whose pieces have
    a checksum, a length and a kind: 1 and 4 end a record)."""
    at, record = 7, b""
    while at + 7 <= len(file):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(file[at + 4 : at + 6], "little"), file[at + 6]
        record += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """What the file of an offline run says was logged, in order."""
    wandb.teardown()  # waits for the process that writes it
    (file,) = folder.rglob("*.wandb")
    found = []
    for each in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(each)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


@pytest.mark.slow
def test_an_offline_run_of_wandb_has_what_was_logged(offline: Path) -> None:
    with wandb.init(project="test") as run:
        logger = WandbLogger(run, viewer=VIEWER)
        run.log({"the trainer's own": 1.0}, step=50)
        logged = [logger.log(rollouts_of_step(step), step) for step in range(2)]
    rows = [row for row in history(offline) if STEP in row]
    assert [row[STEP] for row in rows] == [0, 1]
    for row, figures in zip(rows, logged, strict=True):
        assert {name: row[name] for name in figures} == figures
    tables = sorted(offline.rglob("*.table.json"))
    assert len(tables) == 2
    assert rows[0][f"{TABLE}/nrows"] == 5
    shown = json.loads(next(path for path in tables if "sandbox_failed" in path.read_text()).read_text())
    cells = [dict(zip(shown["columns"], row, strict=True)) for row in shown["data"]]
    assert {cell["link"] for cell in cells} >= {f"{VIEWER}/ui/episodes/ep_g-0"}
    assert all(harmless(cell["why"]) for cell in cells)


# The page


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_examples_of_the_page_run(
    launching_door: Door, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(offline)
    steps, board, callback = examples()
    names: dict[str, Any] = {"URL": launching_door.url, "KEY": launching_door.key}
    exec(compile(steps, str(PAGE), "exec"), dict(names))
    found = events(offline / "runs" / "mine").Scalars("turnstile/episodes")
    assert [(each.step, each.value) for each in found] == [(0, 4), (1, 4)]
    exec(compile(board, str(PAGE), "exec"), dict(names))
    assert [row["turnstile/episodes"] for row in history(offline)] == [2]
    with Client(launching_door.url, key=launching_door.key) as client:
        recorded = sum(each.used is not None for each in client.summaries())
    assert recorded == 8, "those of the first example"
    exec(compile(callback, str(PAGE), "exec"), names)
    state = type("State", (), {"global_step": 7})
    names["callback"].on_log(None, state, None)
    names["callback"].on_log(None, state, None)
    names["callback"].client.close()
    (first, second) = events(offline / "runs" / "trl").Scalars("turnstile/episodes")
    assert (first.value, second.value) == (recorded, 0)
