"""What an attack on a sandbox is (``attacks.py``), and its short forms."""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def attempt(action):
    try:
        print("DONE", action())
    except OSError as error:
        print("refused:", errno.errorcode.get(error.errno, error))
    sys.exit(0)
"""


@dataclass(frozen=True)
class Attack:
    """``bounded``: it may do what it does, up to a limit. ``after``: a second program, which prints the answer in
    the script's place; it runs as the tests' user when everything of the first was stopped."""

    name: str
    what: str
    script: str
    bounded: bool = False
    after: str = ""


def by_call(name: str, what: str, expression: str) -> Attack:
    return Attack(name, what, f"attempt(lambda: {expression})")


def by_opening(name: str, path: str, mode: str = "rb") -> Attack:
    action = "read" if mode == "rb" else "write"
    argument = "1" if mode == "rb" else 'b"1"'
    return Attack(name, f"{action} `{path}`", f"attempt(lambda: open({path!r}, {mode!r}, 0).{action}({argument}))")
