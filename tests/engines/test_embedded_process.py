"""The embedded engine's process: it never outlives its owner, and says why it could not start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from engines_support import CONTEXT, LONG, collect, prompt_of
from safetensors.numpy import load_file, save_file

from turnstile_server.engines.embedded.engine import EmbeddedEngine
from turnstile_server.engines.factory import create_engine
from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.sglang import SGLangEngine
from turnstile_server.errors import EngineRefused, EngineTimeout, EngineUnavailable, StartupError
from turnstile_server.settings import EngineSettings

pytestmark = pytest.mark.anyio

PARENT = Path(__file__).resolve().parent / "engine_parent.py"
SHORT = EngineSampling(max_new_tokens=3, temperature=0.0)


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(tiny_model, EngineSettings(context_length=CONTEXT, max_batch=1, stop_grace_s=1.0))
    await engine.start()
    yield engine
    await engine.close()


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < end, f"process {pid} still runs"
        time.sleep(0.02)


def socket_folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("turnstile-engine-")}


async def test_a_killed_child_fails_calls_and_state_and_close_still_works(engine: EmbeddedEngine) -> None:
    started = asyncio.Event()
    call = asyncio.create_task(collect(engine, prompt_of(1, 5), LONG, rid="call-1", started=started))
    await started.wait()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await call
    wait_gone(engine.pid)
    with pytest.raises(EngineUnavailable):
        await collect(engine, prompt_of(1, 5), SHORT, rid="call-2")
    state = await engine.state()
    assert not state.ok
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await collect(engine, prompt_of(1, 5), SHORT, rid="call-3")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_child_dies_with_its_parent_and_leaves_nothing(tiny_model: Path, how: signal.Signals) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(PARENT), str(tiny_model), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid, folder = (await parent.stdout.readline()).decode().split()
    assert alive(int(pid))
    assert Path(folder).is_dir()
    parent.send_signal(how)
    await parent.wait()
    wait_gone(int(pid))
    assert not Path(folder).exists()


async def test_closing_during_a_call_ends_the_call_and_the_process(tiny_model: Path) -> None:
    before = socket_folders()
    engine = EmbeddedEngine(tiny_model, EngineSettings(stop_grace_s=1.0))
    await engine.start()
    pid, started = engine.pid, asyncio.Event()
    assert pid is not None
    call = asyncio.create_task(collect(engine, prompt_of(2, 5), LONG, rid="call-1", started=started))
    await started.wait()
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await call
    assert not alive(pid)
    assert socket_folders() <= before
    await engine.close()


async def test_a_child_that_does_not_stop_is_killed(tiny_model: Path) -> None:
    engine = EmbeddedEngine(tiny_model, EngineSettings(stop_grace_s=0.3))
    await engine.start()
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await engine.close()
    assert not alive(pid)


async def test_a_stopped_child_times_a_call_out(tiny_model: Path) -> None:
    settings = EngineSettings(stop_grace_s=0.3, first_chunk_timeout_s=0.5, control_timeout_s=0.5)
    engine = EmbeddedEngine(tiny_model, settings)
    await engine.start()
    try:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineTimeout):
            await collect(engine, prompt_of(2, 5), SHORT, rid="call-1")
    finally:
        await engine.close()


async def test_only_this_user_reaches_the_socket_and_no_key_reaches_the_child(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTILE_CONTROL_KEY", "a-secret-of-the-server")
    engine = EmbeddedEngine(tiny_model, EngineSettings())
    await engine.start()
    try:
        assert engine._folder is not None
        assert engine._folder.stat().st_mode & 0o777 == 0o700
        assert b"a-secret-of-the-server" not in Path(f"/proc/{engine.pid}/environ").read_bytes()
    finally:
        await engine.close()


async def test_calls_above_max_batch_wait_their_turn_and_may_be_aborted_there(engine: EmbeddedEngine) -> None:
    started = asyncio.Event()
    first = asyncio.create_task(collect(engine, prompt_of(3, 5), LONG, rid="first", started=started))
    await started.wait()
    second = asyncio.create_task(collect(engine, prompt_of(4, 5), SHORT, rid="second"))
    third = asyncio.create_task(collect(engine, prompt_of(5, 5), SHORT, rid="third"))
    done, _ = await asyncio.wait({second, third}, timeout=0.3)
    assert not done
    await engine.abort("second")
    ended = await second
    assert (ended.finish.reason, len(ended.ids)) == ("abort", 0)
    assert not first.done()
    await engine.abort("first")
    assert (await first).finish.reason == "abort"
    assert (await third).finish.reason == "length"


async def test_a_closed_iterator_gives_its_place_to_the_next_call(engine: EmbeddedEngine) -> None:
    for round_ in range(3):
        chunks = engine.generate(prompt_of(6, 5), LONG, rid=f"left-{round_}", routing_key="k", stream=True)
        async with aclosing(chunks):
            await anext(chunks)
    result = await collect(engine, prompt_of(7, 5), SHORT, rid="next")
    assert len(result.ids) == 3


async def test_a_constrained_call_is_refused(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineRefused, match="schema"):
        await collect(engine, prompt_of(8, 5), EngineSampling(max_new_tokens=1, json_schema="{}"), rid="call-1")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def broken_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights at all")


def one_weight_less(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(next(name for name in sorted(tensors) if name.endswith("q_proj.weight")))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)


def sliding_window(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (no_config, "no config.json"),
        (no_weights, "model.safetensors"),
        (broken_weights, "cannot be served"),
        (one_weight_less, "weights are missing"),
        (no_tokenizer, "tokenizer"),
        (sliding_window, "full attention only"),
    ],
)
async def test_a_folder_that_cannot_be_served_is_refused_with_its_reason(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    before = socket_folders()
    engine = EmbeddedEngine(folder, EngineSettings())
    with pytest.raises(StartupError, match=reason) as caught:
        await engine.start()
    assert str(folder) in caught.value.message
    assert engine.pid is None
    assert socket_folders() <= before
    await engine.close()


async def test_a_child_that_is_not_ready_in_time_is_a_startup_error_and_is_gone(tiny_model: Path) -> None:
    before = socket_folders()
    engine = EmbeddedEngine(tiny_model, EngineSettings(start_timeout_s=0.05, stop_grace_s=0.1))
    with pytest.raises(StartupError, match="start_timeout_s"):
        await engine.start()
    assert engine.pid is None
    assert socket_folders() <= before


async def test_weights_with_a_hole_are_refused_and_the_old_ones_serve_on(
    engine: EmbeddedEngine, tiny_model: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(9, 8)
    before = await collect(engine, prompt, SHORT, rid="before")
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    one_weight_less(folder)
    with pytest.raises(EngineRefused, match="weights are missing"):
        await engine.update_weights(str(folder), "v2")
    after = await collect(engine, prompt, SHORT, rid="after")
    assert after.ids.tolist() == before.ids.tolist()
    assert {span.version for span in after.finish.weight_spans} == {"default"}


def test_the_factory_makes_what_the_settings_name(tiny_model: Path) -> None:
    assert isinstance(create_engine(EngineSettings(), tiny_model, None), EmbeddedEngine)
    attached = EngineSettings(kind="sglang", url="http://127.0.0.1:1")
    assert isinstance(create_engine(attached, tiny_model, None), SGLangEngine)
    with pytest.raises(StartupError, match="engine-url"):
        create_engine(EngineSettings(kind="sglang"), tiny_model, None)
