"""A package that declares parts, as an installer leaves it: its metadata in a folder of ``sys.path``."""

from __future__ import annotations

from pathlib import Path

import pytest


def declare(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    group: str,
    package: str = "acme-parts",
    /,
    **targets: str,
) -> None:
    """A package ``package`` 1.2, found in a folder of its own below ``folder``, with an entry point per target."""
    site = folder / f"{package}-{group}"
    metadata = site / f"{package.replace('-', '_')}-1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    lines = [f"{name.replace('_', '-')} = {target}" for name, target in targets.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    monkeypatch.syspath_prepend(site)
