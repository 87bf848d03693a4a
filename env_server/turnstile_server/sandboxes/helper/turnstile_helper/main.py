"""Connects to the server and serves requests until the connection ends; then kills everything.

Dials the server's socket and sends the token, or dials out (``dial.py``); where it is given neither, standard
input and output are the connection, and the server speaks first. Holds: the connection is made before any other
program runs in the sandbox, and once; a request that fails answers with its failure and disturbs no other; when
the server is gone nothing in the sandbox runs on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, Callable, Mapping, NoReturn, Sequence  # noqa: UP035 - Python 3.8

from . import files, frames, processes, setup
from .carry import Carrier
from .compartments import APART, HARNESS, become_first_process
from .forward import Forwarder
from .job import Job, Pipes
from .launcher import DESCRIPTOR, VARIABLE, LaunchConfig, Launcher
from .loop import Loop
from .outbox import Outbox
from .output import CutOutput, Output, Passed
from .rights import NO_RIGHTS_TAKEN
from .spawn import CANNOT_RUN, Spawner, take_descriptors

if TYPE_CHECKING:
    from .dial import Link

_LINK = "LINK"
_TOKEN = "TURNSTILE_HELPER_TOKEN"
_SOCKET = "TURNSTILE_HELPER_SOCKET"
_MAX_COMPLAINT = 8192


def main() -> int:
    if APART in sys.argv:
        become_first_process()
    link = _link()
    if link is not None:
        reading = link.connection.detach()
        writing = os.dup(reading)
    else:
        reading, writing = _dial(os.environ[_SOCKET]) if _SOCKET in os.environ else _standard_streams()
    hello = frames.encode({"hello": frames.VERSION, "token": os.environ.pop(_TOKEN, "")})
    # Less than any pipe holds, so it goes out whole.
    os.write(writing, hello if link is None else link.seal(hello))
    facts = {"cwd": os.getcwd(), "env": dict(os.environ), "machine": os.uname().machine}
    os.environ.clear()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    if os.getpid() != 1:
        processes.adopt_orphans()
    if os.geteuid() != 0:
        processes.hide_memory()
    take_descriptors()
    gc.freeze()  # a child shares these pages for longer
    Helper(reading, writing, facts, link).run()
    return frames.CONNECTION_LOST


def _link() -> Link | None:
    """The connection of a helper that is told to dial out."""
    if _LINK not in sys.argv:
        return None
    from .dial import dial_out  # noqa: PLC0415 - TLS costs 20 ms, and small Pythons lack it

    return dial_out(sys.argv[sys.argv.index(_LINK) + 1])


def _dial(path: str) -> tuple[int, int]:
    """The reading and the writing end of the connection to the server's socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    reading = connection.detach()
    return reading, os.dup(reading)


def _standard_streams() -> tuple[int, int]:
    """The same of standard input and output, which then lead elsewhere: no stray word gets among the frames."""
    reading, writing = os.dup(0), os.dup(1)
    if os.read(reading, 1) != frames.GREETING:
        sys.exit(frames.CONNECTION_LOST)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return reading, writing


class Helper:
    """``link``: the TLS of the connection, where it has some."""

    def __init__(self, reading: int, writing: int, facts: Mapping[str, Any], link: Link | None = None) -> None:
        self._reading = reading
        self._facts = facts
        self._link = link
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._decoder = frames.Decoder()
        self._loop = Loop(self._reap)
        self._outbox = Outbox(self._loop, writing, self._leave, None if link is None else link.seal)
        self._loop.watch(reading, read=self._read)
        self._jobs: dict[int, Job] = {}
        self._by_pid: dict[int, Callable[[int], None]] = {}
        """The receiver of each child's wait status, by pid."""
        self._spawner = Spawner({}, {}, NO_RIGHTS_TAKEN)
        self._config: Mapping[str, Any] = {}
        self._carriers: dict[bool, Carrier] = {}
        """The agent endpoint's, and (True) the network's."""

    def run(self) -> None:
        self._loop.run()

    def _read(self) -> None:
        try:
            data = os.read(self._reading, frames.CHUNK)
            if not data:
                self._leave()
            if self._link is not None:
                data = self._link.unseal(data)
        except BlockingIOError:
            return
        except OSError:
            self._leave()
        try:
            for header, payload in self._decoder.feed(data):
                self._dispatch(header, payload)
        except frames.FrameError as error:
            sys.stderr.write(f"the server's frames cannot be read: {error}\n")
            self._leave()

    def _dispatch(self, header: dict[str, Any], payload: bytes) -> None:
        if "conn" in header:
            carrier = self._carriers.get("net" in header)
            if carrier is not None:
                carrier.take(header, payload)
            return
        request, operation = header["id"], header["op"]
        try:
            if operation == "data":
                if request in self._jobs:
                    self._jobs[request].feed(payload, bool(header.get("last")))
            elif operation == "kill":
                if request in self._jobs:
                    self._jobs[request].kill()
            elif operation == "run":
                self._run(request, header)
            elif operation == "file":
                self._file(request, header)
            elif operation == "stop_all":
                self._stop_all(request)
            elif operation in ("facts", "setup"):
                answer = self._facts if operation == "facts" else self._setup(header)
                self._outbox.send({"id": request, "ev": "end", **answer})
            else:
                raise ValueError(f"there is no operation {operation!r}")
        except Exception as error:  # noqa: BLE001 - one request's fault may not end the others
            sentence = f"{type(error).__name__}: {error}"
            self._outbox.send({"id": request, "ev": "end", "error": sentence})

    def _stop_all(self, request: int) -> None:
        left = processes.kill_all(bool(self._config.get("own_processes")), self._first_processes())
        self._reap()
        if self._spawner.compartments is not None:
            self._spawner.compartments.forget()
        self._outbox.send({"id": request, "ev": "end", "left": left})

    def _setup(self, header: Mapping[str, Any]) -> dict[str, Any]:
        rights = setup.rights_of(header)
        proc = setup.make_mounts(header)
        uids = setup.usable_uids(header["uids"])
        setup.make_folders(header, uids)
        compartments = None if uids else setup.make_compartments(header)
        self._spawner = Spawner(uids, header["rlimits"], rights, compartments, proc)
        setup.check(self._spawner)
        self._config = header
        return {
            "own_uids": bool(uids),
            "compartments": compartments is not None,
            "filtered": rights.held,
            "port": self._forwarded(header["forward"], network=False),
            "network_port": self._forwarded(header["network"], network=True),
        }

    def _forwarded(self, forward: Mapping[str, Any] | None, *, network: bool) -> int | None:
        """The port of the loopback that is forwarded from now on."""
        if forward is None:
            return None
        port, path, limit = forward["port"], forward["socket"], forward["connections"]
        if not forward["carried"]:
            return Forwarder(self._loop, port, path, limit).port  # the loop keeps it
        self._carriers[network] = Carrier(self._loop, self._outbox, port, path, limit, network)
        return self._carriers[network].port

    def _run(self, request: int, header: Mapping[str, Any]) -> None:
        user = header["user"]
        env = {
            **self._config["env"],
            "HOME": self._config["homes"][user],
            **({} if user == HARNESS else self._config["task_env"]),
            **header.get("network", {}),
            **header["env"],
        }
        first: Output = CutOutput(self._outbox, request, 1, header["max_output"])
        if header.get("passed"):
            first = Passed(self._outbox, request, 1)
        outputs = (first, CutOutput(self._outbox, request, 2, header["max_output"]))
        try:
            argv = [_encoded(word) for word in header["argv"]]
            environment = {_encoded(name): _encoded(value) for name, value in env.items()}
            cwd = _encoded(header["cwd"] or self._config["workdir"])
            pipes = Pipes(header["stdin_size"] > 0)
        except (OSError, ValueError) as error:
            self._could_not_run(request, str(error))
            return
        stdio = [pipes.child_in, pipes.child_out, pipes.child_err]
        launcher = None
        if header.get("launches") is not None:
            launcher = self._launcher(header["launches"], header.get("network", {}))
            stdio.append(launcher.given)
            environment[os.fsencode(VARIABLE)] = str(DESCRIPTOR).encode()
        try:
            pid = self._spawner.command(argv, cwd, environment, user, stdio, launches=launcher is not None)
        except OSError as error:
            # The sandbox is full of processes. That is the fault of what ran in it, not of the sandbox.
            pipes.close()
            if launcher is not None:
                launcher.close(lambda: None)
            self._could_not_run(request, f"no process could be made: {error.strerror}")
            return
        finally:
            if launcher is not None:
                launcher.started()
        self._own(request, pid, pipes, outputs, header, launcher)

    def _launcher(self, user: str, network: Mapping[str, str]) -> Launcher:
        """For a command that may run programs as ``user``."""
        own, task = self._config["env"], self._config["task_env"]
        env = {**own, "HOME": self._config["homes"][user], **task, **network}
        config = LaunchConfig(user, env, self._config["workdir"])
        return Launcher(self._loop, self._spawner, config, self._by_pid.__setitem__, self._config["grace_s"])

    def _could_not_run(self, request: int, sentence: str) -> None:
        self._outbox.send_long(
            {"id": request, "ev": "out", "stream": 2}, sentence.encode(errors="replace") + b"\n"
        )
        self._outbox.send(
            {
                "id": request,
                "ev": "end",
                "exit_code": CANNOT_RUN,
                "timed_out": False,
                "dropped": 0,
                "duration_s": 0.0,
            }
        )

    def _file(self, request: int, header: Mapping[str, Any]) -> None:
        pipes = Pipes(header["stdin_size"] > 0)
        try:
            pid = self._spawner.fork(
                lambda: files.run(header["action"], header["path"], header["max_bytes"], header["mode"]),
                header["user"],
                (pipes.child_in, pipes.child_out, pipes.child_err),
            )
        except OSError:
            pipes.close()
            raise
        outputs = (Passed(self._outbox, request, 1), CutOutput(self._outbox, request, 2, _MAX_COMPLAINT))
        self._own(request, pid, pipes, outputs, header)

    def _own(
        self,
        request: int,
        pid: int,
        pipes: Pipes,
        outputs: tuple[Output, Output],
        header: Mapping[str, Any],
        launcher: Launcher | None = None,
    ) -> None:
        pipes.close_child_ends()

        def ended(tell: Callable[[], None]) -> None:
            del self._jobs[request]
            self._by_pid.pop(pid, None)
            if launcher is not None:
                launcher.close(tell)
            else:
                tell()

        job = Job(
            self._loop,
            self._outbox,
            request,
            pid,
            pipes,
            outputs,
            header["stdin_size"],
            header["timeout_s"],
            self._config["grace_s"],
            ended,
            header.get("line_s"),
        )
        self._jobs[request] = job
        self._by_pid[pid] = job.exited

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._spawner.compartments is not None:
                self._spawner.compartments.ended(pid)
            ended = self._by_pid.pop(pid, None)
            if ended is not None:
                ended(status)

    def _first_processes(self) -> Sequence[int]:
        """They end only when the helper has reaped the rest of their compartments."""
        compartments = self._spawner.compartments
        return [] if compartments is None else compartments.inits

    def _leave(self) -> NoReturn:
        with contextlib.suppress(OSError):
            processes.kill_all(bool(self._config.get("own_processes")), self._first_processes())
        if self._link is not None:
            self._link.note_end()
        os._exit(frames.CONNECTION_LOST)


def _encoded(text: str) -> bytes:
    """As the system wants names. Raises ValueError for what no name may hold."""
    if "\0" in text:
        raise ValueError("a command, its folder and its environment hold no NUL characters")
    return os.fsencode(text)
