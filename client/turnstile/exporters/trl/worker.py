"""TRL's rollout worker: real agents on Turnstile servers, as the samples of its AsyncGRPOTrainer.

Implements ``RolloutWorkerProtocol`` of ``trl.experimental.async_grpo`` (TRL 1.16.0). Like TRL's own worker it runs
in a spawned process, so that its work never holds the interpreter that launches the trainer's kernels: here are
only a thread that reads a pipe, and two queues.

What must hold: the worker's process does not outlive ``stop``, this process's exit, or this process's death;
what it started on the servers is cancelled first. An error of the worker is raised by ``check_health``, which
the trainer calls whenever it finds no sample.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.queues
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from datasets import Dataset
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from turnstile import errors
from turnstile.exporters.trl import process
from turnstile.exporters.trl.loop import LoopOptions
from turnstile.exporters.trl.rows import Row
from turnstile.exporters.trl.servers import TurnstileServers
from turnstile.groups import Scale
from turnstile.models import Limits, Sampling, TaskInfo
from turnstile.rollout import TaskLike

_log = logging.getLogger(__name__)

_METRICS = 4096
"""Metrics that wait for the trainer's next log; more are dropped, as TRL's own worker does."""
_KILL_S = 5.0
"""Between SIGTERM and SIGKILL for a worker that did not stop in time."""


class WorkerFailed(RuntimeError):
    """The worker's process ended, or gives no sign of life. Its traceback is the cause."""


class SampleBuffer(queue.Queue[RolloutSample]):
    """The queue that the trainer takes samples from. It counts them, which makes room for more rollouts."""

    def __init__(self, taken: Synchronized[int]) -> None:
        super().__init__()  # unbounded: ``max_inflight`` bounds it
        self._taken = taken

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        sample = super().get(block, timeout)
        with self._taken.get_lock():
            self._taken.value += 1
        return sample


class TurnstileRolloutWorker:
    """Plays ``n`` rollouts of each of ``tasks``, over and over, while the trainer trains.

    ``tasks``: as of ``Client.rollouts``, but finite; ``shuffle_seed`` shuffles them anew for each pass.
    ``agent``: one that the servers launch, or an async function of a module that runs yours on an episode's
    handle. ``max_inflight``: rollouts that run plus samples that wait, at most and at least ``n``; it bounds how
    old samples get. TRL's rule is ``max_staleness * per_device_train_batch_size * gradient_accumulation_steps *
    processes``.
    ``scale``: see ``turnstile.groups.advantages``. ``skip_flat``: groups whose rewards do not differ are not sent,
    others are played instead. After ``max_barren`` groups in a row that gave nothing to train the worker fails
    (the trainer would wait without end). ``retries, sampling, limits, env, metadata``: as of ``Client.rollouts``;
    ``sampling``'s temperature must be the trainer's. ``stop_s``: seconds that ``stop`` gives the worker.

    The process is spawned: everything given is pickled, and the script needs ``if __name__ == "__main__"``.
    """

    def __init__(
        self,
        servers: TurnstileServers,
        tasks: Iterable[TaskLike],
        *,
        agent: str | Callable[[Any], Awaitable[object]],
        n: int,
        max_inflight: int,
        scale: Scale = "std",
        skip_flat: bool = False,
        max_barren: int = 100,
        shuffle_seed: int | None = None,
        retries: int = 2,
        sampling: Sampling | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        stop_s: float = 30.0,
    ) -> None:
        found = tuple(tasks)
        if not found:
            raise errors.InvalidRequest("there are no tasks to play")
        if n < 2:
            raise errors.InvalidRequest(
                f"n must be at least 2, not {n}: one rollout has nothing to be compared with"
            )
        if max_inflight < n:
            raise errors.InvalidRequest(
                f"max_inflight must be at least n={n}, not {max_inflight}: a group is played whole"
            )
        if max_barren < 1:
            raise errors.InvalidRequest(f"max_barren must be at least 1, not {max_barren}")
        self._options = LoopOptions(
            servers=servers,
            tasks=found,
            agent=agent,
            n=n,
            max_inflight=max_inflight,
            scale=scale,
            skip_flat=skip_flat,
            max_barren=max_barren,
            shuffle_seed=shuffle_seed,
            retries=retries,
            sampling=sampling,
            limits=limits,
            env=env,
            metadata=metadata,
        )
        self._stop_s = stop_s
        self._context = multiprocessing.get_context("spawn")
        self._taken: Synchronized[int] = self._context.Value("q", 0)
        # As the protocol has them: its attributes can be set, so a narrower type would not do.
        self.rollout_buffer: queue.Queue[Any] | multiprocessing.queues.Queue[Any] = SampleBuffer(self._taken)
        self.metrics_queue: queue.Queue[Any] | multiprocessing.queues.Queue[Any] = queue.Queue(_METRICS)
        self._version = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._reader: threading.Thread | None = None
        self._failure: process.Failed | None = None
        self._beat_at = 0.0

    def start(self) -> None:
        """Starts the process. Raises TypeError or PicklingError for options that cannot be pickled."""
        if self._process is not None:
            raise WorkerFailed("the worker was started already; it can be started once")
        mine, its = self._context.Pipe()
        arguments = (self._options, its, self._taken, self._version)
        worker = self._context.Process(target=process.main, args=arguments, name="turnstile-rollouts", daemon=True)
        self._beat_at = time.monotonic()
        try:
            worker.start()
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()  # so that the pipe ends with the worker
        self._process, self._pipe = worker, mine
        self._reader = threading.Thread(target=self._read, args=(mine,), name="turnstile-samples", daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """Ends the worker and cancels its episodes. May be called again, and without ``start``."""
        if self._process is None or self._pipe is None or self._reader is None or self._pipe.closed:
            return
        self._send(process.Stop())
        self._process.join(self._stop_s)
        if self._process.is_alive():
            _log.warning("the rollout worker did not stop within %g s; episodes may be left open", self._stop_s)
            self._process.terminate()
            self._process.join(_KILL_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._reader.join()  # the pipe has ended with the process
        self._pipe.close()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version
        self._send(process.Version(model_version, self._taken.value))

    def check_health(self, stale_after_s: float) -> None:
        """Raises WorkerFailed where the worker failed, its process is gone, or it is silent for too long."""
        if self._process is None or self._reader is None:
            raise WorkerFailed("the worker was not started")
        alive = self._process.is_alive()
        if not alive:
            self._reader.join(_KILL_S)  # its last message may say why
        if self._failure is not None:
            cause = RuntimeError(self._failure.trace)
            raise WorkerFailed(f"{self._failure.kind}: {self._failure.message}") from cause
        if not alive:
            raise WorkerFailed(f"the worker's process is gone (exit code {self._process.exitcode})")
        silent_s = time.monotonic() - self._beat_at
        if silent_s > stale_after_s:
            raise WorkerFailed(f"the worker has given no sign of life for {silent_s:.0f} s")

    def _send(self, message: process.Version | process.Stop) -> None:
        if self._pipe is not None and not self._pipe.closed:
            with contextlib.suppress(OSError):  # it is gone; check_health says so
                self._pipe.send(message)

    def _read(self, pipe: Connection) -> None:
        """In a thread of its own, until the worker's process has ended."""
        for message in process.received(pipe):
            if isinstance(message, process.Failed):
                self._failure = message
            elif isinstance(message, process.GroupResult):
                for row in message.rows:
                    self.rollout_buffer.put(_sample(row))
                with contextlib.suppress(queue.Full):
                    self.metrics_queue.put_nowait(message.metrics)
            self._beat_at = time.monotonic()


def task_dataset(tasks: Iterable[TaskInfo]) -> Dataset:
    """One row per task: ``prompt`` (its instruction as the user's message) and ``task_id``.

    AsyncGRPOTrainer counts epochs by its length and reads nothing else of it, where the worker is Turnstile's.
    GRPOTrainer gives the columns to the environment's ``reset``.
    """
    found = list(tasks)
    prompts = [[{"role": "user", "content": task.instruction}] for task in found]
    return Dataset.from_dict({"prompt": prompts, "task_id": [task.id for task in found]})


def _sample(row: Row) -> RolloutSample:
    """TRL reads ``prompt`` and ``completion`` in its traces only; there they lead to the episode."""
    return RolloutSample(
        prompt=[{"role": "user", "content": row.task}],
        completion=[{"role": "assistant", "content": f"turnstile episodes show {row.episode_id} --turns"}],
        input_ids=row.input_ids,
        completion_mask=row.completion_mask,
        old_log_probs=row.old_log_probs,
        advantage=row.advantage,
        model_version=row.model_version,
        group_id=row.group_id,
        metrics=row.metrics,
        enqueued_at=time.time(),
    )
