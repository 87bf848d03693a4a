"""Turnstile as the environment of TRL's own loop: real episodes, tools in real sandboxes, real grading."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from control_support import Door, EngineProcess, running_door
from trl_grpo.on_cpu import CPU_ARGUMENTS
from turnstile import Client, InvalidRequest, ServerUnavailable
from turnstile import Timeout as TurnstileTimeout
from turnstile.exporters.trl import (
    AnswerEnvironment,
    SandboxEnvironment,
    TurnstileEnvironments,
    TurnstileServers,
    task_dataset,
)
from turnstile.exporters.trl.environment import ToolFailed
from turnstile.models import EpisodeStatus

pytestmark = pytest.mark.trainers

TASKS: list[dict[str, Any]] = [
    {"id": "sum", "instruction": "2 + 3? Submit it.", "answer": {"value": "5"}},
    {
        "id": "read-it",
        "instruction": "Submit what is in a.txt.",
        "base": {"inline": {"a.txt": "41\n"}},
        "answer": {"value": "42"},
    },
]


@pytest.fixture(scope="module")
def sandboxed(own_engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    source = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    source.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    options = {"sandboxes": {"kind": "local"}, "tasks": {"sources": [source]}, "episodes": {"max_running": 1}}
    with running_door(own_engine, tmp_path_factory.mktemp("data"), **options) as door:
        yield door


@pytest.fixture
def servers(sandboxed: Door) -> TurnstileServers:
    return TurnstileServers(sandboxed.url, key=sandboxed.key)


@pytest.fixture
def environments(servers: TurnstileServers) -> Iterator[TurnstileEnvironments]:
    with TurnstileEnvironments(servers) as made:
        yield made


def status_of_all(servers: TurnstileServers) -> set[EpisodeStatus]:
    with servers.client() as client:
        return {episode.status for episode in client.episodes()}


def test_the_methods_work_in_the_episodes_sandbox_and_its_grader_gives_the_reward(
    environments: TurnstileEnvironments,
) -> None:
    environment = environments()
    assert isinstance(environment, SandboxEnvironment)
    assert environment.reset(task_id="read-it", prompt=[{"role": "user", "content": "…"}]) is None
    assert environment.bash("cat a.txt") == "41\n[exit status 0]"
    assert "Replaced 1" in environment.edit_file("a.txt", "41", "42")
    assert environment.read_file("a.txt", limit=1) == "     1\t42"
    environment.write_file("b/c.txt", "x")
    assert environment.bash("cat b/c.txt", timeout_s=10) == "x\n[exit status 0]"
    with pytest.raises(ToolFailed, match=r"no-such\.txt"):
        environment.read_file("no-such.txt")
    environment.submit("42")
    assert environment.get_reward() == 1.0
    with pytest.raises(ToolFailed, match="no episode"):
        environment.bash("true")
    environment.reset(task_id="read-it")
    assert environment.get_reward() == 0.0


def test_work_that_nobody_graded_has_no_reward(environments: TurnstileEnvironments) -> None:
    environment = environments()
    environment.reset(task={"instruction": "Say anything."})
    environment.submit("anything")
    assert environment.get_reward() is None
    assert environment.get_reward() is None


def test_an_episode_that_ended_by_itself_is_told_to_the_model(
    environments: TurnstileEnvironments, servers: TurnstileServers
) -> None:
    environment = environments()
    environment.reset(task_id="sum")
    with servers.client() as client:
        (running,) = client.episodes(status="running")
        client.episode(running.episode_id).cancel()
    with pytest.raises(ToolFailed, match="ended"):
        environment.submit("5")
    assert environment.get_reward() is None


def test_a_further_reset_and_the_end_of_the_block_cancel_what_was_open(servers: TurnstileServers) -> None:
    with TurnstileEnvironments(servers, metadata={"test": "left"}) as environments:
        environment = environments()
        environment.reset(task_id="sum")
        environment.reset(task_id="sum")
    with servers.client() as client:
        ours = [episode.status for episode in client.episodes() if episode.metadata.get("test") == "left"]
    assert ours == [EpisodeStatus.CANCELLED] * 2


def test_one_episode_that_cannot_be_cancelled_keeps_no_other_open(
    servers: TurnstileServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is cancelled first; its failure is raised all the same."""

    def refuse() -> None:
        raise ServerUnavailable("away")

    environments = TurnstileEnvironments(servers)
    first, second = environments(), environments()
    first.reset(task_id="sum")
    monkeypatch.setattr(second, "_cancel", refuse)
    with pytest.raises(ServerUnavailable):
        environments.close()
    assert not {EpisodeStatus.QUEUED, EpisodeStatus.RUNNING} & status_of_all(servers)


def test_an_episode_that_the_server_has_no_room_to_run_is_an_error_with_the_reason(
    servers: TurnstileServers,
) -> None:
    with TurnstileEnvironments(servers, start_s=1.0) as environments:
        first, second = environments(), environments()
        first.reset(task_id="read-it")
        with pytest.raises(TurnstileTimeout, match="max_running"):
            second.reset(task_id="read-it")
    assert not {EpisodeStatus.QUEUED, EpisodeStatus.RUNNING} & status_of_all(servers)


def test_a_row_without_a_task_and_a_task_that_is_none_are_refused(environments: TurnstileEnvironments) -> None:
    with pytest.raises(InvalidRequest, match="names no task"):
        environments().reset(prompt="…")
    with pytest.raises(InvalidRequest, match="no-such-task"):
        environments().reset(task_id="no-such-task")


def test_the_tools_that_trl_finds_are_those_of_the_tool_door() -> None:
    """TRL takes every public method, and its signature and docstring for the schema."""

    def offered(kind: type) -> dict[str, Any]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        public = [(name, m) for name, m in methods if name[0] != "_" and name not in ("reset", "get_reward")]
        return {name: get_json_schema(method)["function"]["parameters"] for name, method in public}

    assert set(offered(AnswerEnvironment)) == {"submit"}
    tools = offered(SandboxEnvironment)
    assert {name: (set(shape["properties"]), shape["required"]) for name, shape in tools.items()} == {
        "bash": ({"command", "timeout_s"}, ["command"]),
        "read_file": ({"path", "offset", "limit"}, ["path"]),
        "write_file": ({"path", "content"}, ["path", "content"]),
        "edit_file": ({"path", "old", "new", "replace_all"}, ["path", "old", "new"]),
        "submit": ({"answer"}, ["answer"]),
    }


def test_trls_synchronous_trainer_takes_them(servers: TurnstileServers, tiny_model: Path, tmp_path: Path) -> None:
    with servers.client() as client:
        tasks = [task for task in client.tasks() if task.id == "sum"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.response_template = qwen3_template  # TRL knows templates of the Hub's models; this one is alike
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=8,
        **CPU_ARGUMENTS,
        model_init_kwargs={"dtype": torch.float32},
    )
    with TurnstileEnvironments(servers, sandbox=False, metadata={"test": "trained"}) as environments:
        trainer = GRPOTrainer(
            model=str(tiny_model),
            args=arguments,
            train_dataset=task_dataset(tasks),
            processing_class=tokenizer,
            environment_factory=environments,
        )
        trainer.train()
    assert trainer.state.log_history[0]["rewards/AnswerEnvironment/mean"] == 0.0
    with Client(servers.urls, key=servers.key) as client:
        ours = [episode for episode in client.episodes() if episode.metadata.get("test") == "trained"]
    assert [(episode.status, episode.reward) for episode in ours] == [(EpisodeStatus.COMPLETED, 0.0)] * 2
