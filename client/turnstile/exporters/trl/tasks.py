"""Tasks as the data set that TRL's trainers want."""

from __future__ import annotations

from collections.abc import Iterable

from datasets import Dataset

from turnstile.models import TaskInfo


def task_dataset(tasks: Iterable[TaskInfo]) -> Dataset:
    """One row per task: ``prompt`` (its instruction as the user's message) and ``task_id``.

    AsyncGRPOTrainer counts epochs by its length and reads nothing else of it, where the worker is Turnstile's.
    GRPOTrainer gives the columns to the environment's ``reset``.
    """
    found = list(tasks)
    prompts = [[{"role": "user", "content": task.instruction}] for task in found]
    return Dataset.from_dict({"prompt": prompts, "task_id": [task.id for task in found]})
