"""Helpers of the engine tests: collecting a call, and an independent forward to compare with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnstile.models import Float32Array, Int32Array, PauseMode, new_id
from turnstile_server.engines.embedded.engine import EmbeddedEngine
from turnstile_server.engines.protocol import CallOrigin, Engine, EngineFinish, EngineSampling
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.tokenizer_probe import TokenizerProbe, make_probe
from turnstile_server.engines.vllm.engine import VLLMEngine
from turnstile_server.settings import EngineSettings

TOLERANCE = 1e-4
"""Largest difference of a logprob from the independent forward, in nats."""

VLLM_TOLERANCE = 5e-4
"""vLLM's kernels on a CPU are that far off at most (measured: 1.4e-4)."""

LONG = EngineSampling(max_new_tokens=3900, temperature=0.0)
"""A call that takes seconds; greedy, because the tiny model then never happens to sample its end token."""

CONTEXT = 4096

ATTEMPTS = 3
"""On a busy machine a test's process may get no turn for as long as a call takes, which then runs to its end
before what was to change it was asked for. Another call is begun, that often."""
ON_THEIR_WAY_S = 0.5
"""What the engine had sampled before a pause has come after that."""


def rid() -> str:
    """A new name for a call."""
    return new_id("rid")


@dataclass(frozen=True)
class Target:
    """A kind of engine, the model it serves, and ``other`` weights for it; ``url`` when it is attached to."""

    model: Path
    other: Path
    url: str | None = None
    incremental: bool = True
    first_version: str = "default"
    """What the engine calls its first weights; SGLang's and vLLM's name."""
    kind: str = "sglang"
    many: int = 1500
    """Tokens of a call that is changed while it runs: some seconds."""

    def engine(self, probe: TokenizerProbe) -> Engine:
        if self.url is not None and self.kind == "vllm":
            return VLLMEngine(
                self.url, EngineSettings(kind="vllm", connect_timeout_s=30.0), expected_tokenizer=probe
            )
        if self.url is not None:
            return SGLangEngine(self.url, EngineSettings(kind="sglang"), expected_tokenizer=probe)
        settings = EngineSettings(context_length=CONTEXT, prefill_chunk=64)
        return EmbeddedEngine(self.model, settings, expected_tokenizer=probe, seed=7, incremental=self.incremental)


@dataclass(frozen=True)
class Result:
    ids: Int32Array
    logprobs: Float32Array
    finish: EngineFinish
    chunks: int
    tolerance: float


def tolerance_of(engine: Engine) -> float:
    return VLLM_TOLERANCE if isinstance(engine, VLLMEngine) else TOLERANCE


class Progress:
    """How far a call is: for what must happen when some more of its tokens are there, however slow the engine."""

    def __init__(self) -> None:
        self.count = 0
        """Of tokens that have come."""
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, count: int) -> None:
        self.count += count
        self._tell()

    def end(self) -> None:
        self._ended = True
        self._tell()

    async def more(self, count: int) -> None:
        """Returns when ``count`` more tokens have come or the call has ended, also by an error."""
        until = self.count + count
        while self.count < until and not self._ended:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def collect(
    engine: Engine,
    prompt: Int32Array,
    sampling: EngineSampling,
    *,
    rid: str,
    stream: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Runs one call, tells ``progress`` of it, and checks the laws of its chunks."""
    try:
        return await _collected(engine, prompt, sampling, rid, stream, progress)
    finally:
        if progress is not None:
            progress.end()


async def _collected(
    engine: Engine, prompt: Int32Array, sampling: EngineSampling, rid: str, stream: bool, progress: Progress | None
) -> Result:
    ids: list[Int32Array] = []
    logprobs: list[Float32Array] = []
    finishes: list[EngineFinish] = []
    versions: list[str | None] = []
    async for chunk in engine.generate(prompt, sampling, rid=rid, origin=CallOrigin("test"), stream=stream):
        assert not finishes, "a chunk after the finish"
        assert chunk.ids.dtype == np.int32
        assert chunk.logprobs.dtype == np.float32
        assert len(chunk.ids) == len(chunk.logprobs)
        assert len(chunk.ids) > 0 or chunk.finish is not None
        ids.append(chunk.ids)
        logprobs.append(chunk.logprobs)
        versions += [chunk.weight_version] * len(chunk.ids)
        if chunk.finish is not None:
            finishes.append(chunk.finish)
        if progress is not None:
            progress.add(len(chunk.ids))
    assert len(finishes) == 1
    spans = finishes[0].weight_spans
    total = sum(map(len, ids))
    named = [span.version for span in spans for _ in range(span.start, span.end)]
    assert all(said in (None, version) for said, version in zip(versions, named, strict=True))
    assert [span.start for span in spans] == [0, *[span.end for span in spans]][: len(spans)]
    assert (spans[-1].end if spans else 0) == total
    return Result(np.concatenate(ids), np.concatenate(logprobs), finishes[0], len(ids), tolerance_of(engine))


async def running_at_a_pause(
    engine: Engine, prompt: Int32Array, sampling: EngineSampling, mode: PauseMode, *, start_after: int = 1
) -> asyncio.Task[Result]:
    """Pauses while a call runs that has ``start_after`` tokens, and gives that call."""
    for _ in range(ATTEMPTS):
        progress = Progress()
        call = asyncio.create_task(collect(engine, prompt, sampling, rid=rid(), progress=progress))
        await progress.more(start_after)
        await engine.pause(mode)
        await asyncio.wait({call}, timeout=ON_THEIR_WAY_S)
        if not call.done() or len(call.result().ids) < sampling.max_new_tokens:
            return call
        await engine.resume()
    pytest.fail(f"{ATTEMPTS} calls ran to their end before a pause was answered")


@cache
def _reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def reference_logprobs(
    folder: Path, ids: Int32Array, start: int, temperature: float, dtype: torch.dtype = torch.float32
) -> Float32Array:
    """float32[len - start] of a plain forward without any cache; temperature 0 is raw. ``dtype`` float64 rounds
    nothing that float32 shows, where thousands of tokens are compared and some are very improbable."""
    with torch.inference_mode():
        network = _reference_model(folder, dtype)
        logits = network(input_ids=torch.tensor([ids.tolist()])).logits[0, start - 1 : -1]
        table = torch.log_softmax(logits.to(dtype) / (temperature or 1.0), dim=-1)
        chosen = table.gather(1, torch.tensor(ids[start:].tolist())[:, None])[:, 0]
    return chosen.float().numpy()


def assert_true_logprobs(folder: Path, prompt: Int32Array, result: Result, temperature: float) -> None:
    """What the engine recorded is what an independent forward gives for the same ids."""
    ids = np.concatenate([prompt, result.ids])
    expected = reference_logprobs(folder, ids, len(prompt), temperature)
    assert len(result.logprobs) > 0
    np.testing.assert_allclose(result.logprobs, expected, atol=result.tolerance, rtol=0)


@cache
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def probe_of(folder: Path) -> TokenizerProbe:
    ours = tokenizer(folder)
    return make_probe(
        lambda text: ours.encode(text, add_special_tokens=False), list(ours.get_added_vocab()), len(ours)
    )


def prompt_of(seed: int, length: int) -> Int32Array:
    """Ids of ordinary tokens (the tiny model has 4096 of them)."""
    return np.random.default_rng(seed).integers(0, 4096, length, dtype=np.int32)
