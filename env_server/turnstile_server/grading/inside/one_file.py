"""Runs the expected tests of one hidden file. Started by run_tests.py, which reads what it reports.

With ``trust: boundary`` nothing of the work runs in this process: its modules are proxies (``boundary``). With
``trust: in_process`` the work is imported here. What must hold then: all that is needed to run and report is
imported before the work can be, from the standard library and the image's packages; the work's folders come last
on the path, so a module of the work takes no other's name; before each test counts, ``unittest`` (or pytest) and
the builtins must still be what they were.

In both, tests that must fail (canaries) run among the others.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import sys
import tempfile
import types
import unittest
import unittest.async_case
import unittest.mock
from collections.abc import Callable
from typing import Any

from . import launch
from .boundary.importer import WorkImporter, names_of
from .boundary.work_process import WorkProcess
from .precautions import refuse_programs, refuse_proxies_as_sets, share_temporary_files
from .reports import PytestReports, Reporter, described, result_class, sender
from .tamper import TamperCheck, watch_over

FOR_TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "for_tests")


class TestRun:
    """One file's tests. ``work`` None: the work is imported into this process."""

    __test__ = False

    def __init__(self, config: dict[str, Any], reporter: Reporter, work: WorkProcess | None) -> None:
        self.config = config
        self.reporter = reporter
        self.work = work
        self.watch = TamperCheck()

    def broken(self) -> str | None:
        return None if self.work is not None else self.watch.broken()

    def kept(self) -> str | None:
        """Takes an assertion that failed where the work had called the test, and that the work kept from it."""
        error = None if self.work is None or not self.work.started else self.work.failures.take()
        if error is None:
            return None
        return f"the work swallowed an assertion that failed: {described(type(error), error)}"

    def echo(self, value: str) -> Any:
        """``value``, by way of the work's process where there is one."""
        if self.work is None or not self.work.started:
            return value
        return self.work.peer.ask("echo", value)

    def canary(self, name: str) -> Callable[[], None]:
        """A check that fails: what comes back is not another random text."""
        other = secrets.token_hex(16)

        def check() -> None:
            unittest.TestCase().assertEqual(self.echo(name), other)  # noqa: PT009 - it is unittest that is tried

        return check


class Canary(unittest.TestCase):
    """A test that must fail."""

    def __init__(self, name: str, check: Callable[[], None]) -> None:
        super().__init__("test")
        self._name = name
        self._check = check

    def id(self) -> str:
        return self._name

    def test(self) -> None:
        self._check()


def run_unittest(run: TestRun) -> None:
    config = run.config
    kind = result_class(run.reporter, run.broken, run.kept)
    result = kind()
    watch_over(run.watch, "unittest")
    run.watch.add_class(kind)
    module = load(config["name"], config["path"])
    replaced = run.broken()
    if replaced is not None:
        run.reporter.note("on import, " + replaced)
        return
    tests: list[unittest.TestCase] = []
    for test in config["expected"]:
        klass, method = test.rsplit(".", 2)[1:]
        case = getattr(module, klass, None)
        if isinstance(case, type) and issubclass(case, unittest.TestCase) and hasattr(case, method):
            tests.append(case(method))
    first, *rest = (Canary(name, run.canary(name)) for name in config["canaries"])
    cases = [first, *tests, *rest]
    run.reporter.plan([case.id() for case in cases])
    unittest.TestSuite(cases).run(result)


def load(name: str, path: str) -> types.ModuleType:
    if "." in name:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_pytest(run: TestRun, pytest: Any) -> None:
    config = run.config
    # Rewriting is off: it would read and write beside the tests, and plain assertions say enough.
    options = ["--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", config["tests"], "-q"]
    options += ["--import-mode", "append", "--assert", "plain"]
    canaries = {name: run.canary(name) for name in config["canaries"]}

    def on_start() -> None:
        watch_over(run.watch, "_pytest", "pluggy", "unittest")

    pytest.main(
        [*options, config["path"]], plugins=[PytestReports(run.reporter, run.broken, run.kept, on_start, canaries)]
    )


def import_pytest(site: list[str]) -> Any:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.extend(site)
    pytest = importlib.import_module("pytest")
    importlib.import_module("_pytest.assertion.rewrite")
    del sys.path[len(sys.path) - len(site) :]
    return pytest


def own_folder_for_pytest(shared: str) -> None:
    """``tmp_path`` is for the work, too. The folder above is this process's, under a name that nobody can have
    taken before."""
    if os.path.isdir(shared):
        above = tempfile.mkdtemp(prefix="pytest-", dir=shared)
        os.chmod(above, 0o711)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = above
    factory = importlib.import_module("_pytest.tmpdir").TempPathFactory
    make, base = factory.mktemp, factory.getbasetemp

    def mktemp(self: Any, *args: Any, **kwargs: Any) -> Any:
        folder = make(self, *args, **kwargs)
        folder.chmod(0o777)
        return folder

    def getbasetemp(self: Any) -> Any:
        folder = base(self)
        for each in (folder, folder.parent):
            each.chmod(0o711)
        return folder

    factory.mktemp, factory.getbasetemp = mktemp, getbasetemp


def prepare_boundary(config: dict[str, Any], pytest: Any) -> WorkProcess:
    """Everything that keeps the work out of this process."""
    work = WorkProcess(launch.launch, [*config["site"], *config["work_paths"]], keeps_arguments=config["keeps"])
    taken = {name.split(".")[0] for name in sys.modules}
    WorkImporter(work, names_of(config["work_paths"]) - taken).install()
    if pytest is not None:
        own_folder_for_pytest(config["shared"])
    share_temporary_files(config["shared"])
    refuse_proxies_as_sets()
    refuse_programs(config["work"], config["tests"], config["shared"])
    return work


def main() -> int:
    config = json.loads(sys.stdin.buffer.readline())
    answers = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(config["report"], False)
    reporter = Reporter(sender(config["report"], bytes.fromhex(config.pop("key"))), answers)
    end = os._exit
    sys.argv = [""]
    pytest = import_pytest(config["site"]) if config["runner"] == "pytest" else None
    sys.path += [config["tests"], FOR_TESTS, *config["site"]]
    work: WorkProcess | None = None
    try:
        if config["trust"] == "boundary":
            work = prepare_boundary(config, pytest)
        else:
            sys.path += config["work_paths"]
        run = TestRun(config, reporter, work)
        if pytest is None:
            run_unittest(run)
        else:
            run_pytest(run, pytest)
    except BaseException as error:  # noqa: BLE001 - whatever the work raises on import is its own failure
        reporter.note(described(type(error), error))
    reporter.done(changed=work is not None and work.changed_arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if work is not None:
        work.end()
    end(0)
    return 0
