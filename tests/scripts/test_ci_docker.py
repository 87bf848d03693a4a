"""What the daemons of scripts/ci_docker.sh inherit. A stand-in plays dockerd; the script is the real one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ci_docker.sh"
STAND_IN = f"""#!{sys.executable}
import http.server, json, os, pathlib, socketserver, sys

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pathlib.Path(arguments["--pidfile"]).write_text(str(os.getpid()))
files = [pathlib.Path(f"/proc/self/fd/{{fd}}") for fd in sorted(map(int, os.listdir("/proc/self/fd")))]
opened = [str(file.readlink()) for file in files if file.is_symlink()]
pathlib.Path(os.environ["OPENED"]).write_text(json.dumps(opened))


class Ping(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def address_string(self):
        return "engine"


socketserver.UnixStreamServer(arguments["--host"].removeprefix("unix://"), Ping).serve_forever()
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an engine is started by root only")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "dockerd").write_text(STAND_IN)
    (programs / "dockerd").chmod(0o755)
    root = tmp_path / "engine"
    yield {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TURNSTILE_CI_DOCKER": str(root),
        "TURNSTILE_USUAL_DOCKER": str(tmp_path / "none.sock"),
        "OPENED": str(tmp_path / "opened.json"),
    }
    pid = root / "pid"
    if pid.exists():
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_daemon_keeps_no_file_of_the_caller(environment: dict[str, str], tmp_path: Path) -> None:
    lock = (tmp_path / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = subprocess.run(
        [SCRIPT, "up"], env=environment, pass_fds=(lock.fileno(),), capture_output=True, text=True, check=True
    )
    assert "CI_DOCKER_STARTED=1" in done.stdout
    lock.close()
    with (tmp_path / "lock").open("w") as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a daemon holds the lock
    opened = json.loads(Path(environment["OPENED"]).read_text())
    assert opened == ["/dev/null", *[str(tmp_path / "engine" / "log")] * 2]
