"""The programs that run in the grading sandbox, as one tar: the package ``inside``, and ``as-work`` for shells.

They go there compiled, too: a sandbox keeps nothing that it compiles, and compiling them is a quarter of what a
light grading costs. An interpreter of another version than the server's passes over that and takes the sources.
"""

from __future__ import annotations

import io
import marshal
import secrets
import sys
import tarfile
from functools import lru_cache
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path, PurePosixPath

from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, Sandbox

INSIDE = Path(__file__).parent / "inside"
LAUNCH_CLIENT = INSIDE / "launch.py"
"""Program with which a command asks the sandbox's launcher; agents that have one get it, too."""
PLACE = "/tmp/turnstile-grading"
PROGRAMS = f"{PLACE}/programs"
AS_WORK = f"{PROGRAMS}/bin/as-work"
"""In the environment of a command that judges: runs a program as the work's user."""
MODULES = f"{PROGRAMS}/inside/for_tests"
"""On the path of hidden tests in Python."""
HIDDEN = "/tmp/turnstile-hidden"
"""The hidden tests where the work runs apart: a folder of the user that judges, which the work cannot read."""
SHARED = "/tmp/turnstile-shared"
"""For temporary files of what judges: the work may use them, too. The helper knows it (``compartments.py``)."""
_TIMES, _TIMES_A_SECOND = 1 << 50, 1 << 20
_FLAGS = ("-I", "-S", "-B")
IMAGE_TESTS = (IMAGE_PYTHON, *_FLAGS)
"""Runs what the hidden tests are part of: they need the image's interpreter and its packages."""


def python_of(sandbox: Sandbox) -> tuple[str, ...]:
    """Runs our own programs in a sandbox."""
    return (sandbox.python, *_FLAGS)


def private(archive: bytes, name: str) -> bytes:
    """A tar of the same below folders ``name`` that are closed to all but their owner. Its files cannot be written
    to: a link that the work puts where a test writes leads to none of them. Nobody knows when they were changed:
    ``filecmp.cmp`` takes files of one size and one time for equal."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as given, tarfile.open(fileobj=out, mode="w") as made:
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            folder = tarfile.TarInfo("/".join(parts[:count]))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o700
            made.addfile(folder)
        for member in given:
            member.name = f"{name}/{member.name}"
            member.mode &= 0o777 if member.isdir() else 0o555
            member.mtime = secrets.randbelow(_TIMES) / _TIMES_A_SECOND
            made.addfile(member, given.extractfile(member) if member.isreg() else None)
    return out.getvalue()


@lru_cache(maxsize=4)
def pack_programs(python: tuple[str, ...]) -> bytes:
    """``python``: what runs them. The same bytes for the life of the server."""
    found = {f"inside/{path.relative_to(INSIDE).as_posix()}": path.read_bytes() for path in INSIDE.rglob("*.py")}
    found |= {_compiled_name(name): compiled(name, source) for name, source in found.items()}
    found["bin/as-work"] = f'#!/bin/sh\nexec {" ".join(python)} {PROGRAMS}/inside/launch.py "$@"\n'.encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(found):
            info = tarfile.TarInfo(name)
            info.size = len(found[name])
            info.mode = 0o755 if name.startswith("bin/") else 0o644
            archive.addfile(info, io.BytesIO(found[name]))
    return out.getvalue()


def _compiled_name(name: str) -> str:
    """Path at which an interpreter looks for a module's compiled form (PEP 3147)."""
    path = PurePosixPath(name)
    return f"{path.parent}/__pycache__/{path.stem}.{sys.implementation.cache_tag}.pyc"


def compiled(name: str, source: bytes) -> bytes:
    """A module's compiled form, of the kind that is not compared with its source (PEP 552). An import replaces the
    file that it names; the work's process, which gets its modules without files, shows it in tracebacks."""
    shown = f"<boundary {PurePosixPath(name).stem}>"
    code = compile(source, shown, "exec", dont_inherit=True, optimize=0)
    return MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(source) + marshal.dumps(code)
