"""The client's side of the engine: what each call sends, in which order, and what it does when one fails."""

from __future__ import annotations

import base64
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from client.engine_stub import EngineStub, engine_stub
from turnstile import AsyncClient, Client, errors, weights
from turnstile.cli.app import app

NAMED = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(2)}


@pytest.fixture
def stub() -> Iterator[EngineStub]:
    with engine_stub() as stub:
        yield stub


CALLS: list[tuple[Callable[[Client], object], str, Any]] = [
    (lambda client: client.engine(), "GET /engine", None),
    (lambda client: client.pause("in_place"), "POST /engine/pause", {"mode": "in_place"}),
    (lambda client: client.resume(), "POST /engine/resume", None),
    (
        lambda client: client.update_weights("/folder", "v2", mode="abort"),
        "POST /engine/weights",
        {"path": "/folder", "version": "v2", "mode": "abort"},
    ),
    (
        lambda client: client.begin_weights("v2", mode="abort"),
        "POST /engine/weights/begin",
        {"version": "v2", "way": "trainer", "mode": "abort"},
    ),
    (lambda client: client.commit_weights(), "POST /engine/weights/end", {}),
    (lambda client: client.abort_weights(), "POST /engine/weights/cancel", None),
    (lambda client: client.leave_weight_group("a/b"), "DELETE /engine/groups/a/b", None),
    (lambda client: client.load_adapter("sql", "/sql"), "POST /engine/adapters", {"name": "sql", "path": "/sql"}),
    (lambda client: client.unload_adapter("sql"), "DELETE /engine/adapters/sql", None),
    (lambda client: client.sleep(), "POST /engine/sleep", None),
    (lambda client: client.wake(), "POST /engine/wake", None),
    (lambda client: client.add_worker("http://two"), "POST /engine/workers", {"url": "http://two"}),
    (lambda client: client.remove_worker("w2"), "DELETE /engine/workers/w2", None),
]


@pytest.mark.parametrize(("call", "path", "body"), CALLS, ids=[path for _, path, _ in CALLS])
def test_a_call_is_one_request(stub: EngineStub, call: Callable[[Client], Any], path: str, body: Any) -> None:
    with Client(stub.url) as client:
        assert call(client)[stub.url].weight_version == "v1"
    assert stub.asked == [(path, body)]


def test_tensors_arrive_as_they_are_in_pieces_of_the_size_asked(stub: EngineStub) -> None:
    stub.tensor_copies = 2
    with Client(stub.url) as client:
        client.update_weights_from_tensors(NAMED.items(), "v2", mode="in_place", bucket_bytes=32)
    assert stub.calls == [
        "GET /engine",
        "POST /engine/weights/begin",
        *["POST /engine/weights/bucket"] * 2,
        "POST /engine/weights/end",
    ]
    assert stub.asked[1][1] == {"version": "v2", "way": "tensors", "mode": "in_place"}
    arrived = {}
    for _, body in stub.asked[2:-1]:
        assert body["load_format"] == "flattened_bucket"
        assert len(set(body["serialized"])) == 1
        assert len(body["serialized"]) == 2, "one copy for each rank"
        arrived |= read(body["serialized"][0])
    assert arrived.keys() == NAMED.keys()
    for name, tensor in NAMED.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_the_same_call_sends_safetensors_to_an_engine_that_takes_those(stub: EngineStub) -> None:
    stub.tensor_format = "safetensors"
    tied = torch.arange(6.0)
    named = NAMED | {"d": tied, "e": tied, "f": torch.tensor(3, dtype=torch.int8)}
    with Client(stub.url) as client:
        client.update_weights_from_tensors(named.items(), "v2", bucket_bytes=64)
    pieces = [body for call, body in stub.asked if call.endswith("bucket")]
    assert len(pieces) > 1
    arrived = {}
    for piece in pieces:
        assert piece["load_format"] == "safetensors"
        [serialized] = piece["serialized"]
        arrived |= safetensors.torch.load(base64.b64decode(serialized))
    assert arrived.keys() == named.keys()
    for name, tensor in named.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_tensors_that_cannot_be_written_or_would_be_written_in_two_ways_are_refused(stub: EngineStub) -> None:
    stub.tensor_format = "safetensors"
    with engine_stub() as other, Client([stub.url, other.url]) as client:
        with pytest.raises(errors.InvalidRequest, match="server="):
            client.update_weights_from_tensors(NAMED.items(), "v2")
        assert stub.calls == other.calls == ["GET /engine"]
        with pytest.raises(errors.InvalidRequest, match=r"'a' is torch\.complex64"):
            client.update_weights_from_tensors(
                [("a", torch.zeros(1, dtype=torch.complex64))], "v2", server=stub.url
            )
    assert stub.calls[-1] == "POST /engine/weights/cancel"


def read(serialized: str) -> dict[str, torch.Tensor]:
    """As SGLang does (0.5.23, weight_sync/tensor_bucket.py)."""
    value = pickle.loads(base64.b64decode(serialized))
    flat = value["flattened_tensor"]
    return {
        meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in value["metadata"]
    }


def test_a_tensor_larger_than_a_piece_is_a_piece_of_its_own() -> None:
    buckets = list(weights.tensor_buckets(NAMED.items(), 1))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["a"], ["b"], ["c"]]
    with pytest.raises(errors.InvalidRequest, match="bucket_bytes"):
        next(weights.tensor_buckets(NAMED.items(), 0))


@pytest.mark.parametrize("fails", ["POST /engine/weights/begin", "POST /engine/weights/bucket"])
def test_an_update_that_fails_in_the_middle_is_cancelled_at_the_server(stub: EngineStub, fails: str) -> None:
    stub.refuses[fails] = "it does not fit"
    with Client(stub.url) as client, pytest.raises(errors.TurnstileError, match="does not fit"):
        client.update_weights_from_tensors(NAMED.items(), "v2")
    assert stub.calls[-1] == "POST /engine/weights/cancel"
    assert "POST /engine/weights/end" not in stub.calls


def test_a_trainers_own_update_is_told_around_each_call(stub: EngineStub) -> None:
    given: list[tuple[int, list[str]]] = []

    def update(step: int) -> str:
        given.append((step, stub.calls[-1:]))
        if step == 8:
            raise RuntimeError("no process group")
        return f"gave {step}"

    with Client(stub.url) as client:
        told = weights.announced(update, client, str, mode="abort")
        assert told(7) == "gave 7"
        with pytest.raises(RuntimeError, match="no process group"):
            told(8)
    begun = "POST /engine/weights/begin"
    assert given == [(7, [begun]), (8, [begun])]
    assert stub.calls == [begun, "POST /engine/weights/end", begun, "POST /engine/weights/cancel"]
    assert [body["version"] for _, body in stub.asked if body and "version" in body] == ["7", "8"]


def test_a_trainer_that_fails_where_no_server_can_be_told_has_its_own_error(stub: EngineStub) -> None:
    def update() -> None:
        stub.refuses["POST /engine/weights/cancel"] = "it is gone"
        raise RuntimeError("no process group")

    with Client(stub.url) as client:
        told = weights.announced(update, client, lambda: "7")
        with pytest.raises(RuntimeError, match="no process group") as raised:
            told()
    assert "could not be told" in raised.value.__notes__[0]


def test_a_trainer_whose_tensors_end_in_an_error_cancels_too(stub: EngineStub) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", NAMED["a"]
        raise ZeroDivisionError

    with Client(stub.url) as client, pytest.raises(ZeroDivisionError):
        client.update_weights_from_tensors(broken(), "v2", bucket_bytes=1)
    assert stub.calls[-1] == "POST /engine/weights/cancel"


@pytest.mark.anyio
async def test_the_engines_receive_while_the_trainer_broadcasts(
    stub: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving, sent = threading.Event(), []

    def broadcast(piece: weights.BroadcastPiece, group: str) -> None:
        assert receiving.wait(30), "the engine was not asked while the trainer sends"
        receiving.clear()
        sent.append((piece.request.names, group))

    monkeypatch.setattr(weights, "broadcast", broadcast)
    stub.on_request = lambda call: receiving.set() if call.endswith("bucket") else None
    async with AsyncClient(stub.url) as client:
        await client.broadcast_weights(NAMED.items(), "v2", group="g", process_group="ours", bucket_bytes=32)
    assert sent == [(("a", "b"), "ours"), (("c",), "ours")]
    assert stub.asked[1][1]["shapes"] == [[2, 3], [4]]
    assert stub.asked[1][1]["dtypes"] == ["float32", "bfloat16"]


@pytest.mark.anyio
async def test_an_engine_that_refuses_ends_the_trainers_wait(
    stub: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(weights, "broadcast", lambda *_: released.wait(60))
    stub.refuses["POST /engine/weights/bucket"] = "in no such group"
    try:
        async with AsyncClient(stub.url) as client:
            with pytest.raises(errors.TurnstileError, match="no such group"):
                await client.broadcast_weights(NAMED.items(), "v2", group="g", process_group="ours")
    finally:
        released.set()
    assert stub.calls[-1] == "POST /engine/weights/cancel"


def test_all_servers_join_a_group_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=30)
    with engine_stub() as one, engine_stub() as two, Client([one.url, two.url]) as client:
        one.on_request = two.on_request = lambda call: both.wait() and None if "groups" in call else None
        client.join_weight_group("g", "127.0.0.1", 29500, 3, backend="gloo")
        client.leave_weight_group("g")
    assert one.calls == two.calls == ["GET /engine", "POST /engine/groups", "DELETE /engine/groups/g"]


def test_the_workers_of_several_servers_have_ranks_of_their_own() -> None:
    with engine_stub() as one, engine_stub() as two, Client([one.url, two.url]) as client:
        one.workers = 3
        client.join_weight_group("g", "127.0.0.1", 29500, 9, ranks_per_worker=2, backend="gloo")
        client.join_weight_group("g", "127.0.0.1", 29500, 3, server=two.url, rank_offset=2, backend="gloo")
        with pytest.raises(errors.InvalidRequest, match=r"world_size 4.* has 5"):
            client.join_weight_group("g", "127.0.0.1", 29500, 4)
    said = [(body["rank_offset"], body.get("ranks")) for stub in (one, two) for _, body in stub.asked if body]
    assert said == [(1, 6), (7, 2), (2, None)]


def test_what_the_server_would_refuse_is_refused_before_it_is_sent(stub: EngineStub) -> None:
    with Client(stub.url) as client:
        for wrong in (
            lambda: client.update_weights("", "v2"),
            lambda: client.join_weight_group("g", "127.0.0.1", 0, 2),
            lambda: client.add_worker(""),
        ):
            with pytest.raises(errors.InvalidRequest):
                wrong()
    assert stub.asked == []


@pytest.mark.slow
def test_tensors_without_torch_say_what_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None
from turnstile import errors, weights
class Tensor:
    def numel(self): return 1
    def element_size(self): return 4
try:
    next(weights.flattened_buckets([("a", Tensor())]))
except errors.InvalidRequest as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install torch" in done.stdout


COMMANDS: list[tuple[list[str], list[str]]] = [
    (["status"], ["GET /engine"]),
    (["pause", "--mode", "in_place"], ["POST /engine/pause"]),
    (["resume"], ["POST /engine/resume"]),
    (["weights", "/folder", "v2"], ["POST /engine/weights"]),
    (["sleep"], ["POST /engine/sleep"]),
    (["wake"], ["POST /engine/wake"]),
    (["workers", "add", "http://two"], ["POST /engine/workers"]),
    (["workers", "remove", "w1"], ["DELETE /engine/workers/w1"]),
    (["adapters", "load", "sql", "/sql"], ["POST /engine/adapters"]),
    (["adapters", "unload", "sql"], ["DELETE /engine/adapters/sql"]),
]


@pytest.mark.parametrize(("arguments", "asked"), COMMANDS, ids=[" ".join(arguments) for arguments, _ in COMMANDS])
def test_a_command_does_it_and_shows_the_engine_afterwards(
    stub: EngineStub, arguments: list[str], asked: list[str]
) -> None:
    result = CliRunner().invoke(app, ["engine", *arguments, "--url", stub.url], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert stub.calls == asked
    assert "tiny" in result.stdout
    assert "w1" in result.stdout


def test_a_command_sends_the_tensors_of_a_folder_that_the_engine_cannot_read(
    stub: EngineStub, tiny_model: Path
) -> None:
    arguments = ["engine", "weights", str(tiny_model), "v2", "--send", "--url", stub.url, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert read(stub.asked[2][1]["serialized"][0]).keys() == load_file(tiny_model / "model.safetensors").keys()
    assert '"weight_version":"v1"' in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--send", "--broadcast", "h:1"],
        ["--broadcast", "nowhere"],
        ["--broadcast", "h:1"],  # no weights are there
        ["--send"],
        ["--ranks", "2"],
    ],
    ids=str,
)
def test_a_wrong_command_exits_2_before_anything_is_loaded(
    stub: EngineStub, tmp_path: Path, arguments: list[str]
) -> None:
    asked = ["engine", "weights", str(tmp_path), "v2", "--url", stub.url, *arguments]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2, result.output
    assert "POST /engine/weights/end" not in stub.calls


@pytest.mark.slow
def test_an_interrupted_update_is_cancelled_at_the_server(stub: EngineStub, tmp_path: Path) -> None:
    """Else the next one is refused for minutes. A thread inside torch would abort the process."""
    program = tmp_path / "send.py"
    program.write_text(
        "import signal, sys, threading, time\n"
        "from turnstile import Client\n"
        "interrupted = threading.Event()\n"
        "def interrupt(*_):\n"
        "    interrupted.set()\n"
        "    raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGINT, interrupt)\n"
        "def slow():\n"
        "    print('sending', flush=True)\n"
        "    interrupted.wait()\n"
        "    time.sleep(0.3)\n"  # for so long the command must wait for this thread
        "    open('made', 'w').close()\n"
        "    yield from ()\n"
        "Client(sys.argv[1]).update_weights_from_tensors(slow(), 'v2')\n"
    )
    command = [sys.executable, str(program), stub.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sending\n"
        sender.send_signal(signal.SIGINT)
        assert sender.wait(60) == -signal.SIGINT
    assert stub.calls == ["GET /engine", "POST /engine/weights/begin", "POST /engine/weights/cancel"]
    assert (tmp_path / "made").exists()


def test_a_relative_folder_is_the_one_of_the_command(
    stub: EngineStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was started in another folder, where it would look for a relative path."""
    (tmp_path / "step-1").mkdir()
    monkeypatch.chdir(tmp_path)
    for arguments in (["weights", "step-1", "v2"], ["adapters", "load", "sql", "step-1"]):
        result = CliRunner().invoke(app, ["engine", *arguments, "--url", stub.url])
        assert result.exit_code == 0, result.output
        assert stub.asked[-1][1]["path"] == str(tmp_path / "step-1")
    for arguments in (["weights", "step-2", "v2"], ["adapters", "load", "sql", "step-2"]):
        result = CliRunner().invoke(app, ["engine", *arguments, "--url", stub.url])
        assert (result.exit_code, "absolute path" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("sending", [["--send"], ["--broadcast", "127.0.0.1:29500"]], ids=str)
def test_a_folder_that_cannot_be_sent_is_refused_before_an_engine_is_asked(
    stub: EngineStub, tiny_model: Path, tmp_path: Path, sending: list[str]
) -> None:
    cut, file, empty = tmp_path / "cut", tmp_path / "file", tmp_path / "empty"
    for folder in (cut, empty):
        folder.mkdir()
    whole = (tiny_model / "model.safetensors").read_bytes()
    (cut / "a.safetensors").write_bytes(whole)
    (cut / "b.safetensors").write_bytes(whole[:-1])
    file.write_bytes(whole)
    reasons = {
        cut: "b.safetensors is no safetensors file, or is cut short",
        file: "a file, not a folder",
        empty: "has no *.safetensors files",
        tmp_path / "nowhere": "is not there",
    }
    for folder, reason in reasons.items():
        asked = ["engine", "weights", str(folder), "v2", "--url", stub.url, *sending]
        result = CliRunner().invoke(app, asked)
        assert (result.exit_code, reason in result.stderr) == (2, True), result.output
    assert not [call for call in stub.calls if call.startswith("POST")]


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("127.0.0.1:0", "a port from 1 to 65535"),
        ("127.0.0.1:65536", "a port from 1 to 65535"),
        ("240.0.0.1:29500", "no address of this machine"),  # reserved: nobody has it
        ("nowhere.invalid:29500", "no store can be opened at nowhere.invalid"),
    ],
)
def test_an_address_where_no_store_can_be_is_refused_at_once(
    stub: EngineStub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, store: str, reason: str
) -> None:
    """torch's own time-out does not say so: it is longer than a test may take."""
    monkeypatch.setattr(weights.open_store, "__kwdefaults__", {"timeout_s": 3600.0})
    asked = ["engine", "weights", str(tiny_model), "v2", "--url", stub.url, "--broadcast", store]
    result = CliRunner().invoke(app, asked)
    assert (result.exit_code, reason in result.stderr) == (2, True), result.output
    assert "POST /engine/groups" not in stub.calls


def test_an_engine_that_joins_no_group_is_not_asked_to(stub: EngineStub, tiny_model: Path) -> None:
    """Else the command would wait for it until the time-out, after it was refused."""
    stub.updates = ("disk",)
    asked = ["engine", "weights", str(tiny_model), "v2", "--url", stub.url, "--broadcast", "127.0.0.1:29500"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2, result.output
    assert "joins no process group; it takes new weights by: disk" in result.stderr
    assert stub.calls == ["GET /engine"]


@pytest.mark.parametrize(
    "ranks", [[], ["--ranks", "3"]], ids=["a port that is taken", "more ranks than workers have"]
)
def test_a_command_that_cannot_broadcast_asks_no_engine_to_wait(
    stub: EngineStub, tiny_model: Path, ranks: list[str]
) -> None:
    stub.workers = 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        store = f"127.0.0.1:{taken.getsockname()[1]}"
        asked = ["engine", "weights", str(tiny_model), "v2", "--url", stub.url, "--broadcast", store, *ranks]
        result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2, result.output
    assert ("shared equally by 2 workers" if ranks else f"no store can be opened at {store}") in result.stderr
    assert stub.calls == ["GET /engine"]


@pytest.mark.slow
def test_a_command_whose_engines_do_not_join_says_so_and_ends(stub: EngineStub, tiny_model: Path) -> None:
    """Its own rank waits for the others until the time-out, and must not take the process down with it."""
    stub.refuses["POST /engine/groups"] = "it does not join"
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "turnstile", "engine", "weights", str(tiny_model), "v2", "--url", stub.url]
    command += ["--broadcast", store, "--backend", "gloo", "--group-timeout", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done
    assert done.stderr.startswith("turnstile: it does not join\n"), done.stderr
    assert stub.calls == ["GET /engine", "POST /engine/groups"]
