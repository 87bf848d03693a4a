"""The embedded engine's process, started by its parent as ``python -m turnstile_server.engines.embedded.worker``.

What must hold: it writes exactly one JSON line to stdout, ``{"ready": true}`` or ``{"error": "…"}``; it never
outlives its parent (the kernel's parent-death signal, and the end of stdin, which the parent holds open); it
removes the folder of its socket when the parent could not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import orjson
import torch
from aiohttp import web

from turnstile_server.engines.embedded.app import WorkerApp
from turnstile_server.engines.embedded.device import DeviceError, compute_device
from turnstile_server.engines.embedded.grammars import Grammars
from turnstile_server.engines.embedded.model import LoadedModel, ModelError, load_tokenizer, weights_name
from turnstile_server.engines.embedded.scheduler import Scheduler, SchedulerLimits

PR_SET_PDEATHSIG: Final = 1
EXIT_CRASHED: Final = 70
MAX_BODY_BYTES: Final = 1 << 30
"""The parent's gate has the real limit."""


def main() -> None:
    arguments = _arguments()
    status = _take_stdout()
    end = _End(arguments.socket)
    _die_with_parent(end)
    torch.set_num_threads(arguments.threads)
    try:
        compute = compute_device(arguments.device, arguments.dtype)
        model = LoadedModel(arguments.model, weights_name(arguments.model), compute)
        tokenizer = load_tokenizer(arguments.model)
        model.check_cache()
    except ModelError as error:
        _report(status, {"error": f"The model folder {arguments.model} cannot be served: {error}."})
        sys.exit(2)
    except DeviceError as error:
        _report(status, {"error": f"The embedded engine cannot start: {error}."})
        sys.exit(2)
    window = min(model.window, arguments.context_length or model.window)

    def encode(text: str, special: bool) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    own_eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    eos_ids = model.eos_ids | frozenset(own_eos)
    app = WorkerApp(
        vocab_size=model.vocab_size,
        window=window,
        eos_ids=eos_ids,
        encode=encode,
        grammars=Grammars(tokenizer, model.vocab_size, min(eos_ids, default=None)),
        incremental=arguments.incremental_streaming_output,
    )
    limits = SchedulerLimits(max_batch=arguments.max_batch, prefill_chunk=arguments.prefill_chunk, window=window)
    scheduler = Scheduler(model, limits, decode, app.post, crash=lambda: end(EXIT_CRASHED), seed=arguments.seed)
    anyio.run(_serve, app, scheduler, arguments.socket, status, end)


async def _serve(app: WorkerApp, scheduler: Scheduler, socket: Path, status: int, end: _End) -> None:
    app.attach(scheduler)
    scheduler.start()
    server = web.Application(client_max_size=MAX_BODY_BYTES)
    server.add_routes(app.routes())
    runner = web.AppRunner(server, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        _report(status, {"ready": True})
        await anext(signals)
        # No orderly shutdown: callers see a broken connection, and torch may be in a long step. Behind this block
        # a second signal would end the process before its folder is removed.
        end(0)


def _die_with_parent(end: _End) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        while os.read(0, 1024):
            pass
        end(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class _End:
    """Ends the process at once, from any thread, with the folder of its socket removed. Of several callers the
    first one does it all: another's exit must not come in between."""

    def __init__(self, socket: Path) -> None:
        self._folder = socket.parent
        self._begun = threading.Lock()

    def __call__(self, code: int) -> None:
        with self._begun:
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(code)


def _take_stdout() -> int:
    """Keeps stdout for the one line; output of libraries goes to stderr."""
    status = os.dup(1)
    os.dup2(2, 1)
    return status


def _report(status: int, message: dict[str, object]) -> None:
    os.write(status, orjson.dumps(message) + b"\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The embedded engine's process; started by Turnstile.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket, alone in its folder")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--context-length", type=int, default=None)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
