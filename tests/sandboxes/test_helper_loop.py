"""The helper's loop, in a process of its own (it takes the process's signals)."""

from __future__ import annotations

import subprocess
import sys

from turnstile_server.sandboxes.helper import HELPER_FOLDER

STALE = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from turnstile_helper.loop import Loop

loop, called = Loop(lambda: None), []
pairs = [socket.socketpair() for _ in range(2)]

def first(own, other):
    # Both are readable in one look: the other is closed, and its number is another connection's at once.
    called.append("first")
    loop.watch(own.fileno())
    number = other.fileno()
    loop.watch(number)
    other.close()
    idle = socket.socketpair()
    pairs.append(idle)
    again = next(end for end in idle if end.fileno() == number)
    loop.watch(again.fileno(), read=lambda: called.append("read nothing"), write=lambda: written(again))

def written(end):
    called.append("written")
    if called.count("written") == 2:
        print(*called)
        sys.stdout.flush()
        os._exit(0)

for (one, peer), (another, _) in (pairs, pairs[::-1]):
    peer.send(b"x")
    loop.watch(one.fileno(), read=lambda one=one, another=another: first(one, another))
loop.run()
"""


def test_an_event_of_a_descriptor_that_was_closed_meanwhile_reaches_nobody() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STALE, str(HELPER_FOLDER)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["first", "written", "written"], "")


FAULTY = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from turnstile_helper.loop import Loop

loop = Loop(lambda: None)
(one, peer), later = socket.socketpair(), []

def faulty():
    number = one.fileno()
    loop.watch(number)
    one.close()
    later.extend(socket.socketpair())
    again = next(end for end in later if end.fileno() == number)
    loop.watch(number, write=lambda: (print("still looked at", flush=True), os._exit(0)))
    raise RuntimeError("a fault")

peer.send(b"x")
loop.watch(one.fileno(), read=faulty)
loop.run()
"""


def test_a_fault_of_a_callback_stops_nothing_but_what_it_was_called_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTY, str(HELPER_FOLDER)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "still looked at\n"
    assert "RuntimeError: a fault" in done.stderr
