"""Finds, in the text of hidden tests, where they would run the work as the user that judges it.

For ``turnstile tasks validate``, of a ``runner: command`` with ``trust: boundary``. It sees what is written
plainly: Python that imports ``subprocess`` or the like, or what a folder added to ``sys.path`` holds, shell lines
that start an interpreter or ``./program``.
Tests of ``unittest`` and ``pytest`` are stopped when they run (``inside/precautions.py``)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from turnstile_server.tasks.model import HiddenTests

_MODULES = frozenset(("subprocess", "multiprocessing", "pty", "runpy", "pickle", "shelve", "marshal"))
_FUNCTIONS = re.compile(r"system|popen|fork(pty)?|(exec|spawn)[lv]p?e?|posix_spawnp?")
_IMPORTS = frozenset(("import_module", "spec_from_file_location", "SourceFileLoader", "SourcelessFileLoader"))
_BUILTINS = frozenset(("exec", "eval", "__import__"))
_BEFORE = r"(?:^|[;&|({!`]|\b(?:if|then|elif|else|do|while|until|exec|env|time|timeout\s+\S+)\b)\s*"
_STARTED = re.compile(
    _BEFORE + r"(?P<what>(?:ba|da|z)?sh|python[\d.]*|node|perl|ruby|make|\./\S+|\"?\$\{?PWD\}?/\S+)(?=\s|$)"
)
_OWN = re.compile(r"\{tests\}|\$0|\$\{0|dirname|\s-c\s")
"""A line that starts a file of the tests, or text of its own."""


def runs_the_work(tests: HiddenTests, files: Mapping[str, bytes]) -> list[str]:
    """One sentence for each place."""
    if tests.trust != "boundary" or tests.runner != "command":
        return []
    found = []
    inline = {"tests.command": "\n".join(tests.command[1:])} if {"-c"} & set(tests.command) else {}
    texts = {**{path: data.decode(errors="replace") for path, data in sorted(files.items())}, **inline}
    for path, text in texts.items():
        if path.endswith(".py"):
            places = _in_python(text)
        elif path in inline or (path.endswith((".sh", ".bash")) or text.startswith("#!/bin/")):
            places = _in_shell(text)
        else:
            continue
        found += [
            f"{path}:{line}: {what} would run as the user that judges; use `turnstile_tests.run` or `$AS_WORK`, "
            "or mark the task `trust: in_process`"
            for line, what in places
        ]
    return found


def _in_python(text: str) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # the run itself tells of this
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in _MODULES:
                    yield node.lineno, f"what `{name}` starts or reads"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if _FUNCTIONS.fullmatch(node.attr):
                yield node.lineno, f"what `os.{node.attr}` starts"
        elif isinstance(node, ast.Call) and _brings_modules(node) and "__file__" not in ast.unparse(node):
            yield node.lineno, f"what `{ast.unparse(node.func)}` brings in"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BUILTINS:
            yield node.lineno, f"what `{node.func.id}` runs"


def _brings_modules(node: ast.Call) -> bool:
    """Whether it imports by a name or from a folder that are not the check's own, as far as its text shows."""
    name = ast.unparse(node.func)
    return name.startswith("sys.path.") or name.rpartition(".")[2] in _IMPORTS


def _in_shell(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.strip()
        if code.startswith("#") or _OWN.search(code):
            continue
        started = _STARTED.search(code)
        if started is not None:
            yield number, f"what `{started['what']}` starts"
