"""The report of a certification: in the shape of OpenEnv's validation report, with lines for tasks beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turnstile_server.grading.certification.check_result import CheckedTask, CheckResult, CheckStatus

SCHEMA = "1"
POLICY = "v2"
"""The policy of OpenEnv 0.10 that the ids are of."""
LEVELS = (2, 3, 4)
"""runtime, semantic and statistical."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was checked, and what came out."""

    target: str
    """The sources, as they were given."""
    source_digest: str
    """Of the tasks that were checked, with their files."""
    task_ids: Sequence[str]
    tasks_in_source: int
    results: Sequence[CheckResult]
    checked: Sequence[CheckedTask]
    manifest: Path | None = None

    @property
    def verdict(self) -> str:
        """``fail`` for a check that failed or could not be made; ``warn`` where something was left unchecked."""
        found = {each.status for each in self.results}
        if found & {CheckStatus.FAIL, CheckStatus.ERROR}:
            return "fail"
        return "warn" if any(each.status is CheckStatus.SKIP and each.applies for each in self.results) else "pass"

    def as_json(self) -> dict[str, Any]:
        return {
            "report_schema_version": SCHEMA,
            "tool": "turnstile openenv certify",
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": self.target,
            "source_digest": self.source_digest,
            "manifest_sha256": None if self.manifest is None else manifest_digest(self.manifest),
            "policy_version": POLICY,
            "lane": "hub",
            "levels_run": list(LEVELS),
            "tasks_in_source": self.tasks_in_source,
            "task_ids": list(self.task_ids),
            "results": [_result(each) for each in self.results],
            "verdict": self.verdict,
            "task_results": [_line(each) for each in self.checked],
        }

    def write(self, path: Path) -> None:
        """Raises OSError."""
        path.write_text(json.dumps(self.as_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def manifest_digest(manifest: Path) -> str:
    """Binds a certificate to the manifest that it was made for. Raises OSError."""
    return hashlib.sha256(manifest.read_bytes()).hexdigest()


def _result(result: CheckResult) -> Mapping[str, Any]:
    """The fields of OpenEnv's ``CheckResult``, which takes no others."""
    return {name: value for name, value in asdict(result).items() if name != "applies"}


def _line(checked: CheckedTask) -> Mapping[str, Any]:
    finding = checked.finding
    return {
        "task_id": checked.task_id,
        "check_id": checked.check_id,
        "status": finding.status,
        "applies": finding.applies,
        "measured": dict(finding.measured),
        "evidence": list(finding.evidence),
        "duration_s": checked.duration_s,
    }
