"""OpenSSH's server on a port of the loopback, with keys of its own, and a client that uses only those.

The client is the real one behind a script of its name, because it takes no other folder for its configuration than
that of the user's entry in the machine's list. Needs root, as sshd does to log others in.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

USER = "turnstile-ssh"
"""A user who may use nothing."""


class SshServer:
    """``folder``: for its keys and configuration. ``engine``: path of the engine's socket."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder = folder
        self.engine = engine
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.known = folder / "known_hosts"
        self.more = ""
        """Further lines of its configuration, at the next start."""
        self._server: subprocess.Popen[bytes] | None = None
        for name in ("host", "user", "other"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        (folder / "keys").write_bytes((folder / "user.pub").read_bytes())
        self.know("host")
        self.use("user")

    @property
    def url(self) -> str:
        return self.url_of("root", self.engine)

    def url_of(self, user: str, path: str = "") -> str:
        return f"ssh://{user}@127.0.0.1:{self.port}{path}"

    def know(self, key: str | None) -> None:
        """What the client takes for this server's key; None: it knows none."""
        self.known.write_text(f"[127.0.0.1]:{self.port} {(self.folder / f'{key}.pub').read_text()}" if key else "")

    def use(self, key: str) -> None:
        """The client's own key."""
        config = f"IdentityFile {self.folder / key}\nIdentitiesOnly yes\nUserKnownHostsFile {self.known}\n"
        (self.folder / "config").write_text(config)
        client = self.folder / "bin" / "ssh"
        client.parent.mkdir(exist_ok=True)
        client.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.folder / "config"} "$@"\n')
        client.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """In which `ssh` is that client."""
        return {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        config = self.folder / "sshd_config"
        config.write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {self.folder / 'host'}\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder / 'keys'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\n{self.more}\n"
        )
        self._server = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-f", str(config), "-E", str(self.folder / "log")], start_new_session=True
        )
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    def cut(self) -> None:
        """Ends it with all logins, as where the machine is lost."""
        if self._server is not None:
            for pid in [self._server.pid, *_below(self._server.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._server.wait()
            self._server = None


def clients(server: SshServer) -> list[int]:
    """Every running ssh to this server."""
    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if _line(folder).startswith("/usr/bin/ssh") and str(server.port) in _line(folder)
    ]


@contextlib.contextmanager
def ssh_server(engine: str) -> Iterator[SshServer]:
    """In a folder that others may read: sshd reads the keys there as whoever logs in."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        server = SshServer(Path(folder), engine)
        server.start()
        try:
            yield server
        finally:
            server.cut()


@contextlib.contextmanager
def plain_user() -> Iterator[str]:
    if shutil.which("useradd") is None:
        pytest.fail("the tests make a user: useradd is missing")
    _run("useradd", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/sh", "-p", "*", USER)
    try:
        yield USER
    finally:
        _run("userdel", "--force", USER)  # the end of its last login may be under way


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _line(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _below(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [each for child in children for each in (child, *_below(child))]
    return []
