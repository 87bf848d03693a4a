"""The packages whose tasks are a source, and our programs that run in their Pythons."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from turnstile_server.integrations.package_process import PackageProgram

_PROGRAMS = Path(__file__).parent / "programs"

PACKAGES: Final = {
    program.kind: program
    for program in (
        PackageProgram("inspect", "inspect-ai==0.3.285", _PROGRAMS / "inspect_program.py"),
        PackageProgram("verifiers", "verifiers==0.4.0", _PROGRAMS / "verifiers_program.py"),
    )
}
