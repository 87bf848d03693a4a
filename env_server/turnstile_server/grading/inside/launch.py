"""Runs a program as another user, by the sandbox's launcher: ``as-work PROGRAM ARGUMENT…``, and functions.

A command that judges never runs the work itself, and an agent apart never its model's commands: each asks the
launcher, whose descriptor it inherited (``TURNSTILE_LAUNCHER``); the other user is the work's, or ``agent``.
``as-work`` gives the program its own standard input, output and error, folder and environment variables that begin
with ``AS_WORK_`` (without these letters), and ends with its exit status.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

VARIABLE = "TURNSTILE_LAUNCHER"
PREFIX = "AS_WORK_"
CANNOT_LAUNCH = 125


class CannotLaunch(Exception):
    """There is no launcher here, or it refused. A sentence."""


class Launched:
    """A program that runs as the other user, until ``kill`` or its end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._answer: dict[str, Any] | None = None

    def fileno(self) -> int:
        """Readable when the program has ended."""
        return self._control.fileno()

    def wait(self) -> dict[str, Any]:
        """``exit_code``, and ``timed_out``. Raises CannotLaunch where no process could be made."""
        if self._answer is None:
            said = b""
            while not said.endswith(b"\n"):
                part = self._control.recv(1 << 16)
                if not part:
                    break
                said += part
            self._control.close()
            self._answer = json.loads(said) if said else {"error": "the launcher is gone"}
        if "error" in self._answer:
            raise CannotLaunch(self._answer["error"])
        return self._answer

    def kill(self) -> None:
        """Kills its whole session; ``wait`` then tells its end."""
        if self._answer is None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)


def descriptor() -> int:
    """The launcher's. Raises CannotLaunch."""
    number = os.environ.get(VARIABLE, "")
    if not number.isdigit():
        raise CannotLaunch(
            "there is no launcher here: this sandbox has no helper inside, the descriptor was not passed on, or "
            "no file of the tests names AS_WORK or turnstile_tests"
        )
    return int(number)


def launch(
    argv: Sequence[str],
    *,
    stdio: Sequence[int],
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    through: int | None = None,
) -> Launched:
    """Starts ``argv`` as the other user. ``stdio``: its descriptors 0, 1 and 2; ``cwd`` None: the work folder;
    ``env``: over the sandbox's own; ``through``: the launcher, else the inherited one. Raises CannotLaunch."""
    ours = _ask(b"launch", stdio, through)
    request = {"argv": list(argv), "cwd": cwd, "env": dict(env or {}), "timeout_s": timeout_s}
    try:
        ours.sendall(json.dumps(request).encode() + b"\n")
    except OSError as error:
        ours.close()
        raise CannotLaunch(f"the launcher does not answer: {error.strerror}") from None
    return Launched(ours)


def sweep(through: int | None = None) -> None:
    """Kills every process of the other user, where its uid is its own. Raises CannotLaunch."""
    Launched(_ask(b"sweep", (), through)).wait()


def _ask(word: bytes, fds: Sequence[int], through: int | None) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    rights = array.array("i", [theirs.fileno(), *fds])
    try:
        where = os.dup(descriptor() if through is None else through)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=where) as launcher:
            launcher.sendmsg([word], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    except OSError as error:
        ours.close()
        raise CannotLaunch(f"the launcher cannot be asked: {error.strerror}") from None
    finally:
        theirs.close()
    return ours


def main() -> int:
    if len(sys.argv) < 2:
        sys.stderr.write("as-work: which program?\n")
        return CANNOT_LAUNCH
    env = {name[len(PREFIX) :]: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    try:
        return int(launch(sys.argv[1:], stdio=(0, 1, 2), cwd=os.getcwd(), env=env).wait()["exit_code"])
    except CannotLaunch as error:
        sys.stderr.write(f"as-work: {error}\n")
        return CANNOT_LAUNCH


if __name__ == "__main__":
    sys.exit(main())
