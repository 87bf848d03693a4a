"""The scheduler: the one thread that uses the model decides which calls are computed next.

Owns the waiting queue, the running calls, their rows of the cache and the weights. Other code sends it commands,
which run between two steps, and gets new tokens from it. What must hold:

- running calls are rows ``[0, len(running))``; all but the last are decoding, the last may still be prefilling;
- a call's row holds a prefix of ``prompt + output``; it decodes when only the last id is not in the cache;
- after new weights nothing computed with the old ones is used again; running calls are computed anew;
- while it is asleep there are no weights and no cache, and nothing is computed;
- every submitted call gets exactly one ``NewTokens`` with a finish reason.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import torch

from turnstile_server.engines.embedded.device import ComputeDevice
from turnstile_server.engines.embedded.grammars import Constraint, GrammarRefused
from turnstile_server.engines.embedded.heap import give_back
from turnstile_server.engines.embedded.kv_rows import KvRows
from turnstile_server.engines.embedded.model import LoadedModel, ModelError
from turnstile_server.engines.embedded.sampling import SamplingParameters, sample, scaled_logprobs
from turnstile_server.engines.embedded.stopping import StopRule
from turnstile_server.engines.weight_spans import UNKNOWN_WEIGHTS

T = TypeVar("T")

PauseMode = Literal["abort", "retract", "in_place"]

ASLEEP: Final = "the engine is asleep: wake it first"


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of a call, each with its logprob and the version of the weights; the last has ``finish``."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    finish: dict[str, object] | None = None


@dataclass(slots=True, eq=False)
class EngineCall:
    """One call. With ``score_from`` it also gives the logprobs of ``prompt[score_from + 1:]``."""

    rid: str
    prompt: list[int]
    sampling: SamplingParameters
    stop: StopRule
    emit: Callable[[NewTokens], None]
    score_from: int | None = None
    constraint: Constraint | None = None
    """It has taken ``output``, also while the call is retracted."""
    output: list[int] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_batch: int
    prefill_chunk: int
    window: int


class Scheduler:
    """Computes calls in a thread from ``start`` to ``stop``.

    ``decode`` gives the text of ids, for stop strings. ``post`` hands new tokens to the event loop. ``crash`` ends
    the process.
    """

    def __init__(
        self,
        model: LoadedModel,
        limits: SchedulerLimits,
        decode: Callable[[Any], str],
        post: Callable[[list[tuple[EngineCall, NewTokens]]], None],
        *,
        crash: Callable[[], None],
        seed: int | None = None,
    ) -> None:
        self._model = model
        self._limits = limits
        self._decode = decode
        self._post = post
        self._crash = crash
        self._cache = KvRows(limits.max_batch, limits.window, model.compute)
        self._generator = torch.Generator(model.compute.device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[EngineCall] = deque()
        self._running: list[EngineCall] = []
        self._prefilling = False
        self._paused = False
        self._asleep = False
        self._stopped = False
        self._events: list[tuple[EngineCall, NewTokens]] = []
        self._thread = threading.Thread(target=self._run, name="torch", daemon=True)

    @property
    def version(self) -> str:
        """The version of the weights served now (a plain read, safe from any thread)."""
        return self._model.version

    @property
    def folder(self) -> Path:
        return self._model.folder

    @property
    def compute(self) -> ComputeDevice:
        return self._model.compute

    @property
    def asleep(self) -> bool:
        """A plain read, safe from any thread."""
        return self._asleep

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its present step; running calls get no more tokens. Returns when it has ended."""
        self._commands.put(self._stop)
        self._thread.join()

    def submit(self, call: EngineCall) -> None:
        self._commands.put(lambda: self._waiting.append(call))

    def abort(self, rid: str | None) -> None:
        """Ends the call ``rid`` (None: all calls) with its tokens so far. Unknown rids are ignored."""
        self._commands.put(lambda: self._abort(rid))

    def pause(self, mode: PauseMode) -> Future[None]:
        return self._ask(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self._ask(self._resume)

    def flush(self) -> Future[bool]:
        """Forgets cached prefixes. Does nothing and gives False while calls run."""
        return self._ask(self._flush)

    def update_weights(self, folder: Path, version: str) -> Future[None]:
        """Fails with ModelError and keeps the old weights when ``folder`` cannot be served, and while asleep."""
        return self._ask(lambda: self._update(folder, version))

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Future[None]:
        """Replaces the weights of these names; running calls are computed anew. Fails with ModelError and keeps
        the old weights for tensors that do not fit, and while asleep."""
        return self._ask(lambda: self._load_tensors(tensors))

    def name_weights(self, version: str) -> Future[None]:
        """Tokens are sampled under ``version`` from now on."""
        return self._ask(lambda: self._name(version))

    def sleep(self) -> Future[bool]:
        """Frees weights and cache. Does nothing and gives False while calls run or wait."""
        return self._ask(self._sleep)

    def wake(self) -> Future[None]:
        """Loads the weights again from their folder. Fails with ModelError, still asleep, when that cannot be
        served, and when it is not asleep."""
        return self._ask(self._wake)

    def _ask(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def answer() -> None:
            try:
                result = work()
            except ModelError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._commands.put(answer)
        return future

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopped:
                    self._run_commands()
                    if self._busy:
                        self._prefill_some()
                        self._decode_step()
                    self._flush_events()
        except BaseException:  # noqa: BLE001  a bug or no memory: nothing can go on, and the parent must see it
            traceback.print_exc()
            sys.stderr.flush()
            self._crash()

    @property
    def _busy(self) -> bool:
        return not self._paused and not self._asleep and bool(self._running or self._waiting)

    def _run_commands(self) -> None:
        while not self._stopped:
            try:
                command = self._commands.get(block=not self._busy and not self._events)
            except queue.Empty:
                return
            command()

    def _prefill_some(self) -> None:
        """Feeds up to ``prefill_chunk`` prompt ids, admitting waiting calls as room allows."""
        budget = self._limits.prefill_chunk
        while budget > 0:
            if not self._prefilling:
                if not self._waiting or len(self._running) == self._limits.max_batch:
                    return
                self._admit(self._waiting.popleft())
            row = len(self._running) - 1
            call = self._running[row]
            ids = call.ids
            done = len(self._cache.held[row])
            count = min(budget, len(ids) - 1 - done)
            if count > 0:
                self._prefill(call, row, ids[done : done + count + 1])
                budget -= count
            if done + count == len(ids) - 1:
                self._prefilling = False
                if call.stop.max_new_tokens == 0:
                    self._finish(row, {"type": "length", "length": 0})

    def _admit(self, call: EngineCall) -> None:
        ids = call.ids
        limit = len(ids) - 1 if call.score_from is None else min(call.score_from, len(ids) - 1)
        reused = self._cache.choose_row(ids, limit, len(self._running))
        if not call.output:
            call.cached_tokens = reused
        call.input_logprobs.clear()
        self._running.append(call)
        self._prefilling = True

    def _prefill(self, call: EngineCall, row: int, ids: list[int]) -> None:
        """Appends ``ids[:-1]`` to the row; ``ids[1:]`` are the ids that follow them."""
        done = len(self._cache.held[row])
        logits = self._model.prefill(self._cache, row, ids[:-1], all_logits=call.score_from is not None)
        if call.score_from is None:
            return
        logprobs = scaled_logprobs(logits, call.sampling.temperature)
        followers = torch.tensor(ids[1:], device=logits.device)
        scores = logprobs.gather(1, followers[:, None])[:, 0].tolist()
        first = max(call.score_from - done, 0)
        last = len(call.prompt) - 1 - done  # never the outputs of a call that was retracted
        call.input_logprobs.extend(scores[first:last])

    def _decode_step(self) -> None:
        masks = self._masks()
        count = len(self._running) - self._prefilling
        if count == 0:
            return
        calls = self._running[:count]
        logits = self._model.decode(self._cache, [(call.output or call.prompt)[-1] for call in calls])
        for row, call in enumerate(calls):
            if (mask := masks.get(call)) is not None:
                logits[row].masked_fill_(~mask.to(logits.device), -torch.inf)
        ids, logprobs = sample(logits, [call.sampling for call in calls], self._generator)
        version = self._model.version
        finished: list[tuple[int, dict[str, object]]] = []
        for row, call in enumerate(calls):
            call.output.append(ids[row])
            self._cache.touch(row)
            if call.constraint is not None:
                call.constraint.take(ids[row])
            reason = call.stop.check(call.output, self._decode)
            if reason is None and len(call.prompt) + len(call.output) >= self._limits.window:
                reason = {"type": "length", "length": len(call.output)}
            if reason is not None:
                finished.append((row, reason))
            self._events.append((call, NewTokens((ids[row],), (logprobs[row],), (version,))))
        for row, reason in reversed(finished):
            self._finish(row, reason)

    def _masks(self) -> dict[EngineCall, torch.Tensor]:
        """The ids that may come next in each decoding call with a grammar. Ends the calls in which none may."""
        masks: dict[EngineCall, torch.Tensor] = {}
        for row in reversed(range(len(self._running) - self._prefilling)):
            call = self._running[row]
            if call.constraint is None:
                continue
            try:
                mask = call.constraint.mask()
            except GrammarRefused as error:
                self._finish(row, {**_aborted(str(error)), "status_code": 400})
                continue
            if mask.any():
                masks[call] = mask
            else:  # complete, in a call without stop ids
                self._finish(row, {"type": "stop", "matched": None})
        return masks

    def _finish(self, row: int, reason: dict[str, object]) -> None:
        """Ends the call in ``row`` and closes the gap, keeping a prefilling call last."""
        self._events.append((self._running[row], NewTokens((), (), (), reason)))
        self._leave(row)

    def _leave(self, row: int) -> None:
        last = len(self._running) - 1
        if row == last:
            self._prefilling = False
        else:
            gap = row
            if self._prefilling:
                self._move(last - 1, row)
                gap = last - 1
            self._move(last, gap)
        self._running.pop()

    def _move(self, source: int, target: int) -> None:
        self._cache.swap(source, target)
        self._running[source], self._running[target] = self._running[target], self._running[source]

    def _abort(self, rid: str | None) -> None:
        for call in [call for call in self._waiting if rid in (None, call.rid)]:
            self._waiting.remove(call)
            message = "Aborted" if call.output else "Abort in waiting queue"
            self._events.append((call, NewTokens((), (), (), _aborted(message))))
        for row in reversed(range(len(self._running))):
            if rid in (None, self._running[row].rid):
                self._finish(row, _aborted("Aborted"))

    def _pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
            self._retract()
        self._paused = True

    def _stop(self) -> None:
        self._stopped = True
        self._paused = True  # nothing is computed any more

    def _resume(self) -> None:
        self._paused = False

    def _retract(self) -> None:
        """Running calls go back to the head of the queue, in order; their output stays."""
        for call in reversed(self._running):
            call.retractions += 1
            self._waiting.appendleft(call)
        self._running.clear()
        self._prefilling = False

    def _flush(self) -> bool:
        if self._running:
            return False
        self._cache.forget()
        return True

    def _update(self, folder: Path, version: str) -> None:
        if self._asleep:
            raise ModelError(ASLEEP)
        self._load(folder, version)

    def _load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._asleep:
            raise ModelError(ASLEEP)
        self._model.load_tensors(tensors)
        self._retract()
        self._cache.forget()

    def _name(self, version: str) -> None:
        self._model.version = version

    def _sleep(self) -> bool:
        if self._running or self._waiting:
            return False
        self._asleep = True
        self._model.release()
        self._cache = KvRows(self._limits.max_batch, self._limits.window, self._model.compute)
        give_back()
        self._model.compute.empty_cache()
        return True

    def _wake(self) -> None:
        if not self._asleep:
            raise ModelError("the engine is not asleep")
        # What came as tensors is nowhere any more: the folder's weights are others.
        version = self._model.version if self._model.from_folder else UNKNOWN_WEIGHTS
        self._load(self._model.folder, version)
        self._asleep = False

    def _load(self, folder: Path, version: str) -> None:
        fresh = LoadedModel(folder, version, self._model.compute)
        if (fresh.vocab_size, fresh.window) != (self._model.vocab_size, self._model.window):
            raise ModelError("its vocabulary or context length is not that of the model served")
        unknown = sorted(fresh.unknown - self._model.unknown)
        if unknown:
            raise ModelError(f"the model served has no weights of {len(unknown)} names, the first is {unknown[0]}")
        self._retract()
        self._cache.forget()
        self._model = fresh

    def _flush_events(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._post(events)


def _aborted(message: str) -> dict[str, object]:
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}
