"""Played by test_openenv_harness.py in a Python with TRL 1.16.0 and openenv 0.10.0, which has no Turnstile server.

    python openenv_harness_program.py sessions URL KEY OUT      the sessions by themselves, as TRL calls them
    python openenv_harness_program.py train URL KEY OUT MODEL   TRL's own trainer and harness worker
    python openenv_harness_program.py page URL KEY OUT MODEL    the code of docs/openenv-harness.md, as it stands

Into the folder OUT, ``sessions`` writes ``sessions.json`` (what each session gave). ``train`` writes
``rollouts.jsonl`` (a line for each trace that TRL scored), ``rows.json`` (the rows that the trainer took from
TRL's worker) and ``steps.json`` (its log).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import torch
from accelerate.state import PartialState
from datasets import Dataset
from openenv.core.harness import (
    LoopOwningSession,
    ResourceSession,
    ResourceSessionFactory,
    TrainableSession,
    TrainingTrace,
)
from openenv.core.harness.capture.upstream import training_sampling
from transformers import AutoTokenizer, PrinterCallback
from trl.experimental import async_grpo
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import _chain_to_sequences
from trl.experimental.async_grpo.openenv_harness import (
    CaptureContractError,
    HarnessRolloutWorker,
    _HarnessRolloutLoop,
    _turns_from_training_trace,
)

from trl_grpo.on_cpu import CPU_ARGUMENTS, attend_on_cpu, no_cuda_device
from turnstile import ClientSettings, InvalidRequest, NotFound, ServerUnavailable
from turnstile.exporters.openenv import (
    DrawnTask,
    SessionClosed,
    SetupCannotWork,
    TurnstileSession,
    TurnstileSessionFactory,
)
from turnstile.exporters.trl import TurnstileServers, TurnstileWeightTransfer
from turnstile.models import EpisodeStatus, ErrorInfo, Fault

RUN = "harness"
LIMITS = {"max_turns": 10, "max_completion_tokens": 96, "wall_s": 120.0}
STEPS, GROUP, BATCH = 3, 4, 8
POLICY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
"""As the worker of a trainer with TRL's own defaults."""


def raised(kind: type[BaseException], call: Any) -> BaseException:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{call} raises no {kind.__name__}")


def played(session: TurnstileSession) -> dict[str, Any]:
    """The rollout in the order of TRL's calls."""
    try:
        code: int | None = session.wait_for_completion()
    except TimeoutError:
        code = None
    trace = session.fetch_training_trace()
    assert isinstance(trace, TrainingTrace)
    found = session.verify([])
    session.close()
    return {
        "code": code,
        "turns": trace.model_dump(mode="json")["turns"],
        "reward": found.env_reward,
        "done": found.done,
        "metrics": found.metrics,
        "artifacts": found.artifacts,
    }


async def model_call(episode: Any, *messages: Any) -> Any:
    """The reply to a conversation."""
    headers = {"authorization": f"Bearer {episode.episode_key}"}
    body = {"model": "any", "messages": messages or (user("Say something."),)}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        answer = await http.post(f"{episode.model_url}/v1/chat/completions", json=body)
    return answer.raise_for_status().json()["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def in_branches(episode: Any) -> None:
    """Two conversations, and the first goes on in two ways, with the other one between them."""
    reply = await model_call(episode, user("The first."))
    await model_call(episode, user("Another."))
    for further in ("Go on.", "Or so."):
        await model_call(episode, user("The first."), reply, user(further))


async def until_its_end(episode: Any) -> None:
    """An agent that makes one call, and is ended by the server's limit of time."""
    await model_call(episode)
    await episode.wait()


def sessions(url: str, key: str) -> dict[str, Any]:
    make = partial(TurnstileSessionFactory, url, key=key, agent="plain-loop", limits=LIMITS)
    out: dict[str, Any] = {}
    with make(sampling=training_sampling(POLICY), task_of=DrawnTask(), run_id="drawn") as factory:
        assert isinstance(factory, ResourceSessionFactory)
        first = factory.create("not read", seed=7, episode_id="rollout-1")
        assert isinstance(first, ResourceSession)
        assert isinstance(first, TrainableSession)
        assert not isinstance(first, LoopOwningSession)  # it has no untrained trace of a proxy
        raised(InvalidRequest, first.fetch_training_trace)
        out["drawn"] = [played(first), played(factory.create("nor this", seed=7, episode_id="rollout-2"))]
        assert first.initial_messages() == [{"role": "user", "content": "not read"}]
        assert first.list_tools() == []
        raised(InvalidRequest, lambda: first.call_tool("bash", {}))
        raised(InvalidRequest, lambda: factory.create("no seed"))
    raised(InvalidRequest, lambda: factory.create("closed", seed=1))

    with make(run_id="named") as factory:
        out["named"] = played(factory.create([{"role": "user", "content": "errand-0"}], seed=1))
        raised(InvalidRequest, lambda: factory.create("no-such-task", seed=1))
        raised(InvalidRequest, lambda: factory.create([{"role": "system", "content": "no task"}], seed=1))

    called = threading.Event()

    async def waits(episode: Any) -> None:
        """An agent that makes one call and never ends."""
        await model_call(episode)
        called.set()
        await asyncio.Event().wait()

    def after_its_call(session: TurnstileSession) -> TurnstileSession:
        assert called.wait(60)
        called.clear()
        return session

    with make(agent=waits, run_id="waits") as factory:
        late = after_its_call(factory.create("errand-1", seed=2, episode_id="late"))
        raised(TimeoutError, lambda: late.wait_for_completion(0.1))
        raised(TimeoutError, late.wait_for_completion)
        out["late"] = played(late)

        closed = after_its_call(factory.create("errand-1", seed=3, episode_id="closed"))
        closers = [threading.Timer(0.2, closed.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        failure = raised(SessionClosed, closed.wait_for_completion)
        assert not isinstance(failure, (TimeoutError, ValueError))
        for closer in closers:
            closer.join()
        closed.close()

        left = after_its_call(factory.create("errand-1", seed=4, episode_id="left-open"))
    left.close()  # after its factory

    with make(agent=until_its_end, limits={**LIMITS, "wall_s": 1.0}, run_id="short") as factory:
        out["timed_out"] = played(factory.create("errand-0", seed=1))

    with make(agent=in_branches, run_id="branches") as factory:
        session = factory.create("errand-0", seed=1)
        assert session.wait_for_completion() == 0
        trace = session.fetch_training_trace()
        rows, tally = _chain_to_sequences(_turns_from_training_trace(trace), "rollout", 0)
        by_time = sorted(trace.turns, key=lambda turn: turn.metadata["seq"])
        many, _ = _chain_to_sequences(_turns_from_training_trace(TrainingTrace(turns=by_time)), "rollout", 0)
        out["branches"] = {
            "episode_id": session.episode_id,
            "rows": [[row.input_ids, row.completion_mask, row.old_log_probs] for row in rows],
            "clean": tally["clean"],
            "rows_by_time": len(many),
        }

    raised(NotFound, lambda: TurnstileSessionFactory(url, key=key, agent="no-such-agent"))
    for policy in (
        {**POLICY, "repetition_penalty": 1.1},
        {"temperature": 1.0, "typical_p": 0.5},
        {"temperature": -1},
    ):
        raised(InvalidRequest, partial(make, sampling=policy))
    nowhere, quick = "http://127.0.0.1:9", ClientSettings(retries=0)
    raised(ServerUnavailable, lambda: TurnstileSessionFactory(nowhere, agent="plain-loop", settings=quick))
    with TurnstileSessionFactory(nowhere, agent=waits, settings=quick) as factory:
        raised(ServerUnavailable, lambda: factory.create("errand-0", seed=1))
    with make(run_id="faults", limits={**LIMITS, "max_turns": 1}) as factory:
        out["faults"] = faults(factory)
    return out


def faults(factory: TurnstileSessionFactory) -> dict[str, Any]:
    """TRL's own treatment of rollouts: ``_run_session`` of its worker's loop. An ended rollout stands for one that
    failed by the fault of another."""
    PartialState()  # TRL's logger needs it

    def by_trl(change: Any) -> Any:
        def create(prompt: Any, **given: Any) -> TurnstileSession:
            session = factory.create(prompt, **given)
            session.wait_for_completion()
            session._rollout = change(session._rollout)
            return session

        loop = object.__new__(_HarnessRolloutLoop)
        loop._factory = SimpleNamespace(create=create)
        loop._adapter, loop._rollout_reward_fn, loop._fork_threshold_tokens = None, None, 0
        loop._live_sessions, loop._stop_event = set(), asyncio.Event()
        result, metrics = loop._run_session("errand-0", 1)
        assert loop._live_sessions == set()
        return {"sequences": len(result[2]), "reward": result[5], "scored": metrics is not None}

    def failed_by(fault: Fault, **changes: Any) -> Any:
        error = ErrorInfo(type="made_up", message="made up", fault=fault)
        return lambda done: replace(done, error=error, **changes)

    def timed_out(done: Any) -> Any:
        status = {"status": EpisodeStatus.TIMED_OUT}
        return replace(done, episode=done.episode.model_copy(update=status))

    def ungraded(done: Any) -> Any:
        return replace(done, episode=done.episode.model_copy(update={"reward": None}))

    found = {
        "none": by_trl(lambda done: done),
        "timed out": by_trl(timed_out),
        "ungraded": by_trl(ungraded),
        "infrastructure": by_trl(failed_by(Fault.INFRASTRUCTURE, samples=None)),
    }

    def by_the_setup(done: Any) -> Any:
        failed = failed_by(Fault.SETUP)(done)
        for _ in range(3):
            factory._shared.note_end(failed)
        return failed

    stops = raised(CaptureContractError, lambda: by_trl(by_the_setup))
    assert isinstance(stops.__cause__, SetupCannotWork)
    return found


def noted_reward(file: str, outcome: Any) -> float | None:
    """The environment's own reward. TRL gives the trace to this function alone, in the worker's process."""
    entry = {
        "reward": outcome.env_reward,
        "timed_out": outcome.timed_out,
        "tool_calls": outcome.tool_calls_by_name,
        "completion": outcome.completion[-1:],
        "turns": [
            {
                **turn["metadata"],
                "prompt": turn["prompt_token_ids"],
                "completion": turn["completion_token_ids"],
            }
            for turn in outcome.trace
        ],
    }
    with Path(file).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(entry) + "\n")
    reward: float | None = outcome.env_reward
    return reward


def train(url: str, key: str, out: Path, model: str) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = {}  # TRL knows none for the tiny policy's template, and parses no reply here
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "drawn by the seed"}]] * 64})
    factory = partial(
        TurnstileSessionFactory, url, key=key, agent="plain-loop", task_of=DrawnTask(), limits=LIMITS, run_id=RUN
    )
    # TRL asks for vLLM before it knows that Turnstile samples; nothing of vLLM is used.
    with mock.patch.object(async_rollout_worker, "is_vllm_available", return_value=True):
        worker = HarnessRolloutWorker(
            harness_session_factory=factory,
            rollout_reward_fn=partial(noted_reward, str(out / "rollouts.jsonl")),
            model_name=model,
            dataset=data,
            reward_funcs=[],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=GROUP,
            max_inflight_tasks=2 * GROUP,
            temperature=1.0,
        )
    rows: list[dict[str, Any]] = []
    take = worker.rollout_buffer.get

    def noted(*args: Any, **kwargs: Any) -> Any:
        row = take(*args, **kwargs)
        rows.append(
            {
                "input_ids": row.input_ids.tolist(),
                "mask": row.completion_mask.tolist(),
                "logprobs": row.old_log_probs.tolist(),
                "advantage": row.advantage,
                "model_version": row.model_version,
                "group_id": row.group_id,
                "reward": row.metrics["reward"],
            }
        )
        return row

    worker.rollout_buffer.get = noted
    servers = TurnstileServers(url, key=key, run="weights")
    arguments = AsyncGRPOConfig(
        output_dir=str(out / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        num_generations=GROUP,
        max_staleness=4,
        learning_rate=1e-4,
        temperature=1.0,
        token_budget=0,
        **CPU_ARGUMENTS,
        logging_steps=1,
    )
    with no_cuda_device():
        trainer = AsyncGRPOTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            rollout_worker=worker,
            weight_transfer=TurnstileWeightTransfer(servers, model=model, folder=out / "weights", keep=100),
        )
    attend_on_cpu(trainer.model)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    (out / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (out / "steps.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")


class Fitted:
    """In the place of the page's trainer: binds what the real one takes, and plays a rollout of the worker's."""

    def __init__(self, **given: Any) -> None:
        inspect.signature(AsyncGRPOTrainer.__init__).bind(self, **given)
        self.given = given

    def train(self) -> None:
        assert self.given["args"].token_budget > 0
        transfer = self.given["weight_transfer"]
        transfer.init_weight_transfer()
        transfer.destroy()
        options = self.given["rollout_worker"]._loop_kwargs
        with options["harness_session_factory"](sampling=training_sampling(POLICY)) as factory:
            session = factory.create(options["dataset"][0]["prompt"], seed=0, episode_id="of-the-page")
            assert played(session)["reward"] is not None


def page(url: str, key: str, out: Path, model: str) -> None:
    """The code of the page, up to what needs a GPU and hours."""
    text = (Path(__file__).parents[2] / "docs" / "openenv-harness.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {"URL": url, "KEY": key, "MODEL": model, "TASK": "errand-0", "__name__": "__main__"}
    os.chdir(out)
    exec(compile(first, "page", "exec"), names)
    with (
        mock.patch.object(async_rollout_worker, "is_vllm_available", return_value=True),
        mock.patch.object(async_grpo, "AsyncGRPOTrainer", Fitted),
        mock.patch.object(async_grpo, "AsyncGRPOConfig", partial(AsyncGRPOConfig, use_cpu=True, bf16=False)),
    ):
        exec(compile(second, "page", "exec"), names)


def main() -> None:
    what, url, key, out, *model = sys.argv[1:]
    if what == "sessions":
        (Path(out) / "sessions.json").write_text(json.dumps(sessions(url, key)), encoding="utf-8")
    elif what == "train":
        train(url, key, Path(out), *model)
    else:
        page(url, key, Path(out), *model)


if __name__ == "__main__":
    main()
