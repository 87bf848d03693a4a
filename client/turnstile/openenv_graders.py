"""Graders of OpenEnv's validator that read the certificate of ``turnstile openenv certify``.

OpenEnv 0.10 names these checks in its policy and has no graders for them. It loads graders of other packages from
the entry points of ``openenv.validation.graders`` (``GraderRegistry.load_entry_points``), though its own
``openenv validate`` does not call that yet. These measure nothing themselves: the certificate lies in the package
(``validation/certificate.json``), or where ``TURNSTILE_CERTIFICATE`` names it.

What must hold: a certificate counts only for the manifest that it was made with. Without one, or with another's, a
check is skipped and says why; it never passes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

try:
    # Not by name: openenv is not installed where this is checked, because its MCP is not the server's.
    _report: Final[Any] = import_module("openenv.validation.report")
    _types: Final[Any] = import_module("openenv.validation.types")
except ImportError as error:
    raise ModuleNotFoundError(
        f"turnstile.openenv_graders needs openenv 0.10 or later: pip install 'openenv>=0.10' ({error})",
        name="openenv",
    ) from error

CERTIFICATE: Final = Path("validation", "certificate.json")
VARIABLE: Final = "TURNSTILE_CERTIFICATE"
MANIFEST: Final = "openenv.yaml"
_TOOL: Final = "turnstile openenv certify"
_MAKE: Final = f"turnstile openenv certify TASKS --manifest {MANIFEST} --json {CERTIFICATE.as_posix()}"


class NoCertificate(Exception):
    """There is no certificate for this package; the message says why."""


class CertificateGrader:
    """One check, answered from the certificate: OpenEnv's ``Grader``."""

    requires_capabilities: frozenset[str] = frozenset()
    requires_provider: frozenset[Any] = frozenset()
    depends_on: tuple[str, ...] = ()

    def __init__(self, check_id: str) -> None:
        self.check_id = check_id
        self.level = _types.Level[check_id.partition(".")[0].upper()]

    def applies_to(self, manifest: Any) -> bool:
        return True

    def run(self, subject: Any) -> Any:
        """Its ``CheckResult``: the certificate's, with a first line of evidence that says whose it is."""
        began = time.monotonic()
        try:
            path, certificate = _certificate_of(Path(subject.root))
            found = _result_in(certificate, self.check_id)
        except NoCertificate as reason:
            skip = _types.CheckStatus.SKIP
            return _report.CheckResult(
                check_id=self.check_id,
                status=skip,
                evidence=[str(reason)],
                remediation=f"run: {_MAKE}",
                duration_s=time.monotonic() - began,
            )
        whose = (
            f"measured by `{_TOOL}` at {certificate.get('created_at')} on {len(certificate.get('task_ids', ()))} "
            f"tasks of {certificate.get('target')}, and read from {path}"
        )
        return _report.CheckResult.model_validate({**found, "evidence": [whose, *found.get("evidence", ())]})


def _certificate_of(root: Path) -> tuple[Path, Mapping[str, Any]]:
    """Raises NoCertificate."""
    path = Path(os.environ.get(VARIABLE) or root / CERTIFICATE)
    try:
        found = json.loads(path.read_bytes())
        manifest = hashlib.sha256((root / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise NoCertificate(f"there is no {error.filename}") from error
    except (OSError, ValueError) as error:
        raise NoCertificate(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("tool") != _TOOL:
        raise NoCertificate(f"{path} is no certificate of `{_TOOL}`")
    if found.get("manifest_sha256") != manifest:
        raise NoCertificate(f"{path} was made for another {MANIFEST}, or without --manifest")
    return path, found


def _result_in(certificate: Mapping[str, Any], check_id: str) -> Mapping[str, Any]:
    for result in certificate.get("results", ()):
        if isinstance(result, dict) and result.get("check_id") == check_id:
            return result
    raise NoCertificate(f"the certificate says nothing of {check_id}")


ORACLE_MAX: Final = CertificateGrader("semantic.oracle_max")
FLOOR_GAP: Final = CertificateGrader("semantic.floor_gap")
CANARY_FLOOR: Final = CertificateGrader("semantic.canary_floor")
NO_SOLUTION_LEAKAGE: Final = CertificateGrader("semantic.no_solution_leakage")
VERIFIER_DETERMINISM: Final = CertificateGrader("semantic.verifier_determinism")
EPISODE_DETERMINISM: Final = CertificateGrader("runtime.episode_determinism")
SEED_CONTROL: Final = CertificateGrader("runtime.seed_control")
EPISODE_ISOLATION: Final = CertificateGrader("runtime.episode_isolation")
TOOL_DECLARATION: Final = CertificateGrader("runtime.tool_declaration_accuracy")
TASK_DECLARATION: Final = CertificateGrader("runtime.task_declaration_accuracy")
ADVERSARIAL_FLOOR: Final = CertificateGrader("statistical.adversarial_floor")
