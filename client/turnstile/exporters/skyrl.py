"""Rollouts as SkyRL's ``GeneratorOutput``, and a generator that plays Turnstile's tasks for its trainers.

The wire is ``skyrl.train.generators.base`` of SkyRL 0.4.0: lists by row, the prompt and the response apart. What
must hold: the rows of a trajectory are adjacent and the last one has ``is_last_step``; that one's reward alone is
the trajectory's in the group's baseline, and each row carries the full one. ``loss_masks`` and
``rollout_logprobs`` have the response's length, 0 and 0.0 where the token is not trained here. No row has a reward
of None or NaN, and none one of 0 that nothing gave: SkyRL takes both in silence.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from turnstile import errors
from turnstile.client import AsyncClient, AsyncNewEpisodeHandle
from turnstile.exporters.single_rollouts import SingleRollouts
from turnstile.exporters.trained_rows import main_last, response_start, trained_rows
from turnstile.groups import by_group
from turnstile.models import EpisodeStatus, Limits, Sample, new_id
from turnstile.rollout import Rollout, TaskLike

Task = Callable[[Any, Mapping[str, Any]], TaskLike]
"""The task of a prompt (a conversation) and of the other columns of its row of the data set."""


class NothingGraded(Exception):
    """No rollout of a batch has a reward: there is nothing to train on, and no number that could stand for one."""


def task_in(prompt: Any, extras: Mapping[str, Any]) -> TaskLike:
    """The column ``task`` (an id, an instruction or an inline dict), else the one message of the prompt. Raises
    InvalidRequest for anything else."""
    if "task" in extras:
        task: TaskLike = extras["task"]
        return task
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0].get("content"), str):
        prompt = prompt[0]["content"]
    if not isinstance(prompt, str) or not prompt:
        raise errors.InvalidRequest("the row names no task: put an id or an inline task into its column 'task'")
    return prompt


def to_generator_output(rollouts: Iterable[Rollout], *, step_wise: bool = True) -> dict[str, Any]:
    """Rollouts that were made elsewhere as a ``GeneratorOutput``, group by group.

    A rollout without a reward has no row and is in no baseline. A graded one with nothing to train has one masked
    row, which counts in the baseline. ``step_wise``: as ``generator.step_wise_trajectories`` is set. Raises
    NothingGraded where no rollout has a reward, ValueError for several rows of a rollout without ``step_wise``,
    ImportError without SkyRL.
    """
    make = import_module("skyrl.train.generators.base").TrajectoryID
    played = [
        (make(group_id, number), rollout)
        for group_id, group in by_group(rollouts).items()
        for number, rollout in enumerate(group)
    ]
    return _output(played, step_wise=step_wise, evaluation=False)


class TurnstileGenerator:
    """SkyRL's ``GeneratorInterface``, for ``get_generator`` of your ``BasePPOExp``.

    ``agent``, ``limits``, ``retries`` and ``env``: as in ``AsyncClient.rollouts``. ``max_concurrent``: rollouts at
    once, of all calls. ``replacements``: further rollouts in place of one that got no reward. ``step_wise``: as
    ``generator.step_wise_trajectories`` of the trainer. Of the batch's ``sampling_params`` temperature, top_p,
    top_k and min_p pin the episodes' sampling.

    Rows are in the order of the input. A rollout that stays without a reward is left out of its group. One masked
    row stands in for the ungraded where fewer than two have a reward: SkyRL takes the raw reward of a single one
    for its advantage, and its synchronous trainer asserts a row for each prompt. Its reward is that of the other
    one, else the mean of the batch, so that the group trains nothing and the logged mean stays about the same.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        agent: str | Callable[[AsyncNewEpisodeHandle], Awaitable[object]],
        task: Task = task_in,
        limits: Limits | Mapping[str, Any] | None = None,
        retries: int = 2,
        replacements: int = 1,
        max_concurrent: int = 64,
        step_wise: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if replacements < 0 or max_concurrent < 1:
            raise errors.InvalidRequest("replacements must be at least 0, and max_concurrent at least 1")
        self._rollouts = SingleRollouts(client, agent=agent, limits=limits, retries=retries, env=env)
        self._task = task
        self._replacements = replacements
        self._room = asyncio.Semaphore(max_concurrent)
        self._step_wise = step_wise

    async def generate(self, input_batch: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """The ``GeneratorOutput`` of a ``GeneratorInput``.

        Raises InvalidRequest for a row without a task or a batch without ``trajectory_ids``, the server's errors
        for tasks and agents that it refuses, NothingGraded where no rollout has a reward, and ValueError where a
        rollout cannot be expressed without ``step_wise``. All its episodes end with it.
        """
        ids = input_batch["trajectory_ids"]
        if ids is None:
            raise errors.InvalidRequest("the batch has no trajectory_ids, so its rollouts have no groups")
        extras = input_batch["env_extras"] or [{}] * len(ids)
        tasks = [self._task(prompt, more) for prompt, more in zip(input_batch["prompts"], extras, strict=True)]
        about = input_batch.get("batch_metadata")
        evaluation = about is not None and about.training_phase == "eval"
        facts = {"evaluation": evaluation, "global_step": about.global_step if about is not None else None}
        groups: defaultdict[str, str] = defaultdict(lambda: new_id("group"))  # prompts come again each epoch

        async def played(task: TaskLike, trajectory_id: Any) -> tuple[Any, Rollout]:
            async with self._room:
                for left in range(self._replacements, -1, -1):
                    rollout = await self._rollouts.play(
                        task,
                        sampling_params=input_batch.get("sampling_params") or {},
                        group_id=groups[trajectory_id.instance_id],
                        index=trajectory_id.repetition_id,
                        # Greedy completions, as evaluations often are, train nothing, but they are what happened.
                        include_untrained=evaluation,
                        metadata={**facts, "instance_id": trajectory_id.instance_id},
                    )
                    if rollout.reward is not None or not left:
                        break
            return trajectory_id, rollout

        try:
            async with asyncio.TaskGroup() as together:
                plays = [together.create_task(played(task, name)) for task, name in zip(tasks, ids, strict=True)]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several
        return _output([play.result() for play in plays], step_wise=self._step_wise, evaluation=evaluation)


def _output(played: Sequence[tuple[Any, Rollout]], *, step_wise: bool, evaluation: bool) -> dict[str, Any]:
    rewards = [rollout.reward for _, rollout in played if rollout.reward is not None]
    if not rewards:
        raise NothingGraded(f"none of {len(played)} rollouts has a reward: {_reasons(played)}")
    graded: defaultdict[str, list[float]] = defaultdict(list)
    for name, rollout in played:
        if rollout.reward is not None:
            graded[name.instance_id].append(rollout.reward)
    rows = _Rows()
    stands_in: set[str] = set()
    for name, rollout in played:
        if rollout.reward is not None:
            chosen = _chosen(rollout, evaluation=evaluation)
            if len(chosen) > 1 and not step_wise:
                raise ValueError(
                    f"rollout {rollout.rollout_id} has {len(chosen)} rows (sub-agents, compactions, branches): "
                    "set generator.step_wise_trajectories=true, and step_wise=True here"
                )
            for sample in chosen:
                rows.add(name, rollout, sample, rollout.reward, last=sample is chosen[-1])
        elif not step_wise:
            raise ValueError(
                f"rollout {rollout.rollout_id} has no reward, and without step-wise trajectories SkyRL needs a "
                f"row for it: set generator.step_wise_trajectories=true ({_reasons(played)})"
            )
        elif not evaluation and name.instance_id not in stands_in and len(graded[name.instance_id]) < 2:
            stands_in.add(name.instance_id)
            [reward] = graded[name.instance_id] or [math.fsum(rewards) / len(rewards)]
            rows.add(name, rollout, None, reward, last=True)
    return rows.output(played)


class _Rows:
    """The lists of a ``GeneratorOutput``."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {}

    def add(self, name: Any, rollout: Rollout, sample: Sample | None, reward: float, *, last: bool) -> None:
        """A row; of None the smallest that the trainer can batch: a prompt token and a masked response token."""
        start = response_start(sample) if sample is not None else 1
        ids = sample.input_ids.tolist() if sample is not None else [0, 0]
        row = {
            "prompt_token_ids": ids[:start],
            "response_ids": ids[start:],
            "loss_masks": sample.loss_mask[start:].tolist() if sample is not None else [0],
            "rollout_logprobs": sample.logprobs[start:].tolist() if sample is not None else [0.0],
            "rewards": reward,
            "stop_reasons": _stop_reason(rollout, sample),
            "trajectory_ids": name,
            "is_last_step": last,
            "trajectory_generation_times": rollout.seconds,
            "env_metrics": {"turnstile/episode_id": rollout.episode.episode_id if rollout.episode else None},
        }
        for key, value in row.items():
            self._lists.setdefault(key, []).append(value)

    def output(self, played: Sequence[tuple[Any, Rollout]]) -> dict[str, Any]:
        ungraded = [rollout for _, rollout in played if rollout.reward is None]
        # SkyRL joins the metrics of several calls by their names: it averages "mean" and adds up the others.
        metrics: dict[str, float] = {
            "turnstile/rollouts": len(played),
            "turnstile/ungraded": len(ungraded),
            "turnstile/rows": len(self._lists["rewards"]),
            "turnstile/trained_tokens": sum(map(sum, self._lists["loss_masks"])),
            "turnstile/mean_seconds": math.fsum(rollout.seconds for _, rollout in played) / len(played),
        }
        for kind, count in Counter(rollout.status.value for _, rollout in played).items():
            metrics[f"turnstile/{kind}"] = count
        absent = dict.fromkeys(
            (
                "trajectory_time_splits",
                "rollout_expert_indices",
                "rollout_sample_support",
                "pixel_values",
                "image_grid_thw",
            )
        )
        return {**self._lists, "rollout_metrics": metrics, **absent}


def _chosen(rollout: Rollout, *, evaluation: bool) -> Sequence[Sample | None]:
    """The rows of a graded rollout, the main conversation last; one of an evaluation."""
    if evaluation:
        samples = main_last(rollout.samples.samples) if rollout.samples is not None else []
        return samples[-1:] or [None]
    return main_last(trained_rows(rollout)) or [None]


def _stop_reason(rollout: Rollout, sample: Sample | None) -> str:
    """``stop``, or ``length`` for what a limit cut short: SkyRL's overlong filtering masks the row then."""
    cut = rollout.status in (EpisodeStatus.TRUNCATED, EpisodeStatus.TIMED_OUT)
    return "length" if cut or sample is None or sample.status != "completed" else "stop"


def _reasons(played: Sequence[tuple[Any, Rollout]]) -> str:
    kinds = Counter(
        f"{rollout.error.type}: {rollout.error.message}"
        if rollout.error is not None
        else "nothing grades the task"
        for _, rollout in played
        if rollout.reward is None
    )
    return "; ".join(f"{count} × {kind}" for kind, count in kinds.most_common(3))
