"""For authors of hidden tests: runs the work's programs as the work's user, apart from what judges them.

    from turnstile_tests import python, run, shared_folder

    done = run([python, "-m", "tables", "join", "a.csv", "b.csv"], timeout=20)
    assert (done.returncode, done.stdout) == (0, "…")

A program that hidden tests start by themselves would run as the tests' user, and could change its judge. Works in
tests of every runner; in a `command` written in Python, too.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

__all__ = ["as_work", "python", "run", "shared_folder"]

python = sys.executable
"""The image's Python, for programs in Python."""
Word = Union[str, "os.PathLike[str]"]


def _launch_module() -> Any:
    """``launch.py``, which lies beside this file's folder, not on the path."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "launch.py")
    spec = importlib.util.spec_from_file_location("turnstile_launch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_LAUNCH = _launch_module()


def run(
    argv: Sequence[Word],
    *,
    input: str | bytes | None = None,
    cwd: Word | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
    text: bool = True,
    max_output: int = 16 << 20,
) -> subprocess.CompletedProcess[Any]:
    """Runs a program as the work's user, like ``subprocess.run`` with its output captured.

    ``cwd``: else the work folder. ``env``: over PATH, HOME, LANG and TMPDIR, which is all that it has. ``timeout``
    in seconds. ``text``: output is decoded (UTF-8, with replacements). Of each stream the first ``max_output``
    bytes are kept. Raises ``subprocess.TimeoutExpired``, with ``check`` ``subprocess.CalledProcessError``, and
    OSError where there is no launcher."""
    words = [os.fspath(word) for word in argv]
    given = input.encode() if isinstance(input, str) else (input or b"")
    streams = [os.pipe() for _ in range(3)]
    (stdin, feed), (out, stdout), (err, stderr) = streams
    kept: dict[int, bytearray] = {out: bytearray(), err: bytearray()}
    threads = [threading.Thread(target=_feed, args=(feed, given), daemon=True)]
    threads += [threading.Thread(target=_keep, args=(fd, kept[fd], max_output), daemon=True) for fd in kept]
    try:
        try:
            program = _LAUNCH.launch(
                words,
                stdio=(stdin, stdout, stderr),
                cwd=None if cwd is None else os.path.abspath(os.fspath(cwd)),
                env=env,
                timeout_s=timeout,
            )
        finally:
            for fd in (stdin, stdout, stderr):
                os.close(fd)
            for thread in threads:
                thread.start()
        ended = program.wait()
    except _LAUNCH.CannotLaunch as error:
        raise OSError(f"{words[0]}: {error}") from None
    finally:
        for thread in threads:
            thread.join()
    said = [bytes(kept[fd]) for fd in (out, err)]
    shown: list[Any] = [part.decode(errors="replace") for part in said] if text else list(said)
    if ended["timed_out"]:
        assert timeout is not None
        raise subprocess.TimeoutExpired(words, timeout, *shown)
    code = ended["exit_code"]
    done = subprocess.CompletedProcess(words, 128 - code if code > 128 else code, *shown)
    if check:
        done.check_returncode()
    return done


def _feed(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data[: 1 << 16]) :]
    os.close(fd)


def _keep(fd: int, kept: bytearray, most: int) -> None:
    while part := os.read(fd, 1 << 16):
        kept += part[: max(0, most - len(kept))]
    os.close(fd)


def as_work(argv: Sequence[Word], **options: Any) -> str:
    """The output of a program that must succeed: ``run(argv, check=True, …).stdout``."""
    return str(run(argv, check=True, **options).stdout)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A new folder that tests and work may both read and write; removed at the end."""
    folder = tempfile.mkdtemp(prefix="shared-")
    # Not by its name: where the folder above is the work's to write to, a link may stand there by now.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchmod(fd, 0o777)
    finally:
        os.close(fd)
    before = os.umask(0)
    try:
        yield folder
    finally:
        os.umask(before)
        shutil.rmtree(folder, ignore_errors=True)
