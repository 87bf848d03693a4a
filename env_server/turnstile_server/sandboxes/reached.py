"""What a sandbox reaches of the network, tried from inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.protocol import Command, Sandbox

_CONNECT: Final = """
import os, socket, sys, threading, time
def reach(word):
    host, _, port = word.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 3).close()
    except OSError:
        return
    print(word, flush=True)
tries = [threading.Thread(target=reach, args=(word,), daemon=True) for word in sys.argv[1:]]
until = time.monotonic() + 4  # a name service that does not answer keeps a thread for longer
for each in tries:
    each.start()
for each in tries:
    each.join(max(0, until - time.monotonic()))
os._exit(0)
"""


async def reached_from(sandbox: Sandbox, targets: Sequence[str], timeout_s: float) -> list[str]:
    """Those of ``targets`` (``HOST:PORT``) that take a TCP connection from ``sandbox``. Raises SandboxFailed."""
    done = await sandbox.exec(Command((sandbox.python, "-c", _CONNECT, *targets), timeout_s=timeout_s))
    if done.exit_code != 0:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SandboxFailed(f"it could not be tried what a sandbox reaches (exit code {done.exit_code}): {said}")
    return done.stdout.decode().split()
