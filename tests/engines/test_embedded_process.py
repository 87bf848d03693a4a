"""The embedded engine's process: it never outlives its owner, and says why it could not start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines_support import CONTEXT, LONG, Progress, collect, prompt_of
from http_server import SILENCE_S, waiting_calls
from loop_clock import pass_time
from safetensors.numpy import load_file, save_file

from bounded import bounded
from turnstile_server.engines.embedded.engine import EmbeddedEngine
from turnstile_server.engines.embedded.kv_rows import KvRows
from turnstile_server.engines.embedded.model import LoadedModel, ModelError, load_tokenizer, weights_name
from turnstile_server.engines.protocol import CallOrigin, EngineSampling
from turnstile_server.engines.registry import create_engine
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.errors import EngineRefused, EngineTimeout, EngineUnavailable, StartupError
from turnstile_server.settings import EngineSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio

PARENT = Path(__file__).resolve().parent / "engine_parent.py"
SECRET = "a-secret-of-the-server"
SHORT = EngineSampling(max_new_tokens=3, temperature=0.0)


@pytest.fixture(scope="module")
async def single(tiny_model: Path) -> AsyncIterator[EmbeddedEngine]:
    """Shared by the tests that leave it as it was; it decodes one call at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNSTILE_CONTROL_KEY", SECRET)
        engine = embedded(tiny_model, max_batch=1)
        await engine.start()
    yield engine
    await engine.close()


def embedded(model: Path, **changes: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, bounded(EngineSettings, context_length=CONTEXT, stop_grace_s=1.0, **changes))


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def environment_of(pid: int | None) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which engines make the folders of their sockets, for this test alone."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def names(folder: Path) -> list[str]:
    return os.listdir(folder)


@pytest.mark.slow
async def test_a_killed_child_fails_calls_and_state_and_close_still_works(tiny_model: Path) -> None:
    engine = embedded(tiny_model)
    await engine.start()
    progress = Progress()
    call = asyncio.create_task(collect(engine, prompt_of(1, 5), LONG, rid="call-1", progress=progress))
    await progress.more(1)
    killed = engine.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await call
    await wait_until(lambda: not alive(killed))
    with pytest.raises(EngineUnavailable):
        await collect(engine, prompt_of(1, 5), SHORT, rid="call-2")
    state = await engine.state()
    assert not state.ok
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await collect(engine, prompt_of(1, 5), SHORT, rid="call-3")


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_child_dies_with_its_parent_and_leaves_nothing(tiny_model: Path, how: signal.Signals) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(PARENT), str(tiny_model), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid, folder = (await parent.stdout.readline()).decode().split()
    assert alive(int(pid))
    assert names(Path(folder)) == ["engine.sock"]
    parent.send_signal(how)
    await parent.wait()
    await wait_until(lambda: not alive(int(pid)))
    assert Path(folder).name not in names(Path(folder).parent)


@pytest.mark.slow
async def test_closing_during_a_call_ends_the_call_and_the_process(tiny_model: Path, sockets: Path) -> None:
    engine = embedded(tiny_model)
    await engine.start()
    pid, progress = engine.pid, Progress()
    assert pid is not None
    call = asyncio.create_task(collect(engine, prompt_of(2, 5), LONG, rid="call-1", progress=progress))
    await progress.more(1)
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await call
    assert not alive(pid)
    assert names(sockets) == []
    await engine.close()


@pytest.mark.slow
async def test_a_child_that_hangs_times_calls_out_and_is_killed_at_close(tiny_model: Path) -> None:
    engine = embedded(tiny_model, first_chunk_timeout_s=SILENCE_S, last_abort_s=0.2)
    await engine.start()
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        call = asyncio.create_task(collect(engine, prompt_of(2, 5), SHORT, rid="call-1"))
        client = engine._client
        assert client is not None
        await wait_until(lambda: waiting_calls(client._http))
        pass_time(SILENCE_S)
        with pytest.raises(EngineTimeout):
            await call
    finally:
        await engine.close()
    assert not alive(pid)


@pytest.mark.slow
async def test_only_this_user_reaches_the_socket_and_no_key_reaches_the_child(single: EmbeddedEngine) -> None:
    assert single.socket.parent.stat().st_mode & 0o777 == 0o700
    environment = environment_of(single.pid)
    assert b"OMP_NUM_THREADS=1" in environment
    assert SECRET.encode() not in environment


async def test_calls_above_max_batch_wait_their_turn_and_may_be_aborted_there(single: EmbeddedEngine) -> None:
    progress = Progress()
    first = asyncio.create_task(collect(single, prompt_of(3, 5), LONG, rid="first", progress=progress))
    await progress.more(1)
    second = asyncio.create_task(collect(single, prompt_of(4, 5), SHORT, rid="second"))
    third = asyncio.create_task(collect(single, prompt_of(5, 5), SHORT, rid="third"))
    done, _ = await asyncio.wait({second, third}, timeout=0.3)
    assert not done
    await single.abort("second")
    ended = await second
    assert (ended.finish.reason, len(ended.ids)) == ("abort", 0)
    assert not first.done()
    await single.abort("first")
    assert (await first).finish.reason == "abort"
    assert (await third).finish.reason == "length"


async def test_a_closed_iterator_gives_its_place_to_the_next_call(single: EmbeddedEngine) -> None:
    for round_ in range(3):
        chunks = single.generate(prompt_of(6, 5), LONG, rid=f"left-{round_}", origin=CallOrigin("k"), stream=True)
        async with aclosing(chunks):
            await anext(chunks)
    result = await collect(single, prompt_of(7, 5), SHORT, rid="next")
    assert len(result.ids) == 3


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


def one_weight_wider(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.zeros(128, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("weights")


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
        (broken_weights, "SafetensorError"),
        (one_weight_less, "1 weights are missing"),
        (one_weight_wider, r"model.norm.weight: \[128\], not \[64\]"),
        (shutil.rmtree, "there is no such folder"),
        (a_file_in_its_place, "a file, not a folder"),
        (no_tokenizer, "tokenizer"),
        (sliding_window, "full attention only"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_with_its_reason(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    LoadedModel(folder, "default").check_cache()
    load_tokenizer(folder)
    damage(folder)
    with pytest.raises(ModelError, match=reason):  # noqa: PT012
        LoadedModel(folder, "default")
        load_tokenizer(folder)


@pytest.mark.slow
async def test_a_child_that_cannot_serve_says_why_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, sockets: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    one_weight_less(folder)
    engine = embedded(folder)
    with pytest.raises(StartupError, match="weights are missing") as caught:
        await engine.start()
    assert str(folder) in caught.value.message
    assert engine.pid is None
    assert names(sockets) == []
    await engine.close()


@pytest.mark.slow
async def test_a_child_that_is_not_ready_in_time_is_a_startup_error_and_is_gone(
    tiny_model: Path, sockets: Path
) -> None:
    engine = embedded(tiny_model, start_timeout_s=0.05)
    with pytest.raises(StartupError, match="start_timeout_s"):
        await engine.start()
    assert engine.pid is None
    assert names(sockets) == []


async def test_a_temporary_folder_too_deep_for_a_socket_is_named_at_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    engine = embedded(tiny_model)
    with pytest.raises(StartupError, match="TMPDIR"):
        await engine.start()
    assert names(deep) == []


async def test_weights_with_a_hole_are_refused_and_the_old_ones_serve_on(
    single: EmbeddedEngine, tiny_model: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(9, 8)
    before = await collect(single, prompt, SHORT, rid="before")
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    one_weight_less(folder)
    with pytest.raises(EngineRefused, match="weights are missing"):
        await single.update_weights(str(folder), "v2")
    after = await collect(single, prompt, SHORT, rid="after")
    assert after.ids.tolist() == before.ids.tolist()
    assert {span.version for span in after.finish.weight_spans} == {weights_name(tiny_model)}


def test_the_factory_makes_what_the_settings_name(tiny_model: Path) -> None:
    assert isinstance(create_engine(EngineSettings(), tiny_model, None), EmbeddedEngine)
    attached = EngineSettings(kind="sglang", url="http://127.0.0.1:1")
    assert isinstance(create_engine(attached, tiny_model, None), SGLangEngine)
    with pytest.raises(StartupError, match="engine-url"):
        create_engine(EngineSettings(kind="sglang"), tiny_model, None)


def test_files_that_are_written_again_in_place_change_no_weights(
    tiny_model: Path, other_tiny_model: Path, tmp_path: Path
) -> None:
    """A loader that maps the file would serve what the file has now."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    model = LoadedModel(folder, "v1")
    before = model.prefill(KvRows(1, CONTEXT), 0, [5, 6, 7], all_logits=True)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write((other_tiny_model / "model.safetensors").read_bytes())
    after = model.prefill(KvRows(1, CONTEXT), 0, [5, 6, 7], all_logits=True)
    assert before.equal(after)
