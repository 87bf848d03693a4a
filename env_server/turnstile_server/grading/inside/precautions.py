"""Precautions of the process that judges, before it runs hidden tests across the boundary.

``refuse_programs`` catches what an author overlooked, not an adversary: nothing of the work runs in this process.
``share_temporary_files`` lets the work's user into files and folders that tests make in the usual ways.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
import unittest
from collections.abc import Callable
from typing import Any

from .boundary.proxies import BoundaryError, origin_of
from .judged_files import read_no_other

_PROGRAMS = frozenset(
    (
        "subprocess.Popen",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "os.fork",
        "os.forkpty",
        "pty.spawn",
    )
)

_LIBRARIES = {"ctypes.dlopen": 0, "import": 1}
"""Which argument of the event is the file."""
_WRITABLE = ("/tmp/", "/dev/shm/", "/var/tmp/")
_RUN_TEXT = frozenset(("code", "doctest", "logging.config"))
"""Modules that run what they read as code, whoever wrote it."""
_OWN_TEXT = frozenset(("collections", "dataclasses", "unittest.mock"))
"""Modules that make code of names alone, which they check."""
_IMPORTS = "<frozen importlib._bootstrap>"
_LOADERS = frozenset(("importlib._bootstrap_external", "_frozen_importlib_external", "zipimport", "runpy"))
"""Modules that read files as code. What they read may name any other file as its own."""
_TIMED_CALLS = (("_stmt()", "pass"), ("_stmt()", "_setup()"))
_IN_HAND = (tuple, list)


def refuse_programs(work: str, tests: str, shared: str) -> None:
    """From now on this process starts no program, unpickles nothing, loads no library and runs no code of a folder
    that the work can write to, reads there what lies there, and the files of ``tests`` run no text as code."""
    own = tests.rstrip("/") + "/"
    judges = (own, os.path.dirname(os.path.abspath(__file__)) + "/")
    folders = [each for folder in (work, shared) for each in (folder.rstrip("/"), os.path.realpath(folder))]
    theirs = (*(f"{folder}/" for folder in folders), *_WRITABLE)

    def is_theirs(path: str) -> bool:
        """By whatever name: ``main.py`` and ``/proc/self/cwd/main.py`` are the work's, too."""
        names = (os.path.abspath(path), os.path.realpath(path))
        return any(name.startswith(theirs) and not name.startswith(judges) for name in names)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _PROGRAMS:
            raise BoundaryError(
                f"the hidden tests start a program themselves ({event}): it would run as the user that judges. "
                "Start the work's programs by `turnstile_tests.run`, or mark the task `trust: in_process`"
            )
        if event == "pickle.find_class":
            raise BoundaryError(
                "the hidden tests unpickle: what they read could be the work's, and run as the user that "
                "judges. Read JSON, or mark the task `trust: in_process`"
            )
        if event == "open" and _opens(sys._getframe(1)) in _LOADERS and is_theirs(str(args[0])):
            raise BoundaryError(
                f"the hidden tests run {args[0]} in their own process. Import it, start it by "
                "`turnstile_tests.run`, or mark the task `trust: in_process`"
            )
        library = str(args[_LIBRARIES[event]]) if event in _LIBRARIES else ""
        if "/" in library and is_theirs(library):  # else it is looked for where the system has its own
            raise BoundaryError(
                f"the hidden tests load {library} into their own process. Import it as one of "
                "the work's modules, or mark the task `trust: in_process`"
            )
        if event == "sqlite3.enable_load_extension" and args[1]:
            raise BoundaryError("a database of the hidden tests may not load libraries (sqlite3 extensions)")
        if event == "exec" and sys._getframe(1).f_code.co_filename.startswith(own):
            raise BoundaryError(
                "the hidden tests run a text as code (exec, eval) in their own process: it could be the work's. "
                "Import the work, or mark the task `trust: in_process`"
            )
        if event == "exec" and _may_be_the_works(args[0], sys._getframe(1), own):
            raise BoundaryError(
                f"{sys._getframe(1).f_globals.get('__name__')} would run a text as code in the hidden tests' own "
                "process (annotations, examples of a docstring), and it could be the work's. Compare the text, or "
                "mark the task `trust: in_process`"
            )
        if event == "exec" and isinstance(args[0], types.CodeType) and _is_of_file(args[0], is_theirs):
            raise BoundaryError(
                f"the hidden tests run {args[0].co_filename} in their own process. Import it, start it by "
                "`turnstile_tests.run`, or mark the task `trust: in_process`"
            )

    sys.addaudithook(hook)
    read_no_other(theirs, judges)


def _opens(frame: types.FrameType | None) -> str | None:
    """Name of the module that opens a file: not ``judged_files``, by way of which all do."""
    while frame is not None and frame.f_globals.get("__name__") == read_no_other.__module__:
        frame = frame.f_back
    return None if frame is None else frame.f_globals.get("__name__")


def _is_of_file(code: types.CodeType, where: Callable[[str], bool]) -> bool:
    return not code.co_filename.startswith("<") and where(code.co_filename)


def _may_be_the_works(code: Any, caller: types.FrameType, own: str) -> bool:
    """True if a library, which a hidden test has called with an object of the work, runs text as code: that of the
    object's annotations, say (``typing.get_type_hints``). Text that it runs when it is imported is its own."""
    module = caller.f_globals.get("__name__")
    if not isinstance(code, types.CodeType) or not code.co_filename.startswith("<") or module in _OWN_TEXT:
        return False
    if module in _RUN_TEXT:
        return True
    if module == "timeit":  # its own template: around the calls that it puts in the place of functions, or a text
        return (caller.f_locals.get("stmt"), caller.f_locals.get("setup")) not in _TIMED_CALLS
    frame: types.FrameType | None = caller
    while (
        frame is not None and frame.f_code.co_filename != _IMPORTS and not frame.f_code.co_filename.startswith(own)
    ):
        if any(_of_the_work(value) for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


def _of_the_work(value: Any) -> bool:
    """Also a function that wraps one of the work (``functools.wraps``), and what holds an object of the work."""
    held = value if type(value) in _IN_HAND else (value,)
    wrapped = [vars(each).get("__wrapped__") for each in held if isinstance(each, types.FunctionType)]
    return any(origin_of(each) is not None for each in (*held, *wrapped))


def refuse_proxies_as_sets() -> None:
    """``assertSetEqual`` asks its first argument for the difference, which an object of the work would choose."""
    plain: Any = unittest.TestCase.assertSetEqual

    def as_set(value: Any) -> Any:
        origin = origin_of(value)
        if origin is None:
            return value
        if origin.copies not in ("set", "frozenset"):
            raise BoundaryError(f"an object of the work ({type(value).__qualname__}) was compared as a set")
        return origin.peer.operators.plain(value)

    def assert_set_equal(self: Any, set1: Any, set2: Any, msg: Any = None) -> None:
        plain(self, as_set(set1), as_set(set2), msg)

    unittest.TestCase.assertSetEqual = assert_set_equal  # type: ignore[method-assign]


def share_temporary_files(folder: str) -> None:
    """Temporary files and folders of this process are open to all: what a test writes there is meant for the work.
    The hidden tests themselves lie elsewhere."""
    os.umask(0)
    if os.path.isdir(folder):
        tempfile.tempdir = os.environ["TMPDIR"] = folder
    make_folder, make_file = tempfile.mkdtemp, vars(tempfile)["_mkstemp_inner"]

    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        folder = make_folder(*args, **kwargs)
        # Where the folder above is the work's to write to, a link may stand there by now.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(fd, 0o777)
        finally:
            os.close(fd)
        return folder

    def mkstemp(*args: Any, **kwargs: Any) -> Any:
        fd, path = make_file(*args, **kwargs)
        os.fchmod(fd, 0o666)
        return fd, path

    tempfile.mkdtemp = mkdtemp
    vars(tempfile)["_mkstemp_inner"] = mkstemp
