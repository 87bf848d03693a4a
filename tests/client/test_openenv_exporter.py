"""The OpenEnv exporter without openenv: what is pure, and its sessions over stand-ins for openenv's types.

`agents/test_openenv_harness.py` plays it with openenv's own types and TRL's own worker.
"""

from __future__ import annotations

import abc
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.stub_server import INFRASTRUCTURE, Answer, Play, StubServer
from client.trainer_types import outline
from control_support import Door, running_app
from turnstile import Client, ClientSettings, errors
from turnstile.exporters.openenv import DrawnTask, sampling_of, task_of_prompt, training_turns
from turnstile.exporters.openenv.arguments import task_of_seed
from turnstile.exporters.openenv.trace import TurnFields
from turnstile.models import (
    EpisodeStats,
    EpisodeStatus,
    ErrorInfo,
    Fault,
    Message,
    Sample,
    SampleSet,
    ToolCall,
    TurnFacts,
    TurnSpan,
)
from turnstile.models.draw import draw_position, generator_of
from waiting import wait_until_sync

QUICK = ClientSettings(retries=0, poll_s=0.2, outage_s=0.2, backoff_s=0.01, backoff_max_s=0.05)


# The trace ----------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """An episode: its turns, and the rows that a server exports of them."""

    turns: list[TurnFacts]
    exported: SampleSet


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree of turns. A turn is trained on the first path that has it, unless it is trained nowhere."""
    count = draw(st.integers(1, 9))
    parents = [draw(st.one_of(st.none(), st.integers(0, at - 1))) if at else None for at in range(count)]
    trainable = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    tokens = {at: (draw(st.integers(1, 3)), draw(st.integers(1, 3))) for at in range(count)}
    # All context ids are alike, as those of a chat template are; completions of siblings may be, too.
    contents = {
        at: ([7] * context, [draw(st.integers(0, 2)) for _ in range(m)]) for at, (context, m) in tokens.items()
    }
    turns = [
        outline(
            Message("user", f"question {at}"),
            Message("assistant", f"answer {at}"),
            turn_id=f"turn_{at}",
            seq=at,
            parent_id=None if parent is None else f"turn_{parent}",
            weight_spans=[{"start": 0, "end": tokens[at][1], "version": f"v{at}"}],
            completion_ids=contents[at][1],
            logprobs=[-0.5] * tokens[at][1],
        )
        for at, parent in enumerate(parents)
    ]
    done: set[int] = set()
    rows = []
    for leaf in range(count):
        if leaf in parents:
            continue
        path: list[int] = []
        above: int | None = leaf
        while above is not None:
            path.insert(0, above)
            above = parents[above]
        rows.append(_row(path, contents, {at for at in path if trainable[at]} - done, draw(st.booleans())))
        done |= {at for at in path if trainable[at]}
    kept = tuple(row for row in rows if row.loss_mask.any())
    return Tree(turns, SampleSet(samples=kept, untrained=(), stats=EpisodeStats()))


def _row(
    path: list[int], contents: dict[int, tuple[list[int], list[int]]], trained: set[int], main: bool
) -> Sample:
    ids: list[int] = []
    mask: list[int] = []
    spans = []
    for at in path:
        context, completion = contents[at]
        begin, start = len(ids), len(ids) + len(context)
        ids += context + completion
        mask += [0] * len(context) + [int(at in trained)] * len(completion)
        spans.append(
            TurnSpan(turn_id=f"turn_{at}", context_start=begin, start=start, end=len(ids), trained=at in trained)
        )
    return Sample(
        sample_id=f"smp_{path[-1]}",
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.uint8),
        logprobs=np.array([-0.5 * each for each in mask], np.float32),
        weight_version=np.array([each - 1 for each in mask], np.int32),
        weight_version_names=("v0",),
        turn_spans=tuple(spans),
        kind="main" if main else "subagent",
        episode_id="ep_1",
        rollout_id="r",
        finish_reason="stop",
        status="completed",
    )


def chained(turns: list[TurnFields]) -> list[tuple[list[int], list[int]]]:
    """Rows (ids, mask) by the rule of TRL 1.16.0 without a threshold: a turn whose prompt begins with all tokens
    of the last row goes on with it; any other one begins a row."""
    rows: list[tuple[list[int], list[int]]] = []
    for turn in turns:
        prompt, completion = turn["prompt_token_ids"], turn["completion_token_ids"]
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        ids, mask = rows[-1]
        mask += [0] * (len(prompt) - len(ids)) + turn["loss_mask"][len(prompt) :]
        ids += prompt[len(ids) :] + completion
    return rows


@given(trees())
def test_each_trained_turn_is_there_once_and_paths_are_rows_of_the_trainer(tree: Tree) -> None:
    turns = training_turns(tree.exported, tree.turns)
    spans = [(span, sample) for sample in tree.exported.samples for span in sample.turn_spans if span.trained]
    assert sorted(turn["node_id"] for turn in turns) == sorted(span.turn_id for span, _ in spans)
    by_id = {turn["node_id"]: turn for turn in turns}
    for span, sample in spans:
        turn = by_id[span.turn_id]
        assert turn["prompt_token_ids"] + turn["completion_token_ids"] == sample.input_ids[: span.end].tolist()
        assert turn["loss_mask"] == [0] * span.start + [1] * (span.end - span.start)
        assert turn["per_token_logps"] == [-0.5] * (span.end - span.start)
    rows = chained(turns)
    assert len(rows) <= len(tree.exported.samples)
    assert sum(sum(mask) for _, mask in rows) == sum(
        int(sample.loss_mask.sum()) for sample in tree.exported.samples
    )


@given(trees())
def test_paths_stand_together_and_the_main_conversation_is_last(tree: Tree) -> None:
    turns = training_turns(tree.exported, tree.turns)
    branches = [turn["metadata"]["branch"] for turn in turns]
    assert branches == sorted(branches)
    kinds = [turn["metadata"]["kind"] for turn in turns]
    assert kinds == sorted(kinds, key=lambda kind: kind == "main")


@given(trees())
def test_a_request_has_the_whole_conversation_of_its_path(tree: Tree) -> None:
    recorded = {turn.turn_id: turn for turn in tree.turns}
    for turn in training_turns(tree.exported, tree.turns):
        path = [recorded[turn["node_id"]]]
        while (parent := path[0].parent_id) is not None:
            path.insert(0, recorded[parent])
        said = [message for each in path for message in (f"question {each.seq}", f"answer {each.seq}")]
        assert [message["content"] for message in turn["request"]["messages"]] == said[:-1]
        assert turn["response"]["choices"][0]["message"]["content"] == said[-1]
        assert [span["version"] for span in turn["metadata"]["weight_versions"]] == [f"v{path[-1].seq}"]


def test_calls_are_written_as_openai_writes_them() -> None:
    call = ToolCall("read", '{"path": "a"}', id="call_1")
    reply = Message("assistant", "", reasoning="I read.", tool_calls=(call,))
    first = outline(Message("user", "Read a."), reply)
    result = Message("tool", "text", tool_call_id="call_1")
    second = outline(result, Message("assistant", "Done."), turn_id="turn_2", seq=1, parent_id="turn_1")
    row = _row([1, 2], {1: ([7], [1]), 2: ([7], [2])}, {1, 2}, main=True)
    one, two = training_turns(SampleSet(samples=(row,), untrained=(), stats=EpisodeStats()), [first, second])
    written = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    said = {"role": "assistant", "content": "", "reasoning_content": "I read.", "tool_calls": [written]}
    assert one["request"]["messages"] == [{"role": "user", "content": "Read a."}]
    assert one["response"]["choices"] == [{"index": 0, "message": said, "finish_reason": "tool_calls"}]
    assert two["request"]["messages"][1:] == [said, {"role": "tool", "content": "text", "tool_call_id": "call_1"}]
    assert two["response"]["choices"][0]["finish_reason"] == "stop"
    assert two["response"]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def test_ids_without_a_token_are_masked_and_no_logprob_is_above_zero() -> None:
    row = _row([1], {1: ([7], [1, 2, 3])}, {1}, main=True).model_copy(
        update={
            "loss_mask": np.array([0, 1, 0, 1], np.uint8),
            "logprobs": np.array([0.0, 5e-7, 0.0, -2.0], np.float32),
        }
    )
    said = outline(
        Message("user", "a"),
        Message("assistant", "b"),
        completion_ids=[1, 2, 3],
        logprobs=[5e-7, -9.0, -2.0],
        weight_spans=[{"start": 0, "end": 2, "version": "v1"}, {"start": 2, "end": 3, "version": "v2"}],
        without_token=[1],
    )
    [turn] = training_turns(SampleSet(samples=(row,), untrained=(), stats=EpisodeStats()), [said])
    assert (turn["loss_mask"], turn["per_token_logps"]) == ([0, 1, 0, 1], [0.0, 0.0, -2.0])
    assert turn["metadata"]["weight_versions"] == [
        {"start": 0, "end": 2, "version": "v1"},
        {"start": 2, "end": 3, "version": "v2"},
    ]


def test_turns_of_another_episode_are_refused() -> None:
    row = _row([1], {1: ([7], [1])}, {1}, main=True)
    with pytest.raises(KeyError, match="turn_1"):
        training_turns(SampleSet(samples=(row,), untrained=(), stats=EpisodeStats()), [])


def test_recorded_turns_become_a_trace_with_and_without_their_arrays(door: Door) -> None:
    with Client(door.url, key=door.key) as client:
        episode = client.create_episode("Say something.")
        made = [door.add_turn(episode.episode_id) for _ in range(3)]  # three conversations
        episode.finish()
        exported = episode.samples()
        turns = training_turns(exported, episode.turn_outlines())
        assert turns == training_turns(exported, episode.turns())
        (engine,) = client.engine().values()
    assert sorted(turn["node_id"] for turn in turns) == sorted(made)
    assert [ids for ids, _ in chained(turns)] == [
        sample.input_ids.tolist() for sample in sorted(exported.samples, key=lambda each: each.kind == "main")
    ]
    for turn in turns:
        assert [message["role"] for message in turn["request"]["messages"]] == ["user"]
        assert turn["request"]["max_tokens"] == 4
        assert {span["version"] for span in turn["metadata"]["weight_versions"]} == {engine.weight_version}


# Sampling and tasks -------------------------------------------------------


def test_the_sampling_of_trl_is_that_of_every_episode() -> None:
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    found = sampling_of({"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **neutral})
    assert found is not None
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.7, 1.0, -1, 0.0)
    truncated = sampling_of({"temperature": 1.0, "top_k": 0, "top_p": 0.9})
    assert truncated is not None
    assert (truncated.top_k, truncated.top_p) == (-1, 0.9)
    assert sampling_of(None) is sampling_of({}) is None


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ({"temperature": 1.0, "repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"temperature": 1.0, "presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"temperature": 1.0, "typical_p": 0.9}, "typical_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_sampling_that_cannot_be_had_is_refused_by_name(policy: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=named):
        sampling_of(policy)


def test_a_prompt_names_its_task() -> None:
    assert task_of_prompt([{"role": "user", "content": "fix-it"}], 3) == "fix-it"
    assert task_of_prompt("Say right.", None) == "Say right."
    inline = {"instruction": "Say right.", "answer": {"value": "right"}}
    assert task_of_prompt(inline, None) == inline


@pytest.mark.parametrize(
    "prompt", ["", [], {}, None, 3, [{"role": "user", "content": ""}], [{"role": "system", "content": "fix-it"}]]
)
def test_a_prompt_without_a_task_is_refused(prompt: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="prompt"):
        task_of_prompt(prompt, 3)


def test_a_seed_draws_the_task_that_it_draws_elsewhere() -> None:
    ids = [f"task-{number}" for number in range(7)]
    drawn = task_of_seed(ids)
    for seed in range(20):
        assert drawn(object(), seed) == drawn(None, seed) == ids[draw_position(generator_of(seed), len(ids))]
    with pytest.raises(errors.InvalidRequest, match="seed"):
        drawn("prompt", None)
    with pytest.raises(errors.InvalidRequest, match="no task"):
        task_of_seed([])


# Sessions over stand-ins for openenv's types --------------------------------


@dataclass
class Given:
    """Stands for openenv's `VerifyResult`."""

    env_reward: float | None = None
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the sessions, over stand-ins."""
    of = TypeVar("of")
    home: Any = types.ModuleType("openenv.core.harness")
    home.ResourceSession = abc.ABCMeta("ResourceSession", (), {})
    home.ResourceSessionFactory = types.new_class("ResourceSessionFactory", (abc.ABC, Generic[of]))
    home.TrainableSession = object
    home.TrainingTrace = home.TrainingTurn = dict
    home.VerifyResult = Given
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "openenv.core.harness", home)
    monkeypatch.delitem(sys.modules, "turnstile.exporters.openenv.session", raising=False)
    module = import_module("turnstile.exporters.openenv.session")
    assert issubclass(module.TurnstileSession, home.ResourceSession)
    assert issubclass(module.TurnstileSessionFactory, home.ResourceSessionFactory)
    yield module
    sys.modules.pop("turnstile.exporters.openenv.session")


@pytest.fixture
def stub() -> Iterator[StubServer]:
    server = StubServer()
    with running_app(server.app()) as server.url:
        yield server


@pytest.fixture
def factory(sessions: Any, stub: StubServer) -> Iterator[Any]:
    make = sessions.TurnstileSessionFactory
    with make(stub.url, agent="tool-loop", run_id="run", retries=1, settings=QUICK) as made:
        yield made


def test_without_openenv_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("openenv", "openenv.core", "openenv.core.harness"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "turnstile.exporters.openenv.session", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"openenv>=0.7") as raised:
        vars(import_module("turnstile.exporters.openenv"))["__getattr__"]("TurnstileSessionFactory")
    assert raised.value.name == "openenv"


def test_an_older_openenv_is_named_as_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core.harness", types.ModuleType("openenv.core.harness"))
    monkeypatch.delitem(sys.modules, "turnstile.exporters.openenv.session", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"openenv 0\.7 or later"):
        import_module("turnstile.exporters.openenv.session")


def test_a_rollout_is_made_in_the_group_of_its_seed(factory: Any, stub: StubServer) -> None:
    session = factory.create([{"role": "user", "content": "a task of words"}], seed=4, episode_id="rollout-1")
    assert session.wait_for_completion() == 0
    assert session.fetch_training_trace() == {"turns": []}
    found = session.verify([])
    assert (found.env_reward, found.done, found.artifacts["status"]) == (1.0, True, "completed")
    [asked] = stub.created
    assert (asked.group_id, asked.rollout_id, asked.seed, asked.run_id) == ("run-4", "rollout-1", 4, "run")
    assert asked.idempotency_key == "rollout-1-0"
    assert asked.lease is not None
    session.close()


def test_a_failure_of_the_infrastructure_is_tried_again_and_never_a_reward(
    factory: Any, sessions: Any, stub: StubServer
) -> None:
    broken = Play(status=EpisodeStatus.FAILED, reward=None, error=INFRASTRUCTURE)
    stub.play = lambda request: broken if request.attempt == 0 else Play()
    session = factory.create("once", seed=1)
    assert (session.wait_for_completion(), session.verify([]).env_reward) == (0, 1.0)
    assert session.verify([]).metrics["attempts"] == 2

    stub.play = lambda _: broken
    lost = factory.create("always", seed=1)
    assert lost.wait_for_completion() == 1
    with pytest.raises(sessions.RolloutLost, match="sandbox died") as raised:
        lost.fetch_training_trace()
    assert not isinstance(raised.value, ValueError | TypeError | KeyError | TimeoutError)
    assert lost.verify([]).env_reward is None
    assert lost.verify([]).artifacts["error"]["fault"] == "infrastructure"


@pytest.mark.parametrize(
    ("play", "code", "reward"),
    [
        (Play(reward=None), 0, None),
        (Play(status=EpisodeStatus.TRUNCATED, reward=0.25), 0, 0.25),
        (Play(status=EpisodeStatus.CANCELLED, reward=None), 1, None),
        (
            Play(
                status=EpisodeStatus.FAILED, reward=0.0, error=ErrorInfo(type="a", message="m", fault=Fault.AGENT)
            ),
            1,
            0.0,
        ),
        (
            Play(
                status=EpisodeStatus.FAILED, reward=None, error=ErrorInfo(type="a", message="m", fault=Fault.TASK)
            ),
            1,
            None,
        ),
        (
            Play(
                status=EpisodeStatus.FAILED, reward=None, error=ErrorInfo(type="a", message="m", fault=Fault.SETUP)
            ),
            1,
            None,
        ),
    ],
)
def test_what_is_no_result_has_no_reward(
    factory: Any, stub: StubServer, play: Play, code: int, reward: float | None
) -> None:
    stub.play = lambda _: play
    session = factory.create("any task", seed=1)
    assert session.wait_for_completion() == code
    assert session.verify([]).env_reward == reward
    assert session.fetch_training_trace() == {"turns": []}


def test_a_set_up_that_cannot_work_stops_the_trainer(factory: Any, sessions: Any, stub: StubServer) -> None:
    fault = ErrorInfo(type="no_template", message="the model's folder has no template", fault=Fault.SETUP)
    broken = Play(status=EpisodeStatus.FAILED, reward=None, error=fault)

    def played() -> Any:
        session = factory.create("any task", seed=1)
        session.wait_for_completion()
        return session

    stub.play = lambda _: broken
    for _ in range(2):
        played().fetch_training_trace()
    stub.play = lambda _: Play()
    played().fetch_training_trace()
    stub.play = lambda _: broken
    for _ in range(2):
        played().fetch_training_trace()
    with pytest.raises(sessions.SetupCannotWork, match="no template") as raised:
        played().fetch_training_trace()
    assert isinstance(raised.value, ValueError)


def test_a_limit_of_time_is_a_time_out_with_its_reward(factory: Any, stub: StubServer) -> None:
    stub.play = lambda _: Play(status=EpisodeStatus.TIMED_OUT, reward=0.5)
    session = factory.create("any task", seed=1)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="limit of time"):
            session.wait_for_completion()
    assert session.verify([]).env_reward == 0.5


def test_a_full_server_is_waited_for_and_close_ends_the_wait(
    factory: Any, sessions: Any, stub: StubServer
) -> None:
    stub.play = lambda _: Play(seconds=60.0)
    stub.max_open = 1
    runs = factory.create("the first", seed=1)
    waits = factory.create("the second", seed=1)  # returns, so that it can be closed
    assert len(stub.open) == 1
    threading.Timer(0.2, waits.close).start()
    with pytest.raises(sessions.SessionClosed):
        waits.wait_for_completion()
    assert stub.cancelled == []
    third = factory.create("the third", seed=1)
    runs.close()
    runs.close()
    wait_until_sync(lambda: len(stub.open) == 1, "the third has its place")
    factory.close()
    third.close()
    assert [episode.episode_id for episode in stub.episodes] == stub.cancelled
    with pytest.raises(errors.InvalidRequest, match="closed"):
        factory.create("a fourth", seed=1)


def test_a_trace_before_the_end_is_refused(factory: Any, stub: StubServer) -> None:
    stub.play = lambda _: Play(seconds=60.0)
    session = factory.create("any task", seed=1)
    with pytest.raises(errors.InvalidRequest, match="wait_for_completion"):
        session.fetch_training_trace()
    assert (session.verify([]).env_reward, session.verify([]).done, session.episode_id) == (None, False, None)
    session.close()


def test_a_server_that_is_away_from_the_start_is_an_error_and_later_loses_the_rollout(
    factory: Any, sessions: Any, stub: StubServer
) -> None:
    async def mine(_: Any) -> None:
        return None

    away = Answer(503, "shutting_down")
    stub.answer = lambda _: away
    with sessions.TurnstileSessionFactory(stub.url, agent=mine, settings=QUICK) as unheard:
        with pytest.raises(errors.ServerUnavailable):
            unheard.create("any task", seed=1)
        stub.answer = lambda _: None
        session = unheard.create("any task", seed=1)
        assert (session.wait_for_completion(), session.verify([]).env_reward) == (0, 0.5)
    stub.answer = lambda _: away
    later = factory.create("any task", seed=1)
    assert later.wait_for_completion() == 1
    with pytest.raises(sessions.RolloutLost):
        later.fetch_training_trace()


def test_rollouts_of_a_group_that_got_too_old_share_another(factory: Any, stub: StubServer) -> None:
    stub.closed_groups = {"run-1"}
    made = [factory.create("any task", seed=1) for _ in range(3)]
    for session in made:
        assert session.wait_for_completion() == 0
    [group] = {request.group_id for request in stub.created if request.group_id != "run-1"}
    assert {session.verify([]).artifacts["group_id"] for session in made} == {group}


def test_arguments_that_cannot_be_are_refused_when_the_factory_is_made(sessions: Any, stub: StubServer) -> None:
    make = sessions.TurnstileSessionFactory
    with pytest.raises(errors.NotFound, match="no-such-agent"):
        make(stub.url, agent="no-such-agent", settings=QUICK)
    with pytest.raises(errors.InvalidRequest, match="timeout_s"):
        make(stub.url, agent="tool-loop", timeout_s=0.0)
    with pytest.raises(errors.InvalidRequest, match="repetition_penalty"):
        make(stub.url, agent="tool-loop", sampling={"temperature": 1.0, "repetition_penalty": 2.0})
    with pytest.raises(errors.InvalidRequest, match="external"):
        make(stub.url, agent="external")
    with pytest.raises(errors.InvalidRequest, match="no task"):
        make(stub.url, agent="tool-loop", task_of=DrawnTask(), settings=QUICK)
    with pytest.raises(errors.ServerUnavailable):
        make("http://127.0.0.1:9", agent="tool-loop", settings=QUICK)
