"""Finds, in the text of hidden tests, where they would run the work as the user that judges it.

For ``turnstile tasks validate``, of a ``runner: command`` with ``trust: boundary``. It sees what is written
plainly: Python that imports ``subprocess`` or the like, or what a folder added to ``sys.path`` holds, shell lines
that start an interpreter or ``./program``.
Tests of ``unittest`` and ``pytest`` are stopped when they run (``inside/precautions.py``)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping

from turnstile_server.tasks.hidden_tests import HiddenTests

_MODULES = frozenset(("subprocess", "multiprocessing", "pty", "runpy", "pickle", "shelve", "marshal"))
_FUNCTIONS = re.compile(r"system|popen|fork(pty)?|(exec|spawn)[lv]p?e?|posix_spawnp?")
_IMPORTS = frozenset(("import_module", "spec_from_file_location", "SourceFileLoader", "SourcelessFileLoader"))
_PATH = "sys.path"
_ADDED = frozenset((f"{_PATH}.insert", f"{_PATH}.append", f"{_PATH}.extend"))
_BRINGING = (ast.Call, ast.Assign, ast.AugAssign)
_BUILTINS = frozenset(("exec", "eval", "__import__"))
_BEFORE = r"(?:^|[;&|({!`]|\b(?:if|then|elif|else|do|while|until|exec|env|time|timeout\s+\S+)\b)\s*"
_STARTED = re.compile(
    _BEFORE + r"(?P<what>(?:ba|da|z)?sh|python[\d.]*|node|perl|ruby|make|git|\./\S+|\"?\$\{?PWD\}?/\S+)(?=\s|$)"
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
    own = _own_places(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in _MODULES:
                    yield node.lineno, f"what `{name}` starts or reads"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if _FUNCTIONS.fullmatch(node.attr):
                yield node.lineno, f"what `os.{node.attr}` starts"
        elif isinstance(node, _BRINGING) and (what := _brought_in(node)) is not None:
            if not _names(node) & own and not _is_standard(node):
                yield node.lineno, f"what `{what}` brings in"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BUILTINS:
            yield node.lineno, f"what `{node.func.id}` runs"


def _own_places(tree: ast.AST) -> set[str]:
    """``__file__``, and the names that are given what is made of it: ``HERE = Path(__file__).parent``."""
    own = {"__file__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _names(node.value) & own:
            own |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return own


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _brought_in(node: ast.Call | ast.Assign | ast.AugAssign) -> str | None:
    """The name of what imports by a name, or adds a folder to import from, in the node; None: nothing does."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name if name in _ADDED or name.rpartition(".")[2] in _IMPORTS else None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return next((_PATH for each in targets if ast.unparse(each).split("[")[0] == _PATH), None)


def _is_standard(node: ast.AST) -> bool:
    """A call that names a module of the standard library in its text."""
    first = node.args[0] if isinstance(node, ast.Call) and node.args else None
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return False
    return first.value.split(".")[0] in sys.stdlib_module_names


def _in_shell(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.strip()
        if code.startswith("#") or _OWN.search(code):
            continue
        started = _STARTED.search(code)
        if started is not None:
            yield number, f"what `{started['what']}` starts"
