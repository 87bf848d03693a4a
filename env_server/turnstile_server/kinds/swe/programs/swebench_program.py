"""Scripts, log parsers and rules of resolution of SWE-bench (5.0). Runs in the Python that has ``swebench``.

A request has ``do`` (``script`` or ``report``), a ``row`` in the package's own format, and ``log`` for a report.
All is the package's own, but for the checks that can be made from outside of a log: whether it contradicts itself.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../integrations/programs"))

from program_lines import Line, serve

_FINAL = re.compile(r"^(?:=+ )?(\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.:]+ ?s", re.MULTILINE)
"""pytest's last line, with its counts."""
_PASSED = re.compile(r"(\d+) passed")
_GOOD = ("PASSED", "XFAIL", "SKIPPED")
_SHOWN = 5


class Package:
    """The parts of ``swebench`` that are used."""

    def __init__(self) -> None:
        constants = importlib.import_module("swebench.harness.constants")
        self.start: str = constants.START_TEST_OUTPUT
        self.end: str = constants.END_TEST_OUTPUT
        self.exit_code: str = constants.TEST_EXIT_CODE
        self.parsers: dict[str, Any] = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
        self.report = importlib.import_module("swebench.harness.grading").get_eval_report
        self.spec = importlib.import_module("swebench.harness.utils").make_test_spec

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        row = request["row"]
        if row["log_parser"] not in self.parsers:
            raise ValueError(f"it has no log parser {row['log_parser']!r}")
        spec = self.spec(row)
        if request["do"] == "script":
            return {"script": spec.eval_script}
        return self.judged(spec, request["log"])

    def judged(self, spec: Any, log: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "test_output.txt")
            path.write_text(log, encoding="utf-8")
            prediction = {"instance_id": spec.instance_id, "model_patch": "", "model_name_or_path": "work"}
            report = self.report(spec, prediction, str(path), True)[spec.instance_id]
        found = report["patch_successfully_applied"]
        tests = report.get("tests_status", {})
        outcomes = self.parsers[spec.log_parser](self.section(log), spec) if found else {}
        failed = [
            [test, group, outcomes.get(test, "MISSING")]
            for group in ("FAIL_TO_PASS", "PASS_TO_PASS")
            for test in tests.get(group, {}).get("failure", ())
        ]
        return {
            "graded": found,
            "resolved": report["resolved"],
            "failed": failed,
            "infra_failure": report.get("infra_failure_reason"),
            "doubts": self.doubts(spec, log) if report["resolved"] else [],
        }

    def section(self, log: str) -> str:
        """The part of a log that the package reads: between the first two markers."""
        _, _, rest = log.partition(self.start)
        return rest.partition(self.end)[0]

    def doubts(self, spec: Any, log: str) -> list[str]:
        """Contradictions in a log that resolves the instance, a sentence for each."""
        found = []
        for marker in (self.start, self.end, self.exit_code):
            # The status is echoed, so bash's trace has it, too.
            wanted = spec.eval_script.count(marker) * (2 if marker == self.exit_code else 1)
            if log.count(marker) > wanted:
                found.append(f"the marker {marker!r} stands {log.count(marker)} times in the log, not {wanted}")
        parser, section = self.parsers[spec.log_parser], self.section(log)
        reports: dict[str, list[str]] = {}
        for line in section.split("\n"):
            for test, status in parser(line, spec).items():
                reports.setdefault(test, []).append(status)
        # A parser that reads several lines together does not say what one of them reports.
        by_line = {test: each[-1] for test, each in reports.items()} == parser(section, spec)
        if by_line:
            for test in (*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS):
                said = reports.get(test, [])
                if len({status in _GOOD for status in said}) > 1:
                    found.append(f"{test} is reported as {' and as '.join(dict.fromkeys(said))}")
        if spec.log_parser.startswith("parse_log_pytest"):
            finals = _FINAL.findall(section)
            passed = sum(int(count) for final in finals for count in _PASSED.findall(final))
            said_passed = sum("PASSED" in statuses for statuses in reports.values())
            if not finals:
                found.append("pytest did not report that it was done")
            elif by_line and said_passed > passed:
                found.append(f"{said_passed} tests are reported as passed, of which pytest counts {passed}")
        return found[:_SHOWN]


def main() -> int:
    line = Line()
    package = Package()

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        return package.answer(request)

    return serve(line, version("swebench"), answer, lambda function, request: asyncio.run(function(request)))


if __name__ == "__main__":
    sys.exit(main())
