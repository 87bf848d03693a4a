"""What a fleet does, on real SGLangs and through the control API: a stop string across a cut, LoRA adapters, a
trainer's tensors, the sleep that a CPU cannot give, and a scheduler that stands still."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import openai
import pytest
from engines_support import TOLERANCE, assert_true_logprobs, collect, probe_of, reference_logprobs, tokenizer
from test_sglang_weights import GREEDY, PROMPT, SMALL, make_adapter, tensors

from bounded import bounded
from engine_server import EngineServer
from sglang_server import sglang_processes
from turnstile import AsyncClient, errors
from turnstile.models import EngineInfo, Turn, new_id
from turnstile_server.demo.local_server import serve
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.protocol import CallOrigin, EngineSampling
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.settings import EngineSettings, FleetSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.thorough, pytest.mark.timeout(600)]

LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj")
FLAGS = (*LORA, "--lora-backend", "torch_native")
QUESTION: Any = [{"role": "user", "content": "What is in the folder?"}]
LONG = 420
"""Tokens of the greedy text with the stop string. The weights are random, so it does not repeat itself."""
EARLIEST = 60
"""The stop string begins so many tokens into it at least: the cut must not come before the first token."""
CUTS = 8
"""Attempts to cut a generation inside the stop string. A pause takes effect some tokens after it is asked for."""


@pytest.fixture(scope="module")
def processes(tiny_model: Path) -> Iterator[list[EngineServer]]:
    with sglang_processes(tiny_model, 3, FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def urls(processes: list[EngineServer]) -> list[str]:
    """Two that serve from the start, and one that joins."""
    return [process.url for process in processes]


@pytest.fixture(scope="module")
async def client(
    urls: list[str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncClient]:
    """Of a server with the first two. Tests leave any weights, and begin with those that they need."""
    folder = tmp_path_factory.mktemp("server")
    async with (
        serve(tiny_model, folder / "data", engine_url=urls[:2], options=["--sandbox", "none"]) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        yield client


async def info_of(client: AsyncClient) -> EngineInfo:
    (info,) = (await client.engine()).values()
    return info


async def begin_with(client: AsyncClient, folder: Path) -> str:
    """The name of the weights in ``folder``, which all workers serve now."""
    version = new_id("begin")
    await client.update_weights(str(folder), version)
    return version


async def sampled(
    client: AsyncClient, *, temperature: float = 1.0, adapter: str | None = None, tokens: int = 40, **fields: Any
) -> Turn:
    """The turn of an episode with one call."""
    options: dict[str, Any] = {"sampling": {"temperature": temperature}, "adapter": adapter}
    async with await client.create_episode("Answer one question.", **options) as episode:
        url = f"{episode.model_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=episode.episode_key, max_retries=0) as model:
            await model.chat.completions.create(model="m", messages=QUESTION, max_tokens=tokens, **fields)
        await episode.finish()
        (turn,) = await episode.turns()
        return turn


def assert_of(folder: Path, turn: Turn) -> None:
    """The turn's logprobs are those of the weights in ``folder``."""
    ids = np.concatenate([turn.context_ids, turn.completion_ids])
    expected = reference_logprobs(folder, ids, len(turn.context_ids), turn.sampling.temperature)
    np.testing.assert_allclose(turn.logprobs, expected, atol=TOLERANCE, rtol=0)


def versions(turn: Turn) -> list[str]:
    return [span.version for span in turn.weight_spans]


@dataclass(frozen=True)
class Stop:
    """A stop string in a known text. It begins in token ``start`` and is complete with token ``end`` - 1."""

    text: str
    start: int
    end: int


def choose_stop(ids: Sequence[int], decode: Any) -> Stop:
    """The longest run of whole characters but its first one: the more tokens it has, the surer a cut falls into
    it."""
    texts = [decode(ids[:count]) for count in range(len(ids) + 1)]
    best = (0, 0)
    start = EARLIEST
    for end in range(EARLIEST + 1, len(ids)):
        if "\ufffd" in decode(ids[start:end]) or not decode(ids[end - 1 : end]).isascii():
            start = end
        elif end - start > best[1] - best[0]:
            best = (start, end)
    start, end = best
    text = texts[end][len(texts[start]) + 1 :]
    assert texts[-1].find(text) == len(texts[start]) + 1, "it is there once"
    return Stop(text, start, end)


async def test_a_stop_string_across_a_cut_ends_the_turn_where_it_ends_without_a_cut(
    client: AsyncClient, tiny_model: Path
) -> None:
    """The weights get another name at each cut, so that the turn's spans say where it was."""
    before = await begin_with(client, tiny_model)
    decode = tokenizer(tiny_model).decode
    free = await sampled(client, temperature=0.0, tokens=LONG)
    assert len(free.completion_ids) == LONG
    ids = free.completion_ids.tolist()
    stop = choose_stop(ids, decode)
    uncut = await sampled(client, temperature=0.0, tokens=LONG, stop=stop.text)
    assert uncut.completion_ids.tolist() == ids[: stop.end]
    assert (uncut.finish_reason, uncut.stop_string, versions(uncut)) == ("stop", stop.text, [before])

    aim = (stop.start + stop.end) // 2
    trigger = aim
    inside = []
    for _ in range(CUTS):
        turn = await cut_at(client, tiny_model, stop, len(decode(ids[:trigger])))
        assert turn.completion_ids.tolist() == uncut.completion_ids.tolist()
        assert (turn.finish_reason, turn.stop_string) == ("stop", stop.text)
        assert turn.reply.content == uncut.reply.content
        assert_of(tiny_model, turn)
        at = turn.weight_spans[0].end
        if stop.start < at < stop.end:
            inside.append(at)
            break
        trigger = max(1, trigger - (at - aim))
    assert inside, f"no cut fell into tokens {stop.start} to {stop.end}"


async def cut_at(client: AsyncClient, folder: Path, stop: Stop, characters: int) -> Turn:
    """The call with the stop string, paused with ``abort`` once so many characters have come, and then resumed."""
    handle = await client.create_episode("Answer one question.", sampling={"temperature": 0.0})
    async with handle as episode:
        url = f"{episode.model_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=episode.episode_key, max_retries=0) as model:
            stream: Any = await model.chat.completions.create(
                model="m", messages=QUESTION, max_tokens=LONG, stop=stop.text, stream=True
            )
            come = 0
            async with anyio.create_task_group() as tasks:
                async for chunk in stream:
                    before, come = come, come + sum(len(one.delta.content or "") for one in chunk.choices)
                    if before < characters <= come:
                        tasks.start_soon(cut, client, folder)
        await episode.finish()
        (turn,) = await episode.turns()
        return turn


async def cut(client: AsyncClient, folder: Path) -> None:
    await client.pause("abort")
    try:
        await client.update_weights(str(folder), new_id("cut"), mode="abort")
    finally:
        await client.resume()


async def test_an_adapter_samples_the_episodes_that_name_it_on_every_worker_and_on_one_that_joins(
    client: AsyncClient, urls: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    version = await begin_with(client, tiny_model)
    merged = make_adapter(tiny_model, tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(openai.BadRequestError, match="never been loaded"):
        await sampled(client, adapter="sql")
    await client.load_adapter("sql", str(tmp_path / "adapter"))
    try:
        await both_kinds(client, version, tiny_model, merged)
        for url in urls[:2]:
            await asked_directly(url, tiny_model, merged, version)
        await client.add_worker(urls[2])
        info = await info_of(client)
        assert [(each.status, each.weight_version) for each in info.workers] == [("serving", version)] * 3
        await asked_directly(urls[2], tiny_model, merged, version)
        # Alone, it samples for the fleet.
        for worker in info.workers:
            if worker.url != urls[2]:
                await client.remove_worker(worker.worker_id)
        await both_kinds(client, version, tiny_model, merged)
        await client.unload_adapter("sql")
        with pytest.raises(openai.APIError, match="unloaded"):
            await sampled(client, adapter="sql")
    finally:
        await client.unload_adapter("sql")  # once unloaded, it is ignored
        for url in urls[:2]:
            if url not in [each.url for each in (await info_of(client)).workers]:
                await client.add_worker(url)


async def both_kinds(client: AsyncClient, version: str, base: Path, merged: Path) -> None:
    """Episodes with the adapter and without it, at once."""
    calls = [sampled(client, adapter=adapter) for adapter in ("sql", None) * 4]
    turns = await asyncio.gather(*calls)
    for turn in turns[::2]:
        assert (turn.sampling.adapter, versions(turn)) == ("sql", [f"{version}+sql"])
        assert_of(merged, turn)
    for turn in turns[1::2]:
        assert (turn.sampling.adapter, versions(turn)) == (None, [version])
        assert_of(base, turn)


async def asked_directly(url: str, base: Path, merged: Path, version: str) -> None:
    """The worker has the adapter and the weights, whatever the fleet says of it."""
    engine = SGLangEngine(url, EngineSettings(kind="sglang"), expected_tokenizer=probe_of(base))
    await engine.start()
    try:
        assert (await engine.state()).weight_version == version
        adapted = EngineSampling(max_new_tokens=12, temperature=0.0, adapter="sql")
        assert_true_logprobs(merged, PROMPT, await collect(engine, PROMPT, adapted, rid=new_id("rid")), 0.0)
        assert_true_logprobs(base, PROMPT, await collect(engine, PROMPT, GREEDY, rid=new_id("rid")), 0.0)
    finally:
        await engine.close()


async def test_a_trainers_tensors_sample_the_turns_after_them_on_every_worker(
    client: AsyncClient, urls: list[str], tiny_model: Path, other_tiny_model: Path
) -> None:
    before = await begin_with(client, tiny_model)
    turn = await sampled(client)
    assert versions(turn) == [before]
    assert_of(tiny_model, turn)
    info = await info_of(client)
    assert "tensors" in info.updates
    assert (info.tensor_format, info.tensor_copies) == ("flattened_bucket", 1)
    version = new_id("tensors")
    await client.update_weights_from_tensors(tensors(other_tiny_model).items(), version, bucket_bytes=SMALL)
    info = await info_of(client)
    assert (info.weight_version, info.paused) == (version, False)
    assert {(each.status, each.weight_version) for each in info.workers} == {("serving", version)}
    for turn in await asyncio.gather(*(sampled(client) for _ in range(8))):
        assert versions(turn) == [version]
        assert_of(other_tiny_model, turn)
    for url in [each.url for each in info.workers]:
        assert url in urls
        engine = SGLangEngine(url, EngineSettings(kind="sglang"), expected_tokenizer=probe_of(tiny_model))
        await engine.start()
        try:
            assert (await engine.state()).weight_version == version
            result = await collect(engine, PROMPT, GREEDY, rid=new_id("rid"))
            assert_true_logprobs(other_tiny_model, PROMPT, result, 0.0)
        finally:
            await engine.close()


async def test_sleep_is_refused_on_a_cpu_with_the_reason_and_the_workers_serve_on(
    client: AsyncClient, tiny_model: Path
) -> None:
    version = await begin_with(client, tiny_model)
    with pytest.raises(errors.TurnstileError, match="CPU"):
        await client.sleep()
    with pytest.raises(errors.Conflict, match="not asleep"):
        await client.wake()
    info = await info_of(client)
    assert (info.sleeps, info.asleep, info.paused) == (False, False, False)
    assert {each.status for each in info.workers} == {"serving"}
    turn = await sampled(client)
    assert versions(turn) == [version]
    assert_of(tiny_model, turn)


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_leave_a_worker_whose_scheduler_stands_still(
    processes: list[EngineServer], tiny_model: Path, stream: bool
) -> None:
    """Its HTTP server goes on answering, as that of an engine whose GPU hangs does."""
    settings = EngineSettings(kind="sglang")
    first = [(process.url, SGLangEngine(process.url, settings)) for process in processes[:2]]
    quick = bounded(FleetSettings, hang_s=2.0, health_timeout_s=1.0, health_interval_s=0.5)
    fleet = Fleet(first, settings, quick, WeightVersions())
    await fleet.start()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.watch)
            await fleet.load_weights(str(tiny_model), new_id("hang"), "retract")
            stuck = scheduler_of(processes[0])
            os.kill(stuck, signal.SIGSTOP)
            try:
                calls = [asyncio.create_task(_through(fleet, f"ep_{number}", stream)) for number in range(8)]
                with anyio.fail_after(120):
                    assert await asyncio.gather(*calls) == [GREEDY.max_new_tokens] * 8
                assert [worker.status for worker in fleet.roster.workers] == ["down", "serving"]
                assert fleet.calls.counts.failed_over > 0
            finally:
                os.kill(stuck, signal.SIGCONT)
            await wait_until(lambda: fleet.roster.workers[0].status == "serving")
            tasks.cancel_scope.cancel()
    finally:
        await fleet.close()


async def _through(fleet: Fleet, episode: str, stream: bool) -> int:
    """How many tokens the fleet sampled for a call of the episode."""
    origin = CallOrigin(episode)
    chunks = fleet.generate(PROMPT, GREEDY, rid=new_id("rid"), origin=origin, stream=stream)
    return sum([len(chunk.ids) async for chunk in chunks])


def scheduler_of(process: EngineServer) -> int:
    """The process of its group that samples."""
    for found in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (found / "comm").read_text().startswith("sglang::schedul"):
                pid = int(found.name)
                if os.getpgid(pid) == process.pid:
                    return pid
    raise LookupError("no scheduler runs")
