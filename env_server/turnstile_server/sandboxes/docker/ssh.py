"""A Docker engine on another machine, by ssh: its socket there, as a Unix socket here.

Owns one child, OpenSSH's client, which forwards the socket: all connections to the engine go through one login,
and neither ``MaxSessions`` nor ``MaxStartups`` of the sshd there bounds them. The child's other end reads its
standard input, so it ends with this process, however that ends. A link that was lost is made again by the next
call.

Keys, jump hosts and other names are those of the user's own ``~/.ssh/config``. Nothing is ever asked for: no
password, no passphrase, no unknown host key.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from turnstile_server.errors import SandboxUnavailable

SCHEME = "ssh"
_DEFAULT = "/var/run/docker.sock"
_PATH = re.compile(r"/[\w./+-]*")
_MARK = "turnstile-engine:"
_LOOK = f"""
if [ ! -e $s ]; then v=missing
elif [ ! -S $s ]; then v=other
elif [ ! -r $s ] || [ ! -w $s ]; then v=denied
else v=ready; fi
echo "{_MARK} $v $(id -un)"
exec cat > /dev/null
"""
"""Run there by the login's shell, which starts when the socket here listens."""
_OPTIONS = {
    "BatchMode": "yes",
    "ExitOnForwardFailure": "yes",
    "StreamLocalBindMask": "0177",
    "StreamLocalBindUnlink": "yes",
    # A machine that is gone is noticed within a minute.
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "3",
    # Of the user's configuration what would have the link outlive this child, or run something else.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ForkAfterAuthentication": "no",
    "RemoteCommand": "none",
    "PermitLocalCommand": "no",
}
_ENVIRONMENT = ("PATH", "HOME", "SSH_AUTH_SOCK")
_KEPT = 2000
"""Last bytes that the client wrote."""
_CHANGED, _UNKNOWN = "REMOTE HOST IDENTIFICATION HAS CHANGED", "Host key verification failed"


_SAID_S: Final = 1.0
"""For ssh to say why it closed a connection."""


class SshLink:
    """``url``: ``ssh://[USER@]HOST[:PORT][/PATH]``, PATH being the engine's socket there. ``run_dir``: where the
    socket here lies; None: in the temporary folder. ``timeout_s``: for the login. Raises SandboxUnavailable where
    the address is none."""

    def __init__(self, url: str, run_dir: Path | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._path = _DEFAULT if parts.path in ("", "/") else parts.path
        try:
            port = parts.port
        except ValueError:
            port = -1
        if not parts.hostname or parts.password or port == -1 or not _PATH.fullmatch(self._path):
            raise SandboxUnavailable(
                f"the engine's address {url} is not ssh://[USER@]HOST[:PORT][/PATH/OF/SOCKET]"
            )
        host = parts.netloc.rpartition("@")[2].removesuffix("" if port is None else f":{port}")
        self._target = [
            *(() if parts.username is None else ("-l", parts.username)),
            *(() if port is None else ("-p", str(port))),
            *("--", host.strip("[]")),
        ]
        self.url = url
        self._timeout_s = timeout_s
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="sb-engine-", dir=run_dir))
        except OSError as error:
            raise SandboxUnavailable(f"no socket can be made for the engine at {url}: {error}") from error
        self.socket = self._folder / "sock"
        self._lock = threading.Lock()
        self._login: _Login | None = None
        self._closed = False

    def ensure(self) -> None:
        """Returns once the socket listens. Blocks. Raises SandboxUnavailable, which says what is wrong."""
        with self._lock:
            if self._login is None or self._login.ended:
                self._login = self._log_in()
            login = self._login
            if self._closed:
                login.end()
                raise SandboxUnavailable("the Docker engine is not connected")
            if not login.known.wait(self._timeout_s):
                login.end()
                raise SandboxUnavailable(f"no login at {self.url} within {self._timeout_s:g} s")
        verdict, user = login.verdict
        if verdict != "ready":
            login.end()
            raise SandboxUnavailable(self._fault(verdict, user, login.said))

    def close(self) -> None:
        """Ends the child. Does not block; it may be called again."""
        self._closed = True
        if self._login is not None:
            self._login.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def silence(self) -> str:
        """Why no engine answers at a socket that is forwarded. Blocks: ssh says it a moment after it closed."""
        said = ""
        if self._login is not None:
            self._login.spoke.wait(_SAID_S)
            said = self._login.said
        return (
            f"no engine answers at {self._path} of {self.url}: start Docker there; sshd there must forward "
            f"sockets (AllowStreamLocalForwarding): {said or 'it closes at once'}"
        )

    def _log_in(self) -> _Login:
        options = {**_OPTIONS, "ConnectTimeout": str(max(1, round(self._timeout_s)))}
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        forward = ["-L", f"{self.socket}:{self._path}"]
        there = f"exec sh -c {shlex.quote(f's={self._path}{_LOOK}')}"
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        try:
            return _Login(["ssh", "-T", "-a", "-x", *words, *forward, *self._target, there], environment)
        except OSError as error:
            raise SandboxUnavailable(
                f"{self.url} needs OpenSSH's client, ssh (openssh-client): {error.strerror}"
            ) from error

    def _fault(self, verdict: str, user: str, said: str) -> str:
        host = self._target[-1]
        if verdict == "missing":
            return (
                f"there is no engine's socket at {self._path} of {self.url} that {user} can see: install and "
                f"start Docker there, or name the socket of another engine: ssh://…{host}/PATH/OF/SOCKET"
            )
        if verdict == "other":
            return f"{self._path} of {self.url} is not a socket"
        if verdict == "denied":
            return (
                f"{user} may not use the engine's socket {self._path} of {self.url}: there, as root: "
                f"usermod -aG docker {user}"
            )
        if _CHANGED in said:
            return (
                f"{host} has another host key than the one that this machine knows: somebody may be between. If "
                f"it was set up anew: ssh-keygen -R {host}, then log in once by hand"
            )
        if _UNKNOWN in said:
            return (
                f"the host key of {self.url} is not known to uid {os.geteuid()}: log in once by hand as that "
                "user, or put the key into known_hosts"
            )
        if "Permission denied" in said:
            return (
                f"{self.url} accepts no key of uid {os.geteuid()}: ssh-copy-id, or an agent with the key "
                f"(SSH_AUTH_SOCK); a passphrase or a password is never asked for: {said}"
            )
        return f"no login at {self.url}: {said or 'ssh said nothing'}"


class _Login:
    """One child. Its output is read by a thread, to the end, which is the child's."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.known = threading.Event()
        """The socket can be used, or never will be: see ``verdict``."""
        self.verdict = ("", "")
        """What was found there, and the user; empty: nothing was."""
        self._said = b""
        self.spoke = threading.Event()
        """It has said something, which is in ``said``."""
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is the server's
            bufsize=0,
        )
        threading.Thread(target=self._read, name="engine-ssh", daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace").strip()

    def end(self) -> None:
        self._child.kill()

    def _read(self) -> None:
        assert self._child.stdout is not None
        assert self._child.stdin is not None
        with self._child.stdin, self._child.stdout as output:
            while line := output.readline(_KEPT):
                words = line.decode(errors="replace").split()
                if len(words) == 3 and words[0] == _MARK:
                    self.verdict = (words[1], words[2])
                    self.known.set()
                else:
                    self._said = (self._said + line)[-_KEPT:]
                    self.spoke.set()
        self._child.wait()
        self.known.set()
